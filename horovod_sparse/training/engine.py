"""The interface of a framework and its collectives (`Engine`), and the `Driver` that runs coroutines.

A new front end (another framework, or other collectives than Horovod's) writes

* an `Engine`, and parts derived from `BucketPart`: they alone know where arrays are. `carry_out` below turns
  a function that carries out one request into its method of that name, and `Driver` runs many coroutines
  at once over asynchronous collectives;
* a subclass of `Training` that knows when gradients are there: it makes parts, starts and awaits them, and
  does what `Training.policy` judges. ``examples/toy_engine.py`` is one, over pipes between processes;
* for ``Compression.topk(...)``, a class with the metaclass `Algorithms`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from horovod_sparse.collectives import AllToAll, Exchange, ReduceScatter, Request, Synchronization
from horovod_sparse.errors import DeadlineError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.topology import Placement, Topology
from horovod_sparse.training.deadline import Deadline

Result = TypeVar("Result")

#: by name: the facts that plans use, and the parameter
Facts: TypeAlias = Mapping[str, tuple[ParameterFacts, Any]]


@dataclass(frozen=True)
class PartSpec:
    #: name of the part's collectives; equal on all ranks and in all steps
    label: str
    names: tuple[str, ...]
    #: sparsifier and feedback of this part
    recipe: Recipe
    #: True if the plan leaves the parameters dense
    dense: bool = False
    number: int | None = None

    @property
    def whole(self) -> bool:
        """True if the part is dense, and its feedback keeps no residual."""
        return self.dense and not self.recipe.feedback.changes_dense

    @property
    def title(self) -> str:
        """The part's name in error messages; a group of dense parameters has its first one's name."""
        others = len(self.names) - 1
        return self.names[0] + (f" and {others} more" if others else "") if self.whole else self.label


@dataclass(eq=False)
class Task:
    """A coroutine in progress; its round r communicates under the name ``name.r`` on all ranks."""

    name: str
    done: bool = False
    result: Any = None
    #: the coroutine's error, stored so that other tasks continue
    error: BaseException | None = None
    #: collectives started so far
    num_rounds: int = 0
    #: time this process sat in `Starter.wait` for this task and had nothing else to do: the part of its
    #: communication that computation did not hide. Tasks waited for together each count the same seconds;
    #: `Starter.idle_seconds` counts them once.
    waited_seconds: float = 0.0

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


#: tasks that begin together
Batch: TypeAlias = list[tuple[Task, Synchronization[Any]]]


class Starter(Protocol):
    """Runs coroutines with collectives, several at once; all ranks start the same ones."""

    #: total seconds that `wait` had nothing to do
    idle_seconds: float = 0.0
    _batch: Batch | None = None

    def start(self, name: str, coroutine: Synchronization[Any]) -> Task:
        """Starts a coroutine and returns its task at once; `name` is equal on all ranks."""
        task = Task(name)
        if self._batch is None:
            self._begin([(task, coroutine)])
        else:
            self._batch.append((task, coroutine))
        return task

    @contextmanager
    def together(self) -> Iterator[None]:
        """Returns a context: tasks started within it begin when it ends, as one batch."""
        self._batch = batch = Batch()
        try:
            yield
        finally:
            self._batch = None
        self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        """Begins tasks, whose messages may be shared."""

    def wait(self, tasks: Sequence[Task]) -> None:
        """Waits for tasks; an error of a coroutine stays in its task."""


class Engine(Protocol):
    """The interface of a framework and its collectives that a training calls."""

    #: name of the front end, in messages and in what ranks compare
    name: str

    def rank_and_size(self) -> tuple[int, int]:
        """Returns this rank and the number of ranks that synchronize, which elastic training may change."""

    def placement(self) -> Placement:
        """Returns this rank's numbers in the world, in its group and on its host, and its host's name."""

    def start_token(self) -> object:
        """Returns an object that changes when the collectives start again, after which ranks agree anew."""

    def facts(self, known: Facts) -> Facts:
        """Returns the parameters to synchronize that are not in `known`, in the order of the model."""

    def carry_out(self, coroutine: Synchronization[Result], topology: Topology | None) -> Result:
        """Runs a coroutine on all ranks, and returns its result; `topology` says which ranks share a host."""

    def begin(self, training: Any) -> None:
        """Called on all ranks after each agreement: adopts the training's `label` and `topology`."""

    def declared(self) -> Mapping[str, object]:
        """Returns further arguments that have to be equal on all ranks, beside recipe and settings."""

    def to_array(self, array: np.ndarray) -> Any:
        """Copies an array of a sparsifier's state to the type of array that checkpoints contain."""


