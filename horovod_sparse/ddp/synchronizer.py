"""Gradients of one model of DistributedDataParallel: from its hooks to the synchronized sum."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from horovod_sparse.collectives import Synchronization
from horovod_sparse.ddp.bucket_gradient import BucketGradient
from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.ddp.communicator import Communicator
from horovod_sparse.ddp.planning import facts_of, plan_of
from horovod_sparse.ddp.state import checked_entry
from horovod_sparse.errors import (
    ArgumentError,
    HorovodSparseError,
    NonFiniteGradientError,
    UnsupportedError,
)
from horovod_sparse.feedback import MomentumCorrection, Recipe, resumed
from horovod_sparse.feedback.state import shared_digest
from horovod_sparse.frontend.agreement import Standing, Start, agreed_start, compared, settings
from horovod_sparse.frontend.collective_errors import has_bad_gradient, raise_together, worst
from horovod_sparse.frontend.compression import recipe_of
from horovod_sparse.frontend.momentum import refuse_double_momentum, refuse_later_momentum
from horovod_sparse.frontend.parts import assign_residuals, held_residuals
from horovod_sparse.frontend.state import load_entry, saved_entry, share_factor
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.pytorch.loss_scale import ScaleOfStep, watch_scalers
from horovod_sparse.pytorch.parts import DenseParameter, Part, SparseBucket, parts_of
from horovod_sparse.telemetry import Telemetry

_log = logging.getLogger("horovod_sparse")

#: steps in a row that have the same buckets before these are taken as the plan: DistributedDataParallel makes
#: new ones after the first iteration, with a static graph after the second
_SETTLED = 3


class State:
    """What a communication hook keeps: see `attach`, which makes one, and `hook`.

    DistributedDataParallel changes its buckets after the first iteration. So residuals belong to parameters:
    the buckets of the first iteration go on until the new ones have come three times, which then take the
    residuals over; sparsifiers start anew there, as with every change of plan. Then a bucket is synchronized
    as soon as it is complete, while backward goes on, in the order in which DistributedDataParallel gives
    them out.

    Errors are raised at the end of ``backward()``, on all ranks alike; gradients are zeros then, and training
    may go on. Where the loss was scaled by a `torch.amp.GradScaler` a gradient that is not finite raises
    nothing: gradients are Inf on all ranks, and the scaler skips the step.

    Args:
        compression: a sparsifier, as text (``"exdyna:density=0.001"``) or as a recipe.
        optimizer: of all the model's parameters, if it shall tell learning rates.
        named_parameters: names for checkpoints and messages, as from ``module.named_parameters()``. Without
            them parameters are called by their place in the first iteration's buckets.
        process_group: of the model; all ranks if left out.
        plan: which parameters form which bucket; DistributedDataParallel's own if left out.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnknownNameError: for a misspelt algorithm or argument.

    Example:
        >>> State("topk:density=0.01").telemetry.summary()
        'no step yet'
    """

    def __init__(
        self,
        compression: str | Recipe,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_group: dist.ProcessGroup | None = None,
        plan: Plan | None = None,
    ) -> None:
        recipe = recipe_of(compression) if isinstance(compression, str) else compression
        if not isinstance(recipe, Recipe):
            allowed = "a sparsifier, as text or as a recipe; for dense training leave the hook out"
            raise ArgumentError("compression", compression, allowed)
        self.recipe, self.optimizer = recipe, optimizer
        self.telemetry = Telemetry()
        #: whether DistributedDataParallel may leave gradients out that exist; it does not tell a hook
        self.finds_unused = True
        #: synchronizations done, those that were given up not counted
        self.step = 0
        self.plan = Plan(()) if plan is None else plan
        self.parts: list[Part] = []
        self.facts: dict[str, tuple[ParameterFacts, torch.Tensor]] = {}
        self._plan_is_given, self._group = plan is not None, process_group
        self._named = {} if named_parameters is None else dict(named_parameters)
        self._name_of = {parameter: name for name, parameter in self._named.items()}
        self._carrier: Carrier | None = None
        self._communicator: Communicator | None = None
        #: where a parameter's gradient goes, and its number there
        self._place_of: dict[torch.Tensor, tuple[Part, BucketGradient, int]] = {}
        self._gradients: list[BucketGradient] = []
        #: what was loaded, until the next synchronization takes it over
        self._loaded: Mapping[str, Any] | None = None
        self._is_agreed = False
        self._loss_scale = ScaleOfStep()
        self._layout: list[tuple[torch.Tensor, ...]] = []  # the buckets of this step
        self._last_layout: list[tuple[int, ...]] = []  # by address: tensors have no single truth value
        self._num_alike = 0  # steps with the same buckets, up to now
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []  # that have come before ranks agreed
        self._results: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        watch_scalers()
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
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified, in the plan's order."""
        return [part for part in self.parts if isinstance(part, SparseBucket) and not part.dense]

    def on_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """A bucket is complete on this rank. Waits for other ranks with the last one only.

        Args:
            bucket: of DistributedDataParallel.

        Returns:
            Completed with the bucket's own buffer, which holds the mean over ranks then.

        Raises:
            UnsupportedError: for gradients in sparse (COO) form, or of another type than the parameters.
        """
        buffer, parameters = bucket.buffer(), tuple(bucket.parameters())
        self._check(buffer, parameters)
        future = torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        if not self._results:
            self._begin()
        self._results.append((future, buffer))
        self._layout.append(parameters)
        pieces = [pair for pair in zip(parameters, bucket.gradients(), strict=True) if pair[0].numel()]
        if self._is_agreed:
            self._take(pieces)
        else:
            self._pieces += pieces
        if bucket.is_last():
            self._finish()
        return future

    def _begin(self) -> None:
        """The first bucket of a step has come."""
        if torch._C._current_graph_task_id() == -1:
            self._loss_scale.settle()  # this rank has joined: others go on
        else:
            self._loss_scale.note()

    def _check(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        if buffer.is_sparse:
            raise UnsupportedError(
                "the model has gradients in sparse (COO) form: make the layer with sparse=False"
            )
        if buffer.dtype != parameters[0].dtype:
            raise UnsupportedError(
                f"a bucket of {buffer.dtype} has parameters of {parameters[0].dtype}: another hook has "
                "changed it, as fp16_compress_wrapper does. Register horovod_sparse.ddp.hook alone; a wire "
                "format (values=float16) makes messages smaller"
            )

    def _take(self, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients have come; starts the parts that are complete with them."""
        for parameter, piece in pieces:
            part, gradient, number = self._place_of[parameter]
            gradient.take(number, piece)
            if part.streams is not None:
                part.streams.note()
            part.num_missing -= 1
            if part.num_missing == 0:
                self._start(part)

    def _start(self, part: Part) -> None:
        communicator = self._running()
        on_device = isinstance(part, DenseParameter) and part.streams is not None
        starter = SimpleNamespace(start=communicator.start_on_device) if on_device else communicator
        part.start(starter, self._loss_scale.value)

    def _running(self) -> Communicator:
        if self._communicator is None:
            self._carrier = Carrier(self._group)
            self._communicator = Communicator(self._carrier)
        return self._communicator

    def _finish(self) -> None:
        """The last bucket of a step has come."""
        failure: BaseException | None = None
        try:
            self._synchronize()
        except BaseException as error:
            failure = error
        for part in self.parts:
            part.task, part.num_missing = None, len(part.names)
        for gradient in self._gradients:
            gradient.let_go()
        results, self._results, self._pieces = self._results, [], []
        for future, buffer in results:
            future.set_result(buffer)
        layout, self._layout = self._layout, []
        if failure is not None:
            _after_backward(partial(_throw, failure))
            return
        seen = [tuple(map(id, bucket)) for bucket in layout]
        self._num_alike = self._num_alike + 1 if seen == self._last_layout else 1
        self._last_layout = seen
        if self._num_alike == _SETTLED and not self._plan_is_given:
            wanted = plan_of(layout, self.facts)
            if wanted != self.plan:
                self.replan(wanted)

    def _synchronize(self) -> None:
        """Waits for all parts, and puts their sums into the buckets; raises why not, with zeros in them."""
        communicator, size = self._running(), self.place[1]
        idle_before = communicator.idle_seconds
        try:
            if isinstance(self.recipe.feedback, MomentumCorrection) and self.optimizer is not None:
                refuse_later_momentum(self.recipe, self.optimizer.param_groups)
            if not self._is_agreed:
                self._agree(communicator)
                self._take(self._pieces)
            tasks = [part.task for part in self.parts if part.task is not None]
            communicator.wait(tasks)
        except BaseException:
            self._give_up()
            raise
        errors = [task.error for task in tasks if task.error is not None]
        if errors:
            error, bad = worst(errors), has_bad_gradient(errors, self.place[0])
            self._give_up(drop=bad)
            if not isinstance(error, NonFiniteGradientError) or self._loss_scale.scaler is None:
                raise error
            self._results[0][1].fill_(torch.inf)
            return
        reports = [part.apply(1.0 / size) for part in self.parts]
        if torch._C._current_graph_task_id() != -1:
            pieces = [piece for gradient in self._gradients for piece in gradient.pieces()]
            _after_backward(partial(self._give_to_unused, pieces))
        self.step += 1
        self.telemetry.record(self.step, reports, communicator.idle_seconds - idle_before)

    def _give_to_unused(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """What was held back for parameters that no rank has used in this step becomes their gradient.

        DistributedDataParallel leaves those as they are; what the sum has for them would be lost.
        """
        for parameter, piece in pieces:
            if parameter.grad is None:
                if piece.any():
                    parameter.grad = piece.detach().clone()
            elif self.finds_unused and not torch.equal(parameter.grad, piece):
                parameter.grad.copy_(piece)

    def _give_up(self, *, drop: bool = False) -> None:
        """Takes the step back as far as it came: gradients are zeros, selections return to residuals."""
        for part in self.parts:
            if part.task is not None:
                part.abandon(drop=drop)
        for _, buffer in self._results:
            buffer.zero_()

    def _agree(self, communicator: Communicator) -> None:
        """All ranks together, before their first parts, and after a load: what they go on with."""
        failure: HorovodSparseError | None = None
        try:
            self._prepare()
        except HorovodSparseError as error:  # all ranks hear of it
            failure = error
        start = communicator.run("agreement", self._agreement(failure))
        if start.anew:
            self._start_anew(start)
        self._is_agreed = True

    def _prepare(self) -> None:
        """Facts, plan and parts for the buckets that have come, and what was loaded in them."""
        self.facts = facts_of(self._layout, self._name_of, self._named, self.optimizer, self.recipe.rules)
        if self._loaded is not None:
            entry = checked_entry(
                self._loaded,
                self.recipe,
                {name: parameter for name, (_, parameter) in self.facts.items()},
                complete=True,
            )
            saved = Plan.from_dict(entry["plan"])
            self._build(self.plan if self._plan_is_given else self._fitting(saved))
            load_entry(self, entry, share_factor(entry["rank"], entry["size"], self.place[1]))
            self._loaded = None
        elif not self.parts:
            self._build(self.plan if self._plan_is_given else plan_of(self._layout, self.facts))

    def _fitting(self, saved: Plan) -> Plan:
        """A saved plan, or one of this step's buckets where other groups or rules do not let it be used."""
        try:
            saved.check([fact for fact, _ in self.facts.values()])
        except ArgumentError:
            return plan_of(self._layout, self.facts)
        return saved

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
        self.parts = parts_of(plan, self.facts, self.recipe, optimizer, self.place, lay=lay)
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

    def _move(self, plan: Plan, progress: Mapping[str, Any]) -> None:
        held = held_residuals(self.parts, self.recipe.feedback.num_companions)
        self._build(plan)
        assign_residuals(self.parts, held, progress)

    def _agreement(self, failure: HorovodSparseError | None) -> Synchronization[Start]:
        yield from raise_together(failure)
        parameters = [fact for fact, _ in self.facts.values()]
        yield from compared(settings(self.recipe, "horovod_sparse.ddp"), parameters)
        standing = Standing(
            self.step,
            shared_digest({part.name: part.bucket.state for part in self.sparse}),
            self.place,
            self.plan,
            parameters,
            told={name: part.bucket.progress.to_plain() for part in self.sparse for name in part.names},
        )
        return (yield from agreed_start(standing))

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
        if self._results:
            raise UnsupportedError("a model is saved between steps: its backward pass is under way")
        if self._loaded is not None:
            return dict(self._loaded)
        return saved_entry(self, lambda array: torch.from_numpy(array.copy()))

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Continues from an entry, or from nothing; takes effect with the next step, where ranks agree.

        Args:
            entry: of this rank, from `state_dict`, `redistribute`, or an optimizer of `horovod_sparse.torch`.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ; by the next step, on all ranks,
                where only that can tell. Nothing has been loaded then.
            UnsupportedError: while a step is under way.
        """
        if self._results:
            raise UnsupportedError("a model is loaded between steps: its backward pass is under way")
        known = {name: parameter for name, (_, parameter) in self.facts.items()} or self._named
        if entry is not None:
            entry = checked_entry(entry, self.recipe, known, complete=bool(self.facts))
        if entry is None or not entry["step"]:
            self._loaded, self.step = None, 0
            assign_residuals(self.parts, (), {})
        else:
            self._loaded = entry
        self._is_agreed = False


def _throw(error: BaseException) -> None:
    raise error


def _after_backward(action: Callable[[], None]) -> None:
    """Does something at the end of the backward pass under way, after DistributedDataParallel's own end.

    An error within a hook would leave it waiting for the other gradients of this step for ever. At the end
    of a pass callbacks run in the order of their registration, its own after the last hook: so this one's
    callback registers another.
    """
    if torch._C._current_graph_task_id() == -1:  # a rank that has joined: no pass is under way
        action()
        return
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(action))
