"""Callbacks for the trainers of transformers and Lightning.

Accelerate needs none: ``horovod_sparse.ddp.attach(model, "best", optimizer)`` stands behind its ``prepare``.
"""

from __future__ import annotations

import os
from typing import Any

from horovod_sparse import ddp
from horovod_sparse.errors import UnsupportedError


def transformers_callback(compression: str = "best", **options: Any) -> Any:
    """Returns a callback that makes the ``Trainer`` of transformers synchronize sparse gradients.

    It attaches when training begins. Before the trainer evaluates or saves, ranks exchange what is in flight,
    so that rank 0 saves what all have; what it saves is enough to resume. A single process trains as it did.
    A launch whose trainers do not know each other raises `UnsupportedError`.

    Args:
        compression: a sparsifier, as text.
        **options: as of `horovod_sparse.ddp.attach`: `every`, `delay`, `replicas`, ...

    Example:
        ``Trainer(model, arguments, callbacks=[transformers_callback("best:density=0.01", delay=1)])``
    """
    import transformers

    class Sparse(transformers.TrainerCallback):
        sync: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if args.world_size > 1:
                self.sync = ddp.attach(given["model"], compression, given["optimizer"], **options)
            elif os.environ.get("WORLD_SIZE", "1") != "1":  # it trains so on CPUs, and says nothing
                raise UnsupportedError(
                    "each rank would train alone: on CPUs give TrainingArguments(use_cpu=True)"
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            comes = control.should_evaluate or control.should_save or control.should_training_stop
            if comes and self.sync is not None:
                self.sync.settle()

        on_epoch_end = on_step_end

    return Sparse()


def lightning_callback(compression: str = "best", **options: Any) -> Any:
    """Returns a callback that makes Lightning's ``Trainer`` synchronize sparse gradients.

    Every optimizer is attached; `syncs` has what `attach` returned for each.

    Example:
        ``Trainer(strategy="ddp", callbacks=[lightning_callback("best:density=0.01")])``
    """
    import lightning

    class Sparse(lightning.Callback):
        syncs: Any = ()

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            model, alone = trainer.strategy.model, trainer.world_size == 1
            optimizers = () if alone else trainer.optimizers
            self.syncs = [ddp.attach(model, compression, one, **options) for one in optimizers]

        def _settle(self, *_: Any) -> None:
            for sync in self.syncs:
                sync.settle()

        on_validation_start = on_train_epoch_end = on_train_end = _settle

        def state_dict(self) -> dict[str, Any]:
            """Called on all ranks at every save, before Lightning collects the optimizers' states."""
            self._settle()
            return {}

    return Sparse()
