"""One step of a training: from gradients that come, to sums in their place, or an error on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from horovod_sparse import errors
from horovod_sparse.collectives import Synchronization
from horovod_sparse.ddp.collectives import Communicator
from horovod_sparse.ddp.distributed_engine import BucketGradient, BucketParameters, DistributedEngine, plan_of
from horovod_sparse.feedback import MomentumCorrection, Recipe
from horovod_sparse.plans import Plan
from horovod_sparse.tensors.driver import keep_out_of_graphs
from horovod_sparse.tensors.flat_gradient import memory_of
from horovod_sparse.tensors.layout import host_entry, shared_entries
from horovod_sparse.tensors.loss_scale import ScaleOfStep, pass_number, watch_scalers
from horovod_sparse.tensors.parts import Part, facts_of, groups_of
from horovod_sparse.tensors.streams import CudaStreams
from horovod_sparse.training.agreement import AgreedStatus
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.compression import recipe_of, refuse_double_momentum, refuse_later_momentum
from horovod_sparse.training.outcome import Outcome, worst
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.state import check_entry, load_entry, share_factor
from horovod_sparse.training.training import Training

_ADVICE = "the model uses {}: use the same algorithm, or load None to start with no residual"

_log = logging.getLogger("horovod_sparse")


class Synchronizer(Training):
    """Takes gradients while backward goes on, and puts their mean over ranks where they are.

    Those who have the gradients call `_begin`, `_take` and `_finish`, and say where sums go.
    """

    engine: DistributedEngine

    def __init__(
        self,
        compression: str | Recipe | None,
        optimizer: torch.optim.Optimizer | None,
        settings: Settings,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        recipe = recipe_of(compression) if isinstance(compression, str) else compression
        if not isinstance(recipe, Recipe):
            allowed = "a sparsifier, as text or as a recipe; for dense training leave the hook out"
            raise errors.ArgumentError("compression", compression, allowed)
        inner = getattr(optimizer, "optimizer", None)  # trainers wrap the one that steps: Accelerate does
        optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise errors.ArgumentError("optimizer", optimizer, "an optimizer of PyTorch, or None")
        self._named = {} if named_parameters is None else dict(named_parameters)
        facts_of([pair for pair in self._named.items() if pair[1].requires_grad], None)  # refuses other types
        if recipe.feedback.applies_rate:
            allowed = 'one whose steps attach exchanges: attach(model, "best", optimizer) takes no hook'
            raise errors.ArgumentError("compression", compression, allowed)
        engine = DistributedEngine(recipe, optimizer, self._named, process_group, settings.deadline_seconds)
        super().__init__(engine, recipe, settings)
        self.optimizer = optimizer
        if settings.plan is not None:
            self.plan = settings.plan
        #: whether a backward pass has begun, and not ended
        self.under_way = False
        #: where a parameter's gradient goes, and its number there
        self._place_of: dict[torch.Tensor, tuple[Part, BucketGradient, int]] = {}
        self._gradients: list[BucketGradient] = []
        #: what was loaded, until the next synchronization takes it over
        self._loaded: Mapping[str, Any] | None = None
        #: why this rank has no parts: all ranks hear of it
        self._unprepared: errors.HorovodSparseError | None = None
        self._loss_scale = ScaleOfStep()
        #: what has come and is not started before the end of the pass, and on which streams it was written
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._writers: dict[torch.device, CudaStreams] = {}
        if optimizer is not None:
            refuse_double_momentum(recipe, lambda: optimizer.param_groups, adopts=True)
        elif recipe.feedback.scale_residual:
            _log.warning(
                "scale_residual=True does nothing: a communication hook sees no learning rate. Give it the "
                "optimizer: horovod_sparse.ddp.attach(model, ..., optimizer=optimizer)"
            )
        else:
            _log.info("without optimizer= residuals do not follow the learning rate")
        watch_scalers()
        keep_out_of_graphs()

    def declared(self) -> dict[str, str]:
        """A rank without a plan follows DistributedDataParallel's buckets, which come to differ."""
        return {**super().declared(), "plan": "none" if self.settings.plan is None else "given"}

    def _entered(self, parts: Sequence[Any]) -> None:
        self._gradients = [part.gradient for part in parts]
        self._place_of = {
            parameter: (part, part.gradient, number)
            for part in parts
            for number, parameter in enumerate(part.gradient.parameters)
        }

    def _group_of(self) -> Mapping[torch.Tensor, int] | None:
        """The number of every parameter's group; None without an optimizer."""
        return None if self.optimizer is None else groups_of(self.optimizer)

    def _agree_on(self, layout: BucketParameters) -> None:
        """All ranks together, before their first parts, and after a load: what they go on with."""
        self._unprepared = None
        try:
            self._prepare(layout)
        except errors.HorovodSparseError as error:
            self._unprepared = error
        self.agree()

    def _agreement(self) -> Synchronization[AgreedStatus]:
        yield from raise_together(self._unprepared)
        return (yield from super()._agreement())

    def _prepare(self, layout: BucketParameters) -> None:
        """Facts, plan and parts for the buckets that have come, and what was loaded in them."""
        self.engine.layout, self.engine.group_of = layout, self._group_of()
        self.facts = dict(self.engine.facts({}))
        given = self.settings.plan
        if self._loaded is not None:
            entry = self._checked(self._loaded, complete=True)
            self._take_place(self.topology_for(entry))
            saved = Plan.from_dict(entry["plan"])
            self.build(self._fitting(saved, layout) if given is None else given)
            load_entry(self, entry, share_factor(entry["rank"], entry["size"], self.size))
            self._loaded = None
        elif not self.parts:
            self.begin(self.facts, self._first_plan(layout))

    def _first_plan(self, layout: BucketParameters) -> Plan:
        """That which was given, or the buckets of this step."""
        return plan_of(layout, self.facts) if self.settings.plan is None else self.settings.plan

    def _fitting(self, saved: Plan, layout: BucketParameters) -> Plan:
        """A saved plan, or one of this step's buckets where other groups or rules do not let it be used."""
        try:
            saved.check(self.parameters)
        except errors.ArgumentError:
            return plan_of(layout, self.facts)
        return saved

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals and states: tensors, numbers and strings alone; every rank saves its own.

        The entry is that of an optimizer of `horovod_sparse.torch` (``state_dict()["horovod_sparse"]``): each
        loads the other's, if parameters have the same names. An error while a step is under way.
        """
        if self.under_way:
            raise errors.UnsupportedError("a model is saved between steps: its backward pass is under way")
        if self._loaded is not None:
            return dict(self._loaded)
        shard = self.engine.shard
        return self.save(**({} if shard is None else {"shard": list(shard)}))

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Continues from an entry, or from nothing; takes effect with the next step, where ranks agree.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ; by the next step, on all ranks,
                where only that can tell. Nothing has been loaded then.
            UnsupportedError: while a step is under way.
        """
        if self.under_way:
            raise errors.UnsupportedError("a model is loaded between steps: its backward pass is under way")
        if entry is not None:
            entry = self._checked(entry, complete=bool(self.facts))
        if entry is None or not entry["step"]:
            self._loaded, self.step = None, 0
            self.put((), {})
        else:
            self._loaded = entry
        self._agreed_under = None

    def _checked(self, entry: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
        """An entry on the host, if it is one of this training; `complete` if all parameters are known."""
        entry = host_entry(entry)
        check_entry(entry, self.recipe, _ADVICE)
        own = None if self.engine.shard is None else list(self.engine.shard)
        if entry.get("shard") != own:
            saved, here = (
                "whole parameters" if one is None else f"shard {one} (which, of how many)"
                for one in (entry.get("shard"), own)
            )
            raise errors.StateMismatchError(
                f"the saved state is of {saved}, this rank trains {here}: load what such a rank has saved"
            )
        known = {name: parameter for name, (_, parameter) in self.facts.items()} or self._named
        # before the first step nothing is held back for any
        self.check_fits(entry, known if complete and entry["step"] else (), known)
        return dict(entry)

    def _begin(self) -> None:
        """The first gradients of a step have come."""
        self.under_way = True
        if pass_number() == -1:
            self._loss_scale.settle()  # this rank has joined: others go on
        else:
            self._loss_scale.note()

    def _take(self, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients have come; starts the parts that are complete with them."""
        for parameter, piece in pieces:
            if parameter not in self._place_of:
                raise errors.UnsupportedError(
                    f"a gradient of shape {list(parameter.shape)} has come that was in no bucket of the "
                    "first step: one state serves one model: attach each one"
                )
            part, gradient, number = self._place_of[parameter]
            gradient.take(number, piece)
            if part.streams is not None:
                part.streams.note()
            part.num_missing -= 1
            if part.num_missing == 0:
                self._complete(part)

    def _keep(self, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients have come that are taken at the end of the pass."""
        for parameter, piece in pieces:
            self._pieces.append((parameter, piece))
            streams = self._writers.get(piece.device) or memory_of(piece.device, "a gradient").streams()
            if streams is not None:
                self._writers[piece.device] = streams
                streams.note()

    def _complete(self, part: Part) -> None:
        self._start(part)

    def _start(self, part: Part, *, refused: bool = False) -> None:
        part.start(self._starter(part), self._loss_scale.value, refused=refused)

    def _starter(self, part: Part) -> Any:
        communicator = self._running()
        on_device = part.whole and part.streams is not None
        return SimpleNamespace(start=communicator.start_on_device) if on_device else communicator

    def _running(self) -> Communicator:
        return self.engine.running()

    def _finish(self, layout: BucketParameters) -> BaseException | None:
        """The last gradients of a step have come: waits for all parts; the step is over then."""
        failure: BaseException | None = None
        try:
            self._synchronize(layout)
        except BaseException as error:
            failure = error
        self._end_step()
        return failure

    def _end_step(self) -> None:
        for part in self.parts:
            part.task, part.num_missing = None, len(part.names)
        for gradient in self._gradients:
            gradient.let_go()
        self._pieces, self.under_way = [], False

    def _synchronize(self, layout: BucketParameters) -> None:
        """Puts the sums into the buckets; raises why not, with zeros in them."""
        communicator = self._running()
        idle_before = communicator.idle_seconds
        failure: BaseException | None = None
        failures: list[BaseException] = []
        try:
            if not self.is_agreed:
                self._agree_on(layout)
            for streams in self._writers.values():
                streams.meet()
            self._take(self._pieces)
            failures = self._wait(communicator)
            # not before: what the thread is about to fold in cannot be taken back
            if isinstance(self.recipe.feedback, MomentumCorrection) and self.optimizer is not None:
                refuse_later_momentum(self.recipe, self.optimizer.param_groups)
            if not failures and self.step >= self.drift.next_step:
                self._check_drift(communicator)
        except errors.DeadlineError:
            self._zero()  # the thread may go on with what it waits for
            raise
        except errors.HorovodSparseError as error:
            failure = error
        except BaseException:
            self._give_up()
            raise
        failure = self._of_all(worst(failures) if failures else failure)
        if failure is not None:
            self._refuse(failure, failures)
            return
        num_dividing = self._num_dividing(communicator)
        reports = [part.apply(1.0 / num_dividing) for part in self.parts]
        self._give_out()
        self.step += 1
        self.telemetry.record(self.step, reports, communicator.idle_seconds - idle_before)

    def _refuse(self, failure: BaseException, failures: Sequence[BaseException]) -> None:
        """No rank applies this step; raises why not, unless it is skipped."""
        scaled = self._loss_scale.scaler is not None
        verdict = self.policy.judge(failures, scaled=scaled, failure=failure)
        self._give_up(drop=verdict.drop)
        if verdict.outcome is Outcome.OVERFLOW:
            self._overflow()
        elif verdict.outcome is Outcome.SKIPPED:
            self._skip()
        else:
            raise failure

    def _check_drift(self, communicator: Communicator) -> None:
        """All ranks together, before this step is applied: whether the last one has left them equal."""
        parameters = {name: parameter for name, (_, parameter) in self.facts.items()}
        entries = shared_entries(parameters, self.optimizer)
        communicator.run("drift", self.drift.run(self.step, entries))

    def _wait(self, communicator: Communicator) -> list[BaseException]:
        """Waits for all parts that have been started; what went wrong in them."""
        tasks = [part.task for part in self.parts if part.task is not None]
        communicator.wait(tasks)
        return [task.error for task in tasks if task.error is not None]

    def _give_up(self, *, drop: bool = False) -> None:
        """Takes the step back as far as it came: gradients are zeros, selections return to residuals."""
        for part in self.parts:
            if part.task is not None:
                part.abandon(drop=drop)
        self._zero()

    def _of_all(self, failure: BaseException | None) -> BaseException | None:
        """What has failed on this rank or on one that does not synchronize with it, but has to step alike."""
        return failure

    def _num_dividing(self, communicator: Communicator) -> float:
        """By how many ranks a sum is divided."""
        return self.size

    def _zero(self) -> None:
        """Zeros as all gradients of this step."""
        raise NotImplementedError

    def _overflow(self) -> None:
        """Inf in a gradient, for a scaler to find on every rank. All others are zeros."""
        raise NotImplementedError

    def _skip(self) -> None:
        """No gradients, for the optimizer to pass over."""
        raise NotImplementedError

    def _give_out(self) -> None:
        """Sums are in the memory that gradients came in."""
        raise NotImplementedError


def throw(error: BaseException) -> None:
    raise error


def after_backward(action: Callable[[], None]) -> None:
    """Does something at the end of the backward pass under way, after whoever gave the gradients.

    An error within a hook would leave DistributedDataParallel waiting for other gradients for ever. Callbacks
    run in the order of their registration, its own after the last hook: so this one's registers another.
    """
    if pass_number() == -1:  # a rank that has joined: no pass is under way
        action()
        return
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(action))
