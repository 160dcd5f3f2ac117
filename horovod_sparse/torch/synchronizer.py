"""Gradients of one optimizer: from backward's hooks to the synchronized sum."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import (
    EditedGradientError,
    HorovodSparseError,
    NonFiniteGradientError,
    UnsupportedError,
)
from horovod_sparse.feedback import Recipe, resumed
from horovod_sparse.feedback.state import shared_digest
from horovod_sparse.frontend.agreement import Standing, Start, agreed_start, kept_share
from horovod_sparse.frontend.collective_errors import has_bad_gradient, raise_together, some_of, worst
from horovod_sparse.frontend.decision import check_agreement
from horovod_sparse.frontend.momentum import refuse_later_momentum
from horovod_sparse.frontend.parts import assign_residuals, held_residuals
from horovod_sparse.frontend.plan_request import make_plan
from horovod_sparse.merging import ParameterFacts, Plan
from horovod_sparse.pytorch.layout import dtype_name
from horovod_sparse.pytorch.loss_scale import ScaleOfStep, watch_scalers
from horovod_sparse.telemetry import StepReport, Telemetry
from horovod_sparse.torch import planning
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.calibration import carry_out_together
from horovod_sparse.torch.driver import Driver
from horovod_sparse.torch.explained import explain
from horovod_sparse.torch.handles import present_start
from horovod_sparse.torch.hooks import claim
from horovod_sparse.torch.parts import DenseBucket, Part, SparseBucket
from horovod_sparse.torch.parts_of_plan import parts_of
from horovod_sparse.torch.transport import transport_words
from horovod_sparse.torch.warmup import WarmUp

_log = logging.getLogger("horovod_sparse")

#: parts that a hook finds not done before it looks no further: with many buckets under way, looking at all
#: of them in every hook would take longer than what is found is worth
_PATIENCE = 4

_numbers = itertools.count()


def _next_label() -> str:
    """Goes before the names of an optimizer's collectives; the first one's have nothing before them.

    Two optimizers may have parameters of the same names (two networks that are trained in turn). The
    number need not be the same on all ranks: all take the first rank's.
    """
    number = next(_numbers)
    return f"optimizer{number}." if number else ""


def clip_gradients(param_groups: Sequence[Mapping[str, Any]], max_norm: float) -> torch.Tensor:
    """Scales the gradients of an optimizer down to a norm over all of them; returns what it was."""
    return torch.nn.utils.clip_grad_norm_([p for group in param_groups for p in group["params"]], max_norm)


class GradientSynchronizer:
    """Starts every bucket when its last gradient is there, and puts the sums where gradients are.

    Nothing waits but `synchronize`. Hooks do O(1) Python work each; all work on elements is the fused
    pass of a bucket, and work on its k selected elements.

    Args:
        optimizer: tells learning rates, passes per step, and how many passes each parameter still
            waits for (`_allreduce_delay`, which Horovod's own methods set back too).
        facts: as made by `planning.facts_of`.
        recipe: what to do with a bucket.
        first: plan to begin with, of this rank; that of the first rank is taken when all have agreed,
            which they do in the first synchronization after every start of Horovod.
        process_set: the ranks that take part.
        average: whether sums are divided by the number of ranks.
        sparse_as_dense: whether gradients in COO form are taken.
        to_coo: whether all gradients are given in COO form: what SparseAdam takes.
        in_backward: whether buckets are started while backward goes on, or all of them by `synchronize`.
    """

    def __init__(
        self,
        optimizer: Any,
        facts: Mapping[str, tuple[ParameterFacts, torch.Tensor]],
        recipe: Recipe,
        first: planning.FirstPlan,
        *,
        process_set: Any,
        average: bool,
        sparse_as_dense: bool,
        to_coo: bool = False,
        in_backward: bool = True,
    ) -> None:
        self.optimizer, self.facts, self.recipe = optimizer, dict(facts), recipe
        self.process_set, self.average, self.sparse_as_dense = process_set, average, sparse_as_dense
        self.to_coo = to_coo
        self.driver = Driver(process_set)
        self.telemetry = Telemetry()
        self.warmup: WarmUp | None = None
        if first.request is not None:
            parameters = [fact for fact, _ in self.facts.values()]
            self.warmup = WarmUp(first.request, parameters, recipe.sparsifier, process_set, first.decision)
        self._first, self._label = first, _next_label()
        #: the start of Horovod in which the ranks agreed last
        self._agreed_under: Any = present_start() if self.size == 1 else None
        self._retired = False
        #: names of parameters that have joined since the optimizer was made
        self.joined: set[str] = set()
        self._name_of = {parameter: name for name, (_, parameter) in self.facts.items()}
        #: synchronizations done, those that were given up not counted
        self.step = 0
        #: whether a gradient has arrived since the last synchronization
        self.under_way = False
        #: of the losses whose gradients these are
        self.loss_scale = ScaleOfStep()
        #: what a loss scaler is told by gradients of Inf, instead of being raised
        self.overflow: NonFiniteGradientError | None = None
        self.parts: list[Part] = []
        self.plan = first.plan
        self._in_backward, self._num_waiting = in_backward, 0
        self._held: list[Part] = []
        self._part_of: dict[torch.Tensor, Part] = {}
        self._kinds: list[tuple[torch.Tensor, torch.dtype, torch.device]] = []
        #: (rank, size) that states are made for, and all sizes there have been
        self._place = (self.rank, self.size)
        self.sizes = {self.size}
        # autograd runs the hooks of each device in a thread of its own
        self._hooks = threading.Lock()
        self.build(first.plan)
        self._handles = claim(self, (parameter for _, parameter in self.facts.values()))
        watch_scalers()

    @property
    def rank(self) -> int:
        """Of this process, within the process set."""
        return int(self.process_set.rank())

    @property
    def size(self) -> int:
        """Ranks in the process set."""
        return int(self.process_set.size())

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size of this process within the process set."""
        return self.rank, self.size

    @property
    def sparse(self) -> list[SparseBucket]:
        """The parts that are sparsified, in the plan's order."""
        return [
            part
            for part in self.parts
            if isinstance(part, SparseBucket) and not isinstance(part, DenseBucket)
        ]

    def build(self, plan: Plan) -> None:
        """Fresh buckets for a plan. Gradients stay what they are."""
        parts = parts_of(plan, self.facts, self.recipe, self._learning_rate, self._place)
        for part in parts:
            part.gradient.gather_existing()
        self.plan, self.parts, self._part_of, self._kinds = plan, [], {}, []
        self._num_waiting = 0
        self._enter(parts)

    def _enter(self, parts: Sequence[Part]) -> None:
        """Further parts."""
        self.parts += parts
        entered = {parameter: part for part in parts for parameter in part.gradient.parameters}
        self._part_of |= entered
        self._kinds += [(p, p.dtype, p.device) for p in entered]
        self._num_waiting += len(parts)

    def _learning_rate(self, group: int) -> float | None:
        # by number: load_state_dict makes new dicts of the groups
        rate = self.optimizer.param_groups[group].get("lr")
        return None if rate is None else float(rate)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """After every accumulation into a parameter's gradient. Never waits for other ranks."""
        with self._hooks:
            part = self._take(parameter)
            complete = self.optimizer._allreduce_delay[parameter] == 0
            ready = part.num_missing == 0 and complete and self._in_backward
            # the last one waits for `synchronize`: it tells all ranks whether one has changed gradients
            works = ready and self._is_agreed and self._num_waiting > 1
            if ready and not works:
                part.gradient.gather()
                part.gradient.note()
                self._held.append(part)
            warmup = self.warmup
            recording = warmup is not None and warmup.recording and complete
            entered = warmup.stamp() if warmup is not None and recording else None
            if works:
                self._start(part)
            works = works or self.driver.num_parked > 0
            self.driver.advance(_PATIENCE)
            if warmup is not None and recording:
                left = warmup.stamp() if works else entered
                warmup.arrived(self._name_of[parameter], entered, left)

    def _start(self, part: Part, *, refused: bool = False) -> None:
        part.start(self.driver, self.loss_scale.value, refused=refused)
        self._num_waiting -= 1

    def _take(self, parameter: torch.Tensor) -> Part:
        """The part whose gradient is now complete but for `num_missing` parameters."""
        delays, gradient = self.optimizer._allreduce_delay, parameter.grad
        if delays[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        if gradient is None or gradient.requires_grad:
            raise AssertionError(
                "a gradient that has a gradient itself (create_graph=True) is not synchronized"
            )
        if gradient.is_sparse and not (self.sparse_as_dense or self.to_coo):
            raise UnsupportedError(
                f"{self.optimizer._parameter_names[parameter]} has a gradient in sparse (COO) form: pass "
                "sparse_as_dense=True to sparsify it like any other, or make its layer with sparse=False"
            )
        self._begin()
        self.loss_scale.note()
        part = self._part_of[parameter]
        part.streams.note()
        delays[parameter] -= 1
        if delays[parameter] == 0:
            part.num_missing -= 1
        return part

    def _begin(self) -> None:
        """Before the first gradient of a step."""
        if not self.under_way:
            self.under_way, self.overflow = True, None
            self.optimizer._synchronized = False
            if any((p.dtype, p.device) != (dtype, device) for p, dtype, device in self._kinds):
                self._follow()

    def _follow(self) -> None:
        """Buckets of the types and on the devices that parameters have now; residuals are converted.

        Raises:
            UnsupportedError: where only some parameters of a bucket have changed, or to an unknown type.
        """
        before, told = self.facts, ""
        self.facts = {}
        for name, (fact, parameter) in before.items():
            dtype, device = dtype_name(parameter) or str(parameter.dtype), str(parameter.device)
            self.facts[name] = dataclasses.replace(fact, dtype=dtype, device=device), parameter
            if self.facts[name][0] != fact and (not told or dtype_name(parameter) is None):
                told = f"{name} was {fact.dtype} on {fact.device} and is {dtype} on {device} now"
        try:
            self.replan(self.plan)
        except HorovodSparseError as error:
            self.facts, self.under_way = before, False
            raise UnsupportedError(
                f"{told}, which its bucket cannot follow ({error}). Convert and move a model as a whole, or "
                "before it is wrapped"
            ) from error

    @property
    def _is_agreed(self) -> bool:
        return self._agreed_under is present_start()

    def _agree(self) -> None:
        """All ranks together, before their first bucket after a start of Horovod: what they go on with."""
        if self._is_agreed:
            return
        under = present_start()
        start = carry_out_together(self._agreement(), self.process_set, "horovod_sparse.agreement")
        self.driver.label, self._agreed_under = start.label, under
        if start.anew:
            self._start_anew(start)
        if self.warmup is not None and not start.measures:
            self.warmup.stop_measuring()

    def joining(self) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
        """Parameters that the optimizer has come to train, and that have no bucket yet."""
        return planning.joining(self.optimizer, self._part_of, self.recipe.rules)

    def take_in(self) -> None:
        """Buckets of their own for parameters that the optimizer has come to train; all ranks alike.

        A gradient that they have already is a part of this step.
        """
        new = self.joining()
        if not new:
            return
        parameters = [fact for fact, _ in new.values()]
        request = self._first.request
        plan = make_plan(new) if request is None else request.first_plan(parameters)
        if self._is_agreed and self.size > 1:
            _log.warning(
                "%s joined the optimizer: waiting for all ranks to have the same parameters join",
                ", ".join(new),
            )
            standing = Standing(self.step, "", self._place, plan, parameters, label=self.driver.label)
            agreed = carry_out_together(agreed_start(standing), self.process_set, "horovod_sparse.agreement")
            plan = agreed.plan
        parts = parts_of(
            plan, new, self.recipe, self._learning_rate, self._place, first=len(self.plan.buckets)
        )
        for part in parts:
            part.gradient.gather_existing()
        self.plan = Plan(self.plan.buckets + plan.buckets, self.plan.dense + plan.dense)
        self._enter(parts)
        self.joined |= set(new)
        for name, (fact, parameter) in new.items():
            self.facts[name] = fact, parameter
            self._name_of[parameter] = name
            self.optimizer._parameter_names[parameter] = name
            self.optimizer._requires_update.add(parameter)
            self.optimizer._allreduce_delay[parameter] = 0
        self._handles += claim(self, (parameter for _, parameter in new.values()))
        if self.warmup is not None:
            self.warmup.joined([fact for fact, _ in self.facts.values()])

    def _agreement(self) -> Synchronization[Start]:
        yield from check_agreement(self._first.request)
        yield from raise_together(self._first.failure)
        buckets = {part.name: part.bucket for part in self.sparse}
        standing = Standing(
            self.step,
            shared_digest({name: bucket.state for name, bucket in buckets.items()}),
            self._place,
            self.plan,
            [fact for fact, _ in self.facts.values()],
            self._settings(),
            measuring="" if self.warmup is None else self.warmup.position,
            label=self._label,
            told={name: part.bucket.progress.to_plain() for part in self.sparse for name in part.names},
        )
        return (yield from agreed_start(standing))

    def _settings(self) -> dict[str, str]:
        """Arguments that change what is applied, which would let replicas drift apart."""
        limit = getattr(self.optimizer, "_max_grad_norm", None)
        return {
            "compression": self.recipe.describe(),
            "op": "Average" if self.average else "Sum",
            "max_grad_norm": str(limit),
        }

    def _start_anew(self, start: Start) -> None:
        """Fresh states, as all ranks have agreed; residuals are kept, and so is their mean."""
        old_size, self._place, self.step = self._place[1], (self.rank, self.size), start.step
        self.sizes.add(self.size)
        factor = kept_share(old_size, self.size)
        if self.rank == 0 and start.step > 0:
            _log.warning(
                "sparsifier states start anew at step %d, residuals are kept: %s", start.step, start.reason
            )
        held = held_residuals(self.parts, self.recipe.feedback.num_companions)
        progress = {
            name: resumed(part.bucket.progress, start.told.get(name), start.step)
            for part in self.sparse
            for name in part.names
        }
        self.build(start.plan)
        if factor != 1.0:
            held = [{name: values * factor for name, values in by_name.items()} for by_name in held]
        assign_residuals(self.parts, held, progress)
        for part in self.parts:
            part.streams.note()

    def take_place(self) -> None:
        """Fresh buckets for the place that this rank has now, of which the residuals are not kept.

        For what is about to be loaded. In the next step all ranks compare what they have.
        """
        if self._place != (self.rank, self.size):
            self._place = (self.rank, self.size)
            self.sizes.add(self.size)
            self.build(self.plan)
        self._agreed_under = None

    def reduced(self, loss: Any) -> Any:
        """A loss over all ranks, as gradients are: their mean, or their sum.

        Args:
            loss: of this rank, a number or a tensor of one element.
        """
        if self.size == 1:
            return loss
        value = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().reshape(1)
        op = hvd.Average if self.average else hvd.Sum
        name = f"{self.driver.label}horovod_sparse.loss"
        total = hvd.allreduce(value, op=op, name=name, process_set=self.process_set).reshape(())
        return total.to(loss) if isinstance(loss, torch.Tensor) else float(total)

    def retire(self) -> None:
        """See `Owner.retire`. A step that is under way is given up."""
        for handle in self._handles:
            handle.remove()
        if self.under_way:
            self.give_up()
        self._retired = True

    def check_in_use(self) -> None:
        """Refuses an optimizer that has been replaced.

        Raises:
            UnsupportedError: if another optimizer has been made for a parameter of this one.
        """
        if self._retired:
            raise UnsupportedError(
                "a parameter of this optimizer was given to another DistributedOptimizer afterwards, which "
                f"synchronizes it now: use that one ({', '.join(list(self.facts)[:3])}, ...)"
            )

    def synchronize(self) -> None:
        """Waits for all buckets, and scatters their sums into the gradients.

        Where a loss scaler looks for them, a gradient that is not finite raises nothing: the step is given
        up, and gradients are Inf on every rank alike.

        Raises:
            ArgumentError: if the optimizer has come to have momentum that the feedback applies already.
            StateMismatchError: on every rank alike, if ranks have different parameters when the training
                begins, or when parameters join it.
            NonFiniteGradientError: on every rank alike, if a gradient is not finite on some rank. The
                whole step is given up: gradients are zeros, those of other ranks stay in the residuals,
                and training may go on.
            EditedGradientError: on every rank alike, if gradients were changed on some rank after their
                synchronization had begun.
            UnsupportedError: if a rank has called ``hvd.join()`` meanwhile.
            ProfileMismatchError: on every rank alike, if this is the first step and ranks were given
                different profiles or ask for different plans, or a profile cannot be read or applied; if
                it ends the warm-up and no plan can be made: then gradients are synchronized, and the plan
                stays what it is.
            HorovodInternalError: if Horovod failed.
        """
        self.check_in_use()
        self._begin()
        self.loss_scale.settle()
        idle_before = self.driver.idle_seconds
        edited = self._edited()
        try:
            refuse_later_momentum(self.recipe, self.optimizer.param_groups)
            self.take_in()
            self._agree()
            for part in self.parts:
                if part.task is None:
                    self._start(part, refused=bool(edited))
            tasks = [part.task for part in self.parts if part.task is not None]
            self.driver.wait(tasks)
        except HorovodSparseError:
            # what hooks have begun is ended first: its names are Horovod's until then
            self.finish_pending()
            raise
        except BaseException as error:
            self.give_up()
            explain(error)
            raise
        errors = [task.error for task in tasks if task.error is not None]
        if errors:
            self._refuse(errors, edited)
            return
        scale = 1.0 / self.size if self.average else 1.0
        reports = [part.apply(scale) for part in self.parts]
        self._make_ready()
        self.step += 1
        self.telemetry.transport = transport_words(self.process_set)
        self.telemetry.add(StepReport.of(self.step, reports, self.driver.idle_seconds - idle_before))
        if self.warmup is not None and (plan := self.warmup.after_step(self.plan)) is not None:
            self.replan(plan)

    def _edited(self) -> list[str]:
        """Parameters whose gradients were changed after their synchronization had begun."""
        return [
            part.names[number]
            for part in self.parts
            if part.task is not None or part in self._held
            for number in part.gradient.edited()
        ]

    def _refuse(self, errors: Sequence[BaseException], edited: Sequence[str]) -> None:
        """No rank applies this step; raises why not, unless a loss scaler is to find out."""
        error, bad = worst(errors), has_bad_gradient(errors, self.rank)
        if isinstance(error, NonFiniteGradientError) and self.loss_scale.scaler is not None:
            self.give_up(drop=bad)
            self.parts[0].gradient.overflow()
            self.overflow = error
            return
        self.give_up(drop=bad)
        if isinstance(error, EditedGradientError) and edited:
            error.where[self.rank] = some_of(edited)
        raise error

    def give_up(self, *, drop: bool = False) -> None:
        """Takes the step back as far as it came: gradients are zeros, selections return to residuals.

        Args:
            drop: this rank's gradients leave the residuals, too: some of them are not finite.
        """
        self.driver.clear()
        for part in self.parts:
            if part.task is not None:
                part.abandon(drop=drop)
            part.gradient.reset()
        self._make_ready()
        if self.warmup is not None:
            self.warmup.given_up()

    def finish_pending(self) -> None:
        """Ends a step that is under way, and gives it up: every rank has to do so.

        If Horovod has failed there is nothing to wait for: elastic training takes back an older state then,
        and starts Horovod again.
        """
        if not self.under_way:
            return
        if not self._is_agreed:  # then nothing has been started
            self.give_up()
            return
        for part in self.parts:
            if part.task is None:
                self._start(part)
        try:
            self.driver.wait()
        except hvd.HorovodInternalError as error:
            _log.info("a step was given up, since Horovod has failed: %s", error)
        finally:
            self.give_up()

    def _make_ready(self) -> None:
        for part in self.parts:
            part.task, part.num_missing = None, len(part.names)
        delays, passes = self.optimizer._allreduce_delay, self.optimizer.backward_passes_per_step
        for parameter in delays:
            delays[parameter] = passes
        self.under_way, self._held, self._num_waiting = False, [], len(self.parts)
        self.loss_scale.end()

    def clip(self, max_norm: float) -> None:
        """Scales all gradients of the optimizer down to a norm, as `torch.nn.utils.clip_grad_norm_` does.

        Args:
            max_norm: of gradients without the loss's scale.
        """
        norm = clip_gradients(self.optimizer.param_groups, max_norm * self.loss_scale.value)
        if norm.device.type == "cpu" and torch.isfinite(norm):
            for part in self.parts:
                part.gradient.only_scaled()

    def convert(self) -> None:
        """Gradients in the form that the optimizer takes, once they have been clipped."""
        if self.to_coo and self.overflow is None:
            for part in self.parts:
                part.gradient.to_coo()

    def zero_grad(self) -> None:
        """Zeros in all gradients, which stay views; see `FlatGradient.clear`."""
        for part in self.parts:
            part.gradient.clear()

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradient is one of the views."""
        return parameter in self._part_of and self._part_of[parameter].gradient.owns(parameter)

    def replan(self, plan: Plan) -> None:
        """Another plan, the residuals kept; the state of the sparsifiers starts anew."""
        plan.check([fact for fact, _ in self.facts.values()])
        held = held_residuals(self.parts, self.recipe.feedback.num_companions)
        progress = {name: part.bucket.progress for part in self.sparse for name in part.names}
        self.build(plan)
        assign_residuals(self.parts, held, progress)
