"""`LocalSteps` over torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from horovod_sparse.ddp.distributed_engine import DistributedEngine, telling_others
from horovod_sparse.ddp.steps import OverGroup, group_of, stop_synchronizing, wrappers_of
from horovod_sparse.tensors.local_steps import LocalBinding, stepping_optimizer
from horovod_sparse.training.schedules import LocalOptions, LocalSchedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LocalSteps(OverGroup, LocalBinding):  # type: ignore[misc]
    """Lets every rank train alone, and exchanges how far all have come every so many steps.

        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        local = ddp.LocalSteps(optimizer, model, every=30, compression="sparseloco")

    ``theta_r``: what H steps of the optimizer make of ``theta`` on rank r. Then
    ``theta <- theta - lr (mean + momentum v)``, the mean over ranks of ``theta - theta_r``, or of what a
    compression sends of it. See `horovod_sparse.training.local_steps`.

    The training loop stays as it is. Hooks count the steps that the optimizer has really taken, so passes
    that are accumulated, and steps that a `torch.amp.GradScaler` skips, do not count. Moments stay with their
    rank. A DistributedDataParallel synchronizes no gradients from now on, as within ``no_sync()``. A loop
    whose ranks may do different numbers of steps, or whose last round is not whole, ends with `finish`.

    Args:
        optimizer: any of PyTorch, which trains parameters of `model`.
        model: a module, or a DistributedDataParallel without a communication hook. All ranks begin with equal
            parameters, and all that are trained are this optimizer's, or another's that has LocalSteps, too.
            Its float buffers and counters (integers of one element) are averaged in every exchange.
        every: H, local steps from one exchange to the next.
        compression: a sparsifier, as text ("sparseloco" is made for this) or as a recipe; None for none.
        outer: "sgd" (rate 1), "nesterov" (0.7, 0.9; without a compression alone), or an `OuterStep`.
        combine: "senders": a mean is over those that have sent something at its position, as in SparseLoCo's
            program: the default where sums say who has sent what. "ranks": over all, by smaller steps.
        delay: steps that go on while an exchange is under way. What they learn is kept.
        clip: "median": no rank sends more than the median rank, by norm; with a compression.
        offload: whether common parameters and residual lie on the host, pinned where there is a device.
        process_group: the ranks that exchange; that of the DistributedDataParallel, or all, if left out. Of
            a model of `fully_shard` over ``mesh["shard"]`` those that have the same shard,
            ``mesh["replicate"].get_group()``: each exchanges its shard, and saves it.
        **options: see `horovod_sparse.training.settings.Settings`: `on_nonfinite`, `check_every` (exchanges)
            and `deadline_seconds`.

    Source: Douillard et al. 2023 (DiLoCo); Sarfi et al. 2025 (SparseLoCo).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        every: int,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[LocalOptions],
    ) -> None:
        with telling_others(process_group):
            schedule, settings = LocalSchedule.of(every, options, "horovod_sparse.ddp.LocalSteps")
            optimizer = stepping_optimizer(optimizer, model)
            wrappers = wrappers_of(model)
            if process_group is None or not wrappers:
                process_group = group_of(model, wrappers, process_group, "process_group")
            stop_synchronizing(wrappers)
            given = model, schedule.recipe, optimizer, process_group
            engine = DistributedEngine(*given, settings.deadline_seconds)
            super().__init__(optimizer, model, engine, schedule, settings)
