"""Passes of `Steps` over Horovod: what `DistributedOptimizer` gives where own steps are exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.errors import ArgumentError
from horovod_sparse.feedback import Recipe, recipe_for
from horovod_sparse.plans import Plan, make_plan
from horovod_sparse.tensors.binding import Binding, without_own
from horovod_sparse.tensors.models import ENTRY, checked_entry, claim
from horovod_sparse.torch.driver import HorovodEngine, OverHorovod
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.schedules import Schedule
from horovod_sparse.training.settings import Settings


class StepSynchronizer(OverHorovod, Binding):
    """Binds an optimizer to passes over Horovod; its `state_dict` has this rank's exact entry, too."""

    engine: HorovodEngine

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        recipe: Recipe,
        settings: Settings,
        schedule: Schedule,
        process_set: Any,
        groups: Any,
    ) -> None:
        engine = HorovodEngine(optimizer, names, recipe, process_set, settings.deadline_seconds)
        self._groups, self.process_set = groups, process_set
        super().__init__(optimizer, engine, recipe, settings, schedule)
        claim(self, [one for group in optimizer.param_groups for one in group["params"]])
        self.meet()

    def first_plan_of(self, facts: Facts) -> Plan:
        groups = None if self.facts else self._groups  # they are of the parameters that were there
        return make_plan(
            facts, groups=groups, bucket_bytes=self.settings.bucket_bytes if groups is None else None
        )

    def _after_saving(self, optimizer: Any, saved: dict[str, Any]) -> None:
        super()._after_saving(optimizer, saved)
        saved |= {"state": without_own(saved["state"]), ENTRY: self.save()}

    def _after_loading(self, optimizer: Any) -> None:
        entry = self._entry
        super()._after_loading(optimizer)
        if entry is not None:
            self.load_state_dict(entry)

    def _before_loading(self, optimizer: Any, saved: dict[str, Any]) -> None:
        self._entry = saved.get(ENTRY)
        if self._entry is not None:
            checked_entry(self, self._entry)
        super()._before_loading(optimizer, saved)

    def retire(self) -> None:
        """Returns the optimizer to PyTorch, since another one was made for these parameters."""
        self.detach()


def bind_optimizer(
    optimizer: Any,
    named_parameters: Sequence[tuple[str, torch.Tensor]] | None,
    recipe: Recipe,
    settings: Settings,
    every: int,
    delay: int,
    groups: Any,
) -> Any:
    """Binds the optimizer to passes, and returns it with the methods that Horovod's users call besides.

    Gradients stay on their ranks until `step`, so `synchronize` has nothing to do, and they may be clipped
    or accumulated before.
    """
    for name in ("merging", "tensor_selection", "profile", "max_grad_norm"):
        if (given := getattr(settings, name)) is not None:
            remedy = "torch.nn.utils.clip_grad_norm_ before step() clips" if name == "max_grad_norm" else ""
            remedy = remedy or "feedback='error' exchanges gradients"
            raise ArgumentError(name, given, f"None: this feedback exchanges steps; {remedy}")
    recipe = recipe_for(optimizer, recipe)
    names = {one: name for name, one in named_parameters or ()}
    process_set = optimizer.process_set
    made = StepSynchronizer(optimizer, names, recipe, settings, Schedule(every, delay), process_set, groups)
    optimizer._synchronizer, optimizer.telemetry = made, made.telemetry
    optimizer.finish, optimizer.common = made.finish, made.common
    optimizer.synchronize = lambda: None
    optimizer.skip_synchronize = contextlib.nullcontext
    optimizer.set_backward_passes_per_step = lambda passes: None
    return optimizer