def answer_for_one_rank(request: Request) -> Any:
    """Returns a collective's result where one rank takes part: a copy of its buffer, or the buffer."""
    if isinstance(request, Exchange):
        return {peer: request.sends[peer].copy() for peer in request.sources}
    if isinstance(request, AllToAll):
        return [buffer.copy() for buffer in request.buffers]
    buffer: Any = request.buffer
    if isinstance(request, ReduceScatter):
        return buffer
    return buffer.clone() if hasattr(buffer, "clone") else buffer.copy()  # a tensor's copy is a clone


def carry_out(
    coroutine: Synchronization[Result], execute: Callable[[Request], Any] = answer_for_one_rank
) -> Result:
    """Runs a coroutine, carrying out each request by `execute`, which waits for the result."""
    answer: Any = None
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        try:
            answer = execute(request)
        except BaseException:
            coroutine.close()
            raise


class Handle(Protocol):
    """Protocol of a collective in flight."""

    def done(self) -> bool | None:
        """True once `result` need not wait; None if the library of the collective was shut down meanwhile."""

    def result(self) -> Any:
        """Waits for the collective, and returns its result; called once."""


#: How long `wait` polls without a pause before it sleeps between polls, and for how long then. Two rounds of
#: a task take 2.2 ms so on 2 busy cores, and 30 to 90 ms if polls take the core from Horovod's thread.
_SPIN_SECONDS, _SLEEP_SECONDS = 50e-6, 20e-6
#: The sleep grows to this share of the wait, but not beyond Horovod's default cycle, before which no result
#: can come. With 8 ranks on 2 cores fixed sleeps took 4 to 6 ms of CPU time from a step of 100 ms.
_SLEEP_SHARE, _LONGEST_SLEEP_SECONDS = 0.1, 1e-3
#: How long collectives in flight get to end after one of them has failed.
_DRAIN_SECONDS = 1.0


