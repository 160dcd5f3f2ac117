"""What a model is trained with: parts, what they hold back, what ranks agree upon, and checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from horovod_sparse.collectives import Synchronization
from horovod_sparse.ddp.bucket_gradient import BucketGradient
from horovod_sparse.ddp.communicator import Communicator
from horovod_sparse.ddp.planning import Layout, facts_of, plan_of
from horovod_sparse.ddp.state import checked_entry
from horovod_sparse.errors import ArgumentError, HorovodSparseError, UnsupportedError
from horovod_sparse.feedback import Recipe, resumed
from horovod_sparse.feedback.state import shared_digest
from horovod_sparse.frontend.agreement import Standing, Start, agreed_start, compared, settings
from horovod_sparse.frontend.collective_errors import raise_together
from horovod_sparse.frontend.compression import recipe_of
from horovod_sparse.frontend.levels import (
    Choose,
    agreed_topology,
    assumed_topology,
    by_cost,
    check_levels,
    gathered_shards,
    hold_elsewhere,
    own_place,
)
from horovod_sparse.frontend.momentum import refuse_double_momentum
from horovod_sparse.frontend.parts import assign_residuals, held_residuals
from horovod_sparse.frontend.shared_memory import agreed_memory
from horovod_sparse.frontend.state import load_entry, saved_entry, share_factor
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.pytorch.parts import Part, SparseBucket, parts_of

_log = logging.getLogger("horovod_sparse")


class _Launched:
    """What torchrun tells, as Horovod does: this rank's host, and its place there."""

    rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)

    @staticmethod
    def local_rank() -> int:
        return int(os.environ.get("LOCAL_RANK", dist.get_rank()))

    @staticmethod
    def local_size() -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    @staticmethod
    def is_homogeneous() -> bool:  # what stands for a host is its own, however many ranks it has
        return True

    @staticmethod
    def cross_rank() -> str:
        return os.environ.get("GROUP_RANK", socket.gethostname())


