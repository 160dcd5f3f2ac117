"""`LocalSteps` over Horovod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from horovod.torch.elastic.state import StateHandler, get_handler_registry

from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensors.local_steps import LocalBinding, stepping_optimizer
from horovod_sparse.tensors.models import trained_by
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.driver import HorovodEngine, OverHorovod, construction_errors
from horovod_sparse.training.schedules import LocalOptions, LocalSchedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LocalSteps(OverHorovod, LocalBinding):
    """As `horovod_sparse.ddp.LocalSteps`, over Horovod: give it PyTorch's own optimizer.

        optimizer = torch.optim.AdamW(model.parameters())
        local = hvd.LocalSteps(optimizer, model, every=30, compression="sparseloco")

    In elastic training give the state this alone, ``TorchState(local=local)``, and count by `step`. Who stays
    keeps parameters, moments and residual, and exchanges at once what a lost rank has interrupted; who comes
    takes common parameters, the outer step's velocity and buffers from one that has come furthest. A lost
    rank's residual is lost.

    Args:
        optimizer: any of PyTorch, not made by `DistributedOptimizer`.
        model: the module whose parameters it trains.
        every: H, local steps from one exchange to the next.
        process_set: the ranks that exchange.
        **options: see `horovod_sparse.ddp.LocalSteps`: `compression`, `outer`, `combine`, `delay`, `clip`,
            `offload`, `on_nonfinite`, `check_every` and `deadline_seconds`.

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

    @construction_errors.telling
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
        """Begins each round of a coroutine in a step of the optimizer."""
        self.engine.advance()


class _Survivor(StateHandler):
    """Handles ``TorchState(local=local)``: survivors keep their state, new ranks take the common one."""

    def save(self) -> None:
        """Does nothing: survivors keep their state."""

    restore = save

    def sync(self) -> None:
        self.value.agree(as_first=True)


get_handler_registry().append((LocalSteps, _Survivor))
