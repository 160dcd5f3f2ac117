"""Hooks start a bucket's exchange after its last gradient; sums over ranks then replace the gradients.

The front ends of Horovod and torch.distributed derive from it, and say when a step ends. That of
torch.distributed has a hook of its own, since ranks have to start buckets in the same order.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from horovod_sparse import errors
from horovod_sparse.feedback import MomentumCorrection, Recipe
from horovod_sparse.plans import Plan
from horovod_sparse.tensors import layout, loss_scale
from horovod_sparse.tensors.gradients import GradientBucket
from horovod_sparse.training.collective_errors import Outcome, listed, worst
from horovod_sparse.training.compression import check_added_momentum
from horovod_sparse.training.engine import Engine, Facts, PartSpec
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.training import Training

#: most unfinished collectives that a hook polls: polling all of many buckets in
#: every hook takes longer than it saves
_PATIENCE = 4
#: errors that all ranks find in the same messages, so that their rounds still match
_ALIKE = (errors.NonFiniteGradientError, errors.EditedGradientError)


def _remove_hooks(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


class GradientTraining(Training):
    """Starts each bucket's exchange when backward computes its last gradient; `synchronize` waits for all.

    Attributes:
        optimizer: the parameters' optimizer; None if the user gave none.
        under_way: True if a gradient was computed since the last synchronization.
        loss_scale: the scale of this step's losses.
        overflow: the error of a step that a loss scaler skips, since it finds Inf in the gradients.
        num_started: parts that were started in this step.
        skipped: the error of a step that ``on_nonfinite="skip"`` skips.
        is_synchronized: True if the gradients are sums over ranks, and no step has used them yet.
        for_scaler: True if a loss scaler has made them be synchronized for that step.
        takes_coo: whether sparse (COO) gradients are synchronized.
        starts_early: whether buckets start within the backward pass, and not in `synchronize` alone.
    """

    is_synchronized = for_scaler = False
    takes_coo = starts_early = True
    #: True once another training has taken its parameters
    is_retired = False

    def __init__(
        self, engine: Engine, recipe: Recipe, settings: Settings, optimizer: Any, label: str = ""
    ) -> None:
        super().__init__(engine, recipe, settings, label)
        self.optimizer, self.under_way, self.num_started = optimizer, False, 0
        self.loss_scale = loss_scale.ScaleOfStep()
        self.overflow: BaseException | None = None
        self.skipped: BaseException | None = None
        #: by parameter: backward passes still missing in this step
        self.delays: dict[torch.Tensor, int] = {}
        # autograd runs the hooks of each device in a thread of its own
        self._hooks = threading.Lock()
        self._handles, self._watched = list[Any](), set[torch.Tensor]()
        self._part_of: dict[torch.Tensor, GradientBucket] = {}
        loss_scale.watch_scalers()
        _keep_out_of_graphs()

    def make_parts(self, specs: Sequence[PartSpec], facts: Facts) -> list[GradientBucket]:
        levels = [None if spec.dense else self.topology for spec in specs]
        pairs = zip(specs, levels, strict=True)
        return [GradientBucket(spec, facts, self.made_for, topology=topology) for spec, topology in pairs]

    # what a front end overrides

    @property
    def divisor(self) -> float:
        """The number by which a sum over ranks is divided."""
        return self.size

    def join_any_new_parameters(self) -> None:
        """Makes parts for parameters added to the optimizer, if there are any; called in `synchronize`."""
        if any(p not in self._part_of for group in self.optimizer.param_groups for p in group["params"]):
            self.join_new_parameters()

    #: True to compare models before a step is applied; else `step` compares them afterwards
    compares_first = False

    def compare_models(self) -> None:
        """Compares all ranks' models unless `check_every` is 0; all ranks call it together."""
        if self.drift.every:
            parameters = {name: one for name, (_, one) in self.facts.items()}
            entries = layout.replicated_arrays(parameters, self.optimizer) if self.size > 1 else ()
            self._carry_out(self.drift.compare(self.step, entries))

    def cancel_collectives(self, *, alike: bool) -> None:
        """Cancels a step's collectives in flight; `alike`: all ranks cancel it after the same rounds."""

    #: raises an error with a remedy for a known failure
    raise_explained: Callable[[BaseException], None] = staticmethod(lambda error: None)

    # gradients

    def register_hooks(self, parameters: Iterable[torch.Tensor]) -> None:
        """Registers `on_gradient` as a hook, which autograd calls after it has computed a gradient."""
        new = [one for one in parameters if one not in self._watched]
        self._watched |= set(new)
        # a weak reference, since Python's garbage collector does not see references from PyTorch's hooks
        hook = types.MethodType(type(self).on_gradient, weakref.proxy(self))
        handles = [one.register_post_accumulate_grad_hook(hook) for one in new]
        self._handles += handles
        weakref.finalize(self, _remove_hooks, handles)

    def build(self, plan: Plan) -> None:
        self._part_of = {}
        super().build(plan)

    def _connect_parts(self, parts: Sequence[GradientBucket]) -> None:
        for part in parts:
            part.scale = 1.0 / self.divisor
            if part.streams is not None:
                part.streams.note_writer()
            self._part_of |= dict.fromkeys(part.given, part)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Hook: counts a computed gradient, and starts the exchange of its bucket after the last one."""
        with self._hooks:
            part, complete = self._part_of[parameter], self._count_gradient(parameter)
            ready = complete and part.num_missing == 0 and self.starts_early
            # `synchronize` starts the last bucket, whose message tells all ranks of edited gradients
            works = ready and len(self.parts) - self.num_started > 1 and self.is_agreed
            if ready and not works:
                part.take_gradients()  # which must not change until `synchronize` starts the bucket
            if works:
                self._start_part(part)
            if self.starter.parked:
                self.starter.advance(_PATIENCE)

    def _count_gradient(self, parameter: torch.Tensor) -> bool:
        """Counts a gradient; returns True if it is the parameter's last of the step's backward passes."""
        part, delays, gradient = self._part_of[parameter], self.delays, parameter.grad
        if delays[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                "backward(create_graph=True) is not supported: sums over ranks have no graph"
            )
        if gradient is not None and gradient.is_sparse and not self.takes_coo:
            raise errors.UnsupportedError(
                f"{part.name_of(parameter)} has a gradient in sparse (COO) form: pass sparse_as_dense=True "
                "to sparsify it like any other, or make its layer with sparse=False"
            )
        if not self.under_way:
            self._begin_step()
            # without a scaler there is no scale to read
            if loss_scale.scaled_passes or self.loss_scale.scaler is not None:
                self.loss_scale.read()
        if part.streams is not None:
            part.streams.note_writer()
        delays[parameter] -= 1
        part.num_missing -= delays[parameter] == 0
        return delays[parameter] == 0

    def _begin_step(self) -> None:
        """Called before a step's first gradient: checks dtypes and devices, forgets the last step's error."""
        for part in self.parts:
            if any((one.dtype, one.device) != (part.kind, part.device) for one in part.given):
                part.check_dtypes_and_devices()
        self.under_way, self.is_synchronized, self.overflow, self.skipped = True, False, None, None

    def _start_part(self, part: GradientBucket, *, mark_cancelled: bool = False) -> None:
        tells = self.compares_first or part.whole  # Horovod's sparse messages carry their step
        turn = f" of an {('even', 'odd')[self.step % 2]} step" if tells else ""
        part.start(self.starter, self.loss_scale.value, turn, mark_cancelled=mark_cancelled)
        self.num_started += 1

    # sums over ranks

    def synchronize(self) -> None:
        """Waits for all buckets, and overwrites the gradients with their sums over ranks.

        Every error is raised on all ranks alike, and the whole step is cancelled. Where a loss scaler looks
        for them, or with `on_nonfinite="skip"`, gradients that are not finite raise nothing.

        Raises:
            HorovodSparseError: the errors for which ranks cancel a step; see `horovod_sparse.errors`.
        """
        if not self.under_way:
            self._begin_step()
            self.loss_scale.read_without_pass()
        idle_before = self.starter.idle_seconds
        edited = [name for part in self.parts for name in part.edited_names()]  # since they were taken
        try:
            if isinstance(self.recipe.feedback, MomentumCorrection) and self.optimizer is not None:
                check_added_momentum(self.recipe, self.optimizer.param_groups)
            self.join_any_new_parameters()
            self.agree()
            for part in self.parts:
                if part.task is None:
                    self._start_part(part, mark_cancelled=bool(edited))
            failures = self._wait_for_failures()
            if self.compares_first and not failures and self.step >= self.drift.next_step:
                self.compare_models()
        except errors.DeadlineError:
            self.cancel_step()
            raise
        except errors.HorovodSparseError as error:
            # first ends the collectives that hooks began, which use the same names
            self.finish_pending()
            self.failures_of_all_shards([error])
            raise
        except BaseException as error:
            self.cancel_step()
            self.raise_explained(error)
            raise
        if failures := self.failures_of_all_shards(failures):
            self._cancel_and_raise(failures, edited)
            return
        reports = [part.apply() for part in self.parts]
        self.reset_counters()
        self.step += 1
        self.telemetry.record(self.step, reports, self.starter.idle_seconds - idle_before)

    def _wait_for_failures(self) -> list[BaseException]:
        """Waits for the exchanges of all started buckets, and returns their errors; empty without any."""
        tasks = [part.task for part in self.parts if part.task is not None]
        self.starter.wait(tasks)
        return [task.error for task in tasks if task.error is not None]

    def _cancel_and_raise(self, failures: Sequence[BaseException], edited: Sequence[str]) -> None:
        """Cancels the step on all ranks; raises its error unless GradScaler or `on_nonfinite` skips it."""
        verdict = self.policy.judge(failures, scaled=self.loss_scale.scaler is not None)
        error, drop = verdict.error, verdict.drop
        if verdict.outcome is Outcome.OVERFLOW:
            self.cancel_step(drop=drop, alike=True)
            given = (one.grad for part in self.parts for one in part.given if one.grad is not None)
            next(given).fill_(torch.inf)  # so that the scaler finds it
            self.overflow = error
            return
        self.cancel_step(drop=drop, alike=isinstance(error, _ALIKE))
        if verdict.outcome is Outcome.SKIPPED:
            self.skipped = error
            self.compare_models()  # if one rank's parameters are not finite, all would skip for ever
            return
        assert error is not None  # there are errors
        if isinstance(error, errors.EditedGradientError) and edited:
            error.where[self.rank] = listed(edited)
        raise error

    def cancel_step(self, *, drop: bool = False, alike: bool = False) -> None:
        """Cancels a step (`alike`: on all ranks): zeroes `.grad`, undoes selections; `drop`: also folds."""
        self.cancel_collectives(alike=alike)
        for part in self.parts:
            if part.task is not None:
                part.abandon(drop=drop)
        for part in self.parts:
            part.clear()
        self.reset_counters()

    def finish_pending(self, *, drop: bool = False) -> None:
        """Completes the collectives of a step in progress, and cancels the step; all ranks call it.

        If the collectives have failed there is nothing to wait for.
        """
        if not self.under_way:
            return
        alike = False
        try:
            if self.is_agreed:  # else nothing has been started
                for part in self.parts:
                    if part.task is None:
                        self._start_part(part)
                failures = self._wait_for_failures()
                alike = not failures or isinstance(worst(failures), _ALIKE)
        finally:
            self.cancel_step(drop=drop, alike=alike)

    def settle(self) -> None:
        """Does nothing, since every step waits for its exchange; trainers' callbacks call it."""

    def reset_counters(self) -> None:
        """Resets the counts of missing gradients and started parts, for the next step."""
        for part in self.parts:
            part.task, part.num_missing = None, len(part.names)
        for parameter in self.delays:
            self.delays[parameter] = self.optimizer.backward_passes_per_step
        self.under_way, self.num_started = False, 0

    def save(self, **more: Any) -> dict[str, Any]:
        """Returns this rank's checkpoint entry, which ``torch.load(weights_only=True)`` can load."""
        if any(part.task is not None for part in self.parts):  # passes may be accumulated
            raise errors.UnsupportedError(
                "save between steps: call optimizer.step() or optimizer.synchronize() before"
            )
        return super().save(**more)

    def retire(self) -> None:
        """Removes the hooks and cancels a step; called when another training takes the parameters over."""
        self.is_retired = True
        _remove_hooks(self._handles)
        self._handles = []
        if self.under_way:
            self.cancel_step()


@functools.cache
def _keep_out_of_graphs() -> None:
    """Prevents torch.compile from tracing this package's hooks in a compiled `backward`."""
    rules = importlib.import_module("torch._dynamo.trace_rules")  # there is no public way for whole packages
    for package in ("horovod_sparse", "numba", "llvmlite"):
        rules.add(package)
