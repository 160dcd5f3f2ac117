"""One step of a training: from gradients that come, to sums in their place, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.ddp.communicator import Communicator
from horovod_sparse.ddp.planning import Layout
from horovod_sparse.ddp.training import Training
from horovod_sparse.errors import HorovodSparseError, NonFiniteGradientError, UnsupportedError
from horovod_sparse.feedback import MomentumCorrection
from horovod_sparse.frontend.collective_errors import has_bad_gradient, worst
from horovod_sparse.frontend.drift import DriftCheck
from horovod_sparse.frontend.momentum import refuse_later_momentum
from horovod_sparse.frontend.poison import RAISE, Poison
from horovod_sparse.pytorch.loss_scale import ScaleOfStep, watch_scalers
from horovod_sparse.pytorch.memory import memory_of
from horovod_sparse.pytorch.parts import DenseParameters, Part
from horovod_sparse.pytorch.replicas import shared_entries
from horovod_sparse.pytorch.streams import CudaStreams
from horovod_sparse.telemetry import Telemetry


class Synchronizer(Training):
    """Takes gradients while backward goes on, and puts their mean over ranks where they are.

    Those who have the gradients call `_begin`, `_take` and `_finish`, and say where sums go.

    Args:
        *arguments: see `Training`.
        on_nonfinite: see `Poison`.
        check_every: see `DriftCheck`; never if left out.
        on_drift: see there.
        **more: see `Training`.
    """

    def __init__(
        self,
        *arguments: Any,
        on_nonfinite: str = RAISE,
        check_every: int | None = 0,
        on_drift: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self.telemetry = Telemetry()
        self.poison = Poison(on_nonfinite, self.telemetry)
        self.drift = DriftCheck(check_every, on_drift, self.telemetry)
        self._communicator: Communicator | None = None
        self._loss_scale = ScaleOfStep()
        #: what has come and is not started before the end of the pass, and on which streams it was written
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._writers: dict[torch.device, CudaStreams] = {}
        watch_scalers()

    def _begin(self) -> None:
        """The first gradients of a step have come."""
        self.under_way = True
        if pass_number() == -1:
            self._loss_scale.settle()  # this rank has joined: others go on
        else:
            self._loss_scale.note()

    def _take(self, pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Gradients have come; starts the parts that are complete with them.

        Raises:
            UnsupportedError: if they are those of another model.
        """
        for parameter, piece in pieces:
            if parameter not in self._place_of:
                raise UnsupportedError(
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
        """All gradients of a part have come."""
        self._start(part)

    def _start(self, part: Part, *, refused: bool = False) -> None:
        part.start(self._starter(part), self._loss_scale.value, refused=refused)

    def _starter(self, part: Part) -> Any:
        communicator = self._running()
        on_device = isinstance(part, DenseParameters) and part.streams is not None
        return SimpleNamespace(start=communicator.start_on_device) if on_device else communicator

    def _running(self) -> Communicator:
        if self._communicator is None:
            self._communicator = Communicator(Carrier(self._group))
        return self._communicator

    def _finish(self, layout: Layout) -> BaseException | None:
        """The last gradients of a step have come: waits for all parts; the step is over then.

        Args:
            layout: of the buckets that have come.

        Returns:
            Why there is no sum, and gradients are zeros.
        """
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

    def _synchronize(self, layout: Layout) -> None:
        """Puts the sums into the buckets; raises why not, with zeros in them."""
        communicator, rank = self._running(), self.place[0]
        idle_before = communicator.idle_seconds
        failure: BaseException | None = None
        errors: list[BaseException] = []
        try:
            if not self._is_agreed:
                self._agree(communicator, layout)
                self.drift.restart(self.step)
            for streams in self._writers.values():
                streams.meet()
            self._take(self._pieces)
            errors = self._wait(communicator)
            # not before: what the thread is about to fold in cannot be taken back
            if isinstance(self.recipe.feedback, MomentumCorrection) and self.optimizer is not None:
                refuse_later_momentum(self.recipe, self.optimizer.param_groups)
            if errors and self._loss_scale.scaler is None and self.poison.repeats(errors):
                drop = any(self.poison.drops(errors, one) for one in self.mates)
                for part in self.parts:
                    part.abandon(drop=drop)
                    part.again(self._starter(part), drop=drop)
                errors = self._wait(communicator)
            if not errors and self.step >= self.drift.next_step:
                self._check_drift(communicator)
        except HorovodSparseError as error:
            failure = error
        except BaseException:
            self._give_up()
            raise
        failure = self._of_all(worst(errors) if errors else failure)
        if failure is not None:
            self._refuse(failure, errors, rank)
            return
        num_dividing = self._num_dividing(communicator)
        reports = [part.apply(1.0 / num_dividing) for part in self.parts]
        self._give_out()
        self.step += 1
        self.telemetry.record(self.step, reports, communicator.idle_seconds - idle_before)

    def _refuse(self, failure: BaseException, errors: Sequence[BaseException], rank: int) -> None:
        """No rank applies this step; raises why not, unless it is skipped."""
        if isinstance(failure, NonFiniteGradientError) and self._loss_scale.scaler is not None:
            self._give_up(drop=any(has_bad_gradient(errors, one) for one in self.mates))
            self._overflow()
            return
        self._give_up(drop=bool(errors) and any(self.poison.drops(errors, one) for one in self.mates))
        if not self.poison.skips(errors):
            raise failure
        self._skip()

    def _check_drift(self, communicator: Communicator) -> None:
        """All ranks together, before this step is applied: whether the last one has left them equal."""
        parameters = {name: parameter for name, (_, parameter) in self.facts.items()}
        entries = shared_entries(parameters, self.optimizer)
        communicator.run("drift", self.drift.run(self.step, self.place[0], entries))

    def _declared(self) -> dict[str, object]:
        return {**super()._declared(), "on_nonfinite": self.poison.policy, **self.drift.describe()}

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
        return self.place[1]

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


def pass_number() -> int:
    """Of the backward pass under way: no other has it; -1 if there is none."""
    return int(torch._C._current_graph_task_id())


def throw(error: BaseException) -> None:
    """Raises, as a callback."""
    raise error


def after_backward(action: Callable[[], None]) -> None:
    """Does something at the end of the backward pass under way, after the end of whoever gave the gradients.

    An error within a hook would leave DistributedDataParallel waiting for the other gradients of this step
    for ever. At the end of a pass callbacks run in the order of their registration, its own after the last
    hook: so this one's callback registers another.
    """
    if pass_number() == -1:  # a rank that has joined: no pass is under way
        action()
        return
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    queue(lambda: queue(action))