class Training:
    """An engine's side that lasts from step to step: see `horovod_sparse.frontend.engine.Engine`.

    Args:
        compression: a sparsifier, as text or as a recipe.
        optimizer: of all the model's parameters, if it shall tell learning rates.
        named_parameters: names for checkpoints and messages.
        process_group: of the ranks that synchronize; all ranks if left out.
        plan: which parameters form which bucket; that of the buckets that come if left out.
        levels: see `horovod_sparse.frontend.levels`.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnknownNameError: for a misspelt algorithm or argument.
    """

    def __init__(
        self,
        compression: str | Recipe,
        optimizer: torch.optim.Optimizer | None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        process_group: dist.ProcessGroup | None,
        plan: Plan | None,
        levels: str = "flat",
    ) -> None:
        check_levels(levels)
        recipe = recipe_of(compression) if isinstance(compression, str) else compression
        if not isinstance(recipe, Recipe):
            allowed = "a sparsifier, as text or as a recipe; for dense training leave the hook out"
            raise ArgumentError("compression", compression, allowed)
        if plan is None or plan.density is None:
            recipe.refuse_auto("torch.distributed's front end")
        self.recipe, self.optimizer = recipe, optimizer
        #: synchronizations done, those that were given up not counted
        self.step = 0
        self.plan = Plan(()) if plan is None else plan
        self.parts: list[Part] = []
        self.facts: dict[str, tuple[ParameterFacts, torch.Tensor]] = {}
        #: number of this rank's shard, and of how many, where parameters are sharded; the same for all ranks
        #: that synchronize with each other
        self.shard: tuple[int, int] | None = None
        #: whether a backward pass has begun, and not ended
        self.under_way = False
        self._levels = levels
        self._plan_is_given, self._group = plan is not None, process_group
        self._named = {} if named_parameters is None else dict(named_parameters)
        self._name_of = {parameter: name for name, parameter in self._named.items()}
        #: where a parameter's gradient goes, and its number there
        self._place_of: dict[torch.Tensor, tuple[Part, BucketGradient, int]] = {}
        self._gradients: list[BucketGradient] = []
        #: what was loaded, until the next synchronization takes it over
        self._loaded: Mapping[str, Any] | None = None
        self._is_agreed = False
        #: which ranks share a host, where gradients are summed within hosts first
        self.topology = assumed_topology(levels, _Launched, _Launched, self._choose_levels)
        if self.topology is not None and self.topology.size != self.place[1]:
            self.topology = None
        if optimizer is not None:
            refuse_double_momentum(recipe, lambda: optimizer.param_groups)
        elif getattr(recipe.feedback, "scale_residual", False):
            _log.warning(
                "scale_residual=True does nothing: a communication hook sees no learning rate. Give it the "
                "optimizer: horovod_sparse.ddp.attach(model, ..., optimizer=optimizer)"
            )
        else:
            _log.info("without optimizer= residuals do not follow the learning rate")

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size of this process within the process group."""
        group = dist.group.WORLD if self._group is None else self._group
        return dist.get_rank(group), dist.get_world_size(group)

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks whose gradients are summed before they are sparsified: with one level this one alone."""
        rank = self.place[0]
        return (rank,) if self.topology is None else self.topology.group("host", rank)

    @property
    def _choose_levels(self) -> Choose:
        return by_cost(self.recipe.sparsifier, (fact for fact, _ in self.facts.values()), None)

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified, in the plan's order."""
        return [part for part in self.parts if isinstance(part, SparseBucket) and not part.dense]

    def _group_of(self) -> Mapping[torch.Tensor, int] | None:
        """The number of every parameter's group; None without an optimizer."""
        if self.optimizer is None:
            return None
        groups = self.optimizer.param_groups
        return {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}

    def _agree(self, communicator: Communicator, layout: Layout) -> None:
        """All ranks together, before their first parts, and after a load: what they go on with."""
        failure: HorovodSparseError | None = None
        try:
            self._prepare(layout)
        except HorovodSparseError as error:  # all ranks hear of it
            failure = error
        communicator.move_to(self.topology)
        start = communicator.run("agreement", self._agreement(failure))
        communicator.move_to(self.topology)
        if start.anew:
            self._start_anew(start)
        if self.topology is not None and start.elsewhere:
            communicator.run("shards", gathered_shards(self.parts))
        communicator.run("memory", agreed_memory(self.parts, self.place[0], self.topology))
        self._is_agreed = True

    def _prepare(self, layout: Layout) -> None:
        """Facts, plan and parts for the buckets that have come, and what was loaded in them."""
        self.facts = facts_of(layout, self._name_of, self._named, self._group_of(), self.recipe.rules)
        if self._loaded is not None:
            entry = checked_entry(
                self._loaded,
                self.recipe,
                {name: parameter for name, (_, parameter) in self.facts.items()},
                complete=True,
                shard=self.shard,
            )
            saved = Plan.from_dict(entry["plan"])
            self._build(self.plan if self._plan_is_given else self._fitting(saved, layout))
            load_entry(self, entry, share_factor(entry["rank"], entry["size"], self.place[1]))
            self._loaded = None
        elif not self.parts:
            self._build(self.plan if self._plan_is_given else plan_of(layout, self.facts))

    def _fitting(self, saved: Plan, layout: Layout) -> Plan:
        """A saved plan, or one of this step's buckets where other groups or rules do not let it be used."""
        try:
            saved.check([fact for fact, _ in self.facts.values()])
        except ArgumentError:
            return plan_of(layout, self.facts)
        # of a density that times decided about elsewhere: here the recipe has its own
        return saved if self.recipe.auto is not None else dataclasses.replace(saved, density=None)

    def _build(self, plan: Plan) -> None:
        """Fresh parts for a plan."""
        plan.check([fact for fact, _ in self.facts.values()])
        no_rate: Any = SimpleNamespace(param_groups=[{}])
        optimizer = no_rate if self.optimizer is None else self.optimizer
        laid: list[BucketGradient] = []

        def lay(parameters: Sequence[torch.Tensor], name: str) -> BucketGradient:
            laid.append(BucketGradient(parameters, name))
            return laid[-1]

        self.plan = plan
        given = plan, self.facts, self.recipe, optimizer, self.place
        self.parts = parts_of(*given, lay=lay, topology=self.topology)
        self._gradients = laid
        self._place_of = {
            parameter: (part, gradient, number)
            for part, gradient in zip(self.parts, laid, strict=True)
            for number, parameter in enumerate(gradient.parameters)
        }

    def replan(self, plan: Plan) -> None:
        """Another plan, between two steps, on all ranks: residuals are kept, sparsifiers start anew.

        Args:
            plan: of all parameters that have been synchronized.

        Raises:
            ArgumentError: if it does not fit them.
        """
        progress = {name: part.bucket.progress for part in self.sparse for name in part.names}
        self._move(plan, progress)
        if self.topology is not None:  # other buckets have other shards: ranks bring each other theirs
            self._is_agreed = False

    def _move(self, plan: Plan, progress: Mapping[str, Any]) -> None:
        held = held_residuals(self.parts, self.recipe.feedback.num_companions)
        self._build(plan)
        assign_residuals(self.parts, held, progress)

    def _agreement(self, failure: HorovodSparseError | None) -> Synchronization[Start]:
        yield from raise_together(failure)
        parameters = [fact for fact, _ in self.facts.values()]
        yield from compared(settings(self.recipe, "horovod_sparse.ddp", **self._declared()), parameters)
        place = own_place(_Launched)
        topology = yield from agreed_topology(self._levels, place, self._choose_levels)
        if topology != self.topology:
            self.topology = topology
            self.replan(self.plan)
        standing = Standing(
            self.step,
            shared_digest({part.name: part.bucket.state for part in self.sparse}),
            self.place,
            self.plan,
            parameters,
            told={name: part.bucket.progress.to_plain() for part in self.sparse for name in part.names},
            column=0 if self.topology is None else self.topology.place(self.place[0])[1],
            elsewhere=hold_elsewhere(self.parts),
        )
        return (yield from agreed_start(standing))

    def _declared(self) -> dict[str, object]:
        """What has to be equal on all ranks, in words, beside the sparsifier."""
        return {"shard": self.shard, "levels": self._levels}

    def _start_anew(self, start: Start) -> None:
        """Fresh states, as all ranks have agreed; residuals are kept."""
        if self.place[0] == 0 and start.step > 0:
            _log.warning(
                "sparsifier states start anew at step %d, residuals are kept: %s", start.step, start.reason
            )
        self.step = start.step
        progress = {
            name: resumed(part.bucket.progress, start.told.get(name), start.step)
            for part in self.sparse
            for name in part.names
        }
        self._move(start.plan, progress)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and states: tensors, numbers and strings alone; every rank saves its own.

        The entry is that of an optimizer of `horovod_sparse.torch` (``state_dict()["horovod_sparse"]``): each
        loads the other's, if parameters have the same names.

        Raises:
            UnsupportedError: while a step is under way.
        """
        if self.under_way:
            raise UnsupportedError("a model is saved between steps: its backward pass is under way")
        if self._loaded is not None:
            return dict(self._loaded)
        shard = {} if self.shard is None else {"shard": list(self.shard)}
        return saved_entry(self, lambda array: torch.from_numpy(array.copy()), **shard)

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Continues from an entry, or from nothing; takes effect with the next step, where ranks agree.

        Args:
            entry: of this rank, from `state_dict`, `redistribute`, or an optimizer of `horovod_sparse.torch`.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ; by the next step, on all ranks,
                where only that can tell. Nothing has been loaded then.
            UnsupportedError: while a step is under way.
        """
        if self.under_way:
            raise UnsupportedError("a model is loaded between steps: its backward pass is under way")
        known = {name: parameter for name, (_, parameter) in self.facts.items()} or self._named
        if entry is not None:
            entry = checked_entry(entry, self.recipe, known, complete=bool(self.facts), shard=self.shard)
        if entry is None or not entry["step"]:
            self._loaded, self.step = None, 0
            assign_residuals(self.parts, (), {})
        else:
            self._loaded = entry
        self._is_agreed = False