class Driver(Starter):
    """Runs coroutines in one thread: starts their collectives, and resumes them when results arrive.

    Nothing blocks but `wait`, which resumes every parked coroutine that can go on: so ranks may start tasks,
    and wait for them, in different orders. `failure` is the error of the library that fails below.
    """

    def __init__(
        self, failure: type[Exception], size: Callable[[], int], deadline: Deadline | None = None
    ) -> None:
        self._kind_of_failure, self._size, self._deadline = failure, size, deadline
        #: prefix of the names of all collectives, equal on all ranks
        self.label = ""
        #: by name: tasks whose collective is in flight
        self.parked: dict[str, tuple[Task, Synchronization[Any], Handle]] = {}
        self._failure: BaseException | None = None

    def start_request(self, request: Request, name: str) -> Handle:
        """Starts a collective and returns its handle at once; ranks match collectives by their names."""
        raise NotImplementedError

    def forget_messages(self) -> None:
        """Drops messages in flight between pairs of ranks."""

    def _begin(self, batch: Batch) -> None:
        """Runs each coroutine up to its first collective, and starts that.

        After a failure that the next `wait` is to raise nothing is started: the task has ended with it.
        """
        for task, coroutine in batch:
            if task.name in self.parked:
                self.advance()  # drops collectives that were started before a restart of Horovod
            if task.name in self.parked:
                coroutine.close()
                raise UnsupportedError(
                    f"{task.name} is synchronized while its last synchronization is still under way: wait "
                    "first (optimizer.synchronize() or step()), and let no two optimizers share a compressor"
                )
            if self._failure is not None:
                coroutine.close()
                self._finish_task(task, error=self._failure)
            else:
                self._resume(task, coroutine, None)

    def advance(self, max_pending: int | None = None) -> bool:
        """Resumes coroutines whose collectives have completed; stops after seeing `max_pending` unfinished.

        Returns whether it resumed one.
        """
        moved, again = False, True
        while again and self._failure is None:
            again, num_pending = False, 0
            for task, coroutine, handle in list(self.parked.values()):
                if task.done:  # a failure in another task has ended this one too
                    continue
                done = handle.done()
                if done is None:
                    coroutine.close()
                    self._finish_task(task, error=self._kind_of_failure("Horovod was shut down meanwhile"))
                elif done:
                    self._take_result(task, coroutine, handle)
                else:
                    num_pending += 1
                    if num_pending == max_pending:
                        break
                    continue
                moved = again = True
        return moved

    def wait(self, tasks: Iterable[Task], meanwhile: Callable[[], None] | None = None) -> None:
        """Waits until tasks are done, resuming all coroutines meanwhile; `Task.value` raises errors."""
        awaited = list(tasks)
        self.advance()
        idle_since, looking = time.perf_counter(), 0.0
        while True:
            if self._failure is not None:
                self.clear()
                failure, self._failure = self._failure, None
                raise failure
            pending = [task for task in awaited if not task.done]
            if not pending:
                return
            if meanwhile is not None:
                meanwhile()
            paused = time.perf_counter()
            if paused - idle_since > _SPIN_SECONDS:
                patient = min(_SLEEP_SHARE * (paused - idle_since), _LONGEST_SLEEP_SECONDS)
                time.sleep(max(_SLEEP_SECONDS, patient, looking))
            resumed = time.perf_counter()
            moved = self.advance()
            now = time.perf_counter()
            looking = 0.0 if moved else now - resumed  # with many parked tasks, half a core at most
            idle = (resumed if moved else now) - paused  # time without a result counts as idle
            self.idle_seconds += idle
            for task in pending:
                task.waited_seconds += idle
            if moved:
                idle_since = now
                if self._deadline is not None:
                    self._deadline.saw_progress()
            elif self._deadline is not None:
                name, number = f"{self.label}{pending[0].name}", pending[0].num_rounds - 1
                try:
                    self._deadline.check(now - idle_since, name, number)
                except DeadlineError:
                    self.clear()
                    raise

    def clear(self, *, forget: bool = True) -> None:
        """Cancels all unfinished tasks, without waiting for other ranks (after a failure or a reset).

        With `forget` messages of MPI are dropped, too; without, other ranks may still receive them.
        """
        error = self._failure or UnsupportedError("the synchronization was cancelled before its end")
        for task, coroutine, _ in list(self.parked.values()):
            coroutine.close()
            self._finish_task(task, error=error)
        if forget:
            self.forget_messages()

    def _take_result(self, task: Task, coroutine: Synchronization[Any], handle: Handle) -> None:
        """Resumes a coroutine with the result of its collective; an error ends its task."""
        try:
            answer = handle.result()
        except self._kind_of_failure as error:
            self._drain_after_failure(error)
        except Exception as error:  # the messages do not fit the request
            coroutine.close()
            self._finish_task(task, error=error)
        else:
            self._resume(task, coroutine, answer)

    def _resume(self, task: Task, coroutine: Synchronization[Any], answer: Any) -> None:
        """Sends `answer` into a coroutine, runs it up to its next collective, and starts that."""
        try:
            request = coroutine.send(answer)
            while self._size() == 1:
                task.num_rounds += 1
                request = coroutine.send(answer_for_one_rank(request))
            handle = self.start_request(request, f"{self.label}{task.name}.{task.num_rounds}")
        except StopIteration as stop:
            self._finish_task(task, result=stop.value)
        except BaseException as error:
            coroutine.close()
            self._finish_task(task, error=error)
            if isinstance(error, self._kind_of_failure):
                self._drain_after_failure(error)
            elif not isinstance(error, Exception):
                raise  # the user's interrupt
        else:
            task.num_rounds += 1
            self.parked[task.name] = (task, coroutine, handle)

    def _finish_task(self, task: Task, *, result: Any = None, error: BaseException | None = None) -> None:
        self.parked.pop(task.name, None)
        task.result, task.error, task.done = result, error, True

    def _drain_after_failure(self, error: BaseException) -> None:
        """Drops everything in flight after Horovod has failed, so that names can be used again."""
        self._failure = error
        deadline = time.perf_counter() + _DRAIN_SECONDS
        for _, _, handle in list(self.parked.values()):
            try:
                while handle.done() is False and time.perf_counter() < deadline:
                    time.sleep(_SLEEP_SECONDS)
                if handle.done():
                    handle.result()
            except Exception:  # one failure is reported; the others follow from it
                continue
        self.clear()
