"""Own steps and local steps over Horovod: `DistributedOptimizer` binds the first, `LocalSteps` the second."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe, recipe_for
from horovod_sparse.plans import Plan, make_plan
from horovod_sparse.tensors.binding import Binding, without_own
from horovod_sparse.tensors.local_steps import LocalBinding, stepping_optimizer
from horovod_sparse.tensors.models import ENTRY, checked_entry, claim, trained_by
from horovod_sparse.torch.driver import HorovodEngine, construction_errors, hvd
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.schedules import LocalOptions, LocalSchedule, Schedule
from horovod_sparse.training.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StepSynchronizer(Binding):
    """Exchanges an optimizer's own steps over Horovod; `state_dict` returns this rank's exact state.

    The optimizer gets the methods that Horovod's users call besides. Gradients stay on their ranks until
    `step`, so `synchronize` has nothing to do, and they may be clipped or accumulated before.
    """

    engine: HorovodEngine

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Sequence[tuple[str, torch.Tensor]] | None,
        recipe: Recipe,
        settings: Settings,
        schedule: Schedule,
        groups: Any = None,
    ) -> None:
        recipe, names = recipe_for(optimizer, recipe), {one: name for name, one in named_parameters or ()}
        self._groups, self.process_set = groups, optimizer.process_set
        engine = HorovodEngine(optimizer, names, recipe, self.process_set, settings.deadline_seconds)
        super().__init__(optimizer, engine, recipe, settings, schedule)
        claim(self, [one for group in optimizer.param_groups for one in group["params"]])
        self.ensure_parts()
        optimizer._synchronizer, optimizer.telemetry = self, self.telemetry
        optimizer.finish, optimizer.common = self.finish, self.common
        optimizer.synchronize = lambda: None
        optimizer.skip_synchronize = contextlib.nullcontext
        optimizer.set_backward_passes_per_step = lambda passes: None

    def plan_for_new(self, facts: Facts) -> Plan:
        groups = None if self.facts else self._groups  # they are of the parameters that were there
        return make_plan(
            facts, groups=groups, bucket_bytes=self.settings.bucket_bytes if groups is None else None
        )

    def _state_dict_post_hook(self, optimizer: Any, saved: dict[str, Any]) -> None:
        super()._state_dict_post_hook(optimizer, saved)
        saved |= {"state": without_own(saved["state"]), ENTRY: self.state_dict()}

    def _load_state_dict_post_hook(self, optimizer: Any) -> None:
        entry = self._entry
        super()._load_state_dict_post_hook(optimizer)
        if entry is not None:
            self.load_state_dict(entry)

    def _load_state_dict_pre_hook(self, optimizer: Any, saved: dict[str, Any]) -> None:
        self._entry = saved.get(ENTRY)
        if self._entry is not None:
            checked_entry(self, self._entry)
        super()._load_state_dict_pre_hook(optimizer, saved)

    def retire(self) -> None:
        """Called when another optimizer is made for a parameter: later steps of this one raise."""
        if getattr(self.optimizer, "_horovod_sparse", None) is self:  # else the newer one is this optimizer
            self.release_optimizer()
            self.optimizer.register_step_pre_hook(_raise_if_retired)


def _raise_if_retired(optimizer: Any, *_: Any) -> None:
    if not hasattr(optimizer, "_horovod_sparse"):
        raise UnsupportedError(
            "a parameter of this optimizer was given to another DistributedOptimizer afterwards, which "
            "synchronizes it now: use that one"
        )


class LocalSteps(LocalBinding):
    """Local steps over Horovod: ranks train alone, and average their displacements every `every` steps.

        optimizer = torch.optim.AdamW(model.parameters())
        local = hvd.LocalSteps(optimizer, model, every=30, compression="sparseloco")

    Args:
        optimizer: an optimizer of PyTorch, not one of `DistributedOptimizer`.
        model: the module whose parameters the optimizer trains.
        every: H, local steps from one exchange to the next.
        process_set: the ranks that exchange.
        **options: see `horovod_sparse.ddp.LocalSteps`: `compression`, `outer`, `combine`, `delay`,
            `on_nonfinite`, `check_every` and `deadline_seconds`.

    Example:
        >>> import horovod_sparse.torch as hvd; hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> local = hvd.LocalSteps(optimizer, model, every=2, compression="topk:density=0.5")
        >>> for _ in range(4):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> local.step, local.taken
        (2, 0)
    """

    engine: HorovodEngine

    @construction_errors.publishing_errors
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        every: int,
        process_set: Any = hvd.global_process_set,
        **options: Unpack[LocalOptions],
    ) -> None:
        schedule, settings = LocalSchedule.of(every, options, "horovod_sparse.torch.LocalSteps")
        optimizer = stepping_optimizer(optimizer, model)
        if any(isinstance(one, torch.nn.parallel.DistributedDataParallel) for one in model.modules()):
            allowed = "its module, or horovod_sparse.ddp.LocalSteps"
            raise ArgumentError("model", "a DistributedDataParallel", allowed)
        names = {one: name for name, one in trained_by(optimizer, model).items()}
        if sharded := [name for one, name in names.items() if hasattr(one, "device_mesh")]:
            allowed = "a model of plain tensors; horovod_sparse.ddp.LocalSteps takes one of fully_shard"
            raise ArgumentError("model", f"{sharded[0]}, a DTensor", allowed)
        engine = HorovodEngine(*(optimizer, names, schedule.recipe), process_set, settings.deadline_seconds)
        super().__init__(optimizer, model, engine, schedule, settings)

    def _advance(self) -> None:
        """Continues the exchange in flight by one round in each step of the optimizer."""
        self.engine.advance()


def _raise_in_torch_state(local: LocalSteps) -> None:
    """Raises where `TorchState(local=...)` is made, which would broadcast rank 0's copy, without hooks."""
    raise UnsupportedError("LocalSteps cannot be in a TorchState: save and load it by hvd.save and hvd.load")


hvd.elastic.state.get_handler_registry().append((LocalSteps, _raise_in_torch_state))
