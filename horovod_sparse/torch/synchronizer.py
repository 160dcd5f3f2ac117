"""Gradients of one optimizer: from backward's hooks to the synchronized sum."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from horovod_sparse import errors
from horovod_sparse.feedback import MomentumCorrection, Recipe
from horovod_sparse.plans import ParameterFacts, Plan
from horovod_sparse.tensors.driver import keep_out_of_graphs
from horovod_sparse.tensors.layout import dtype_name, host_entry
from horovod_sparse.tensors.loss_scale import ScaleOfStep, scaled_passes, watch_scalers
from horovod_sparse.tensors.parts import Part
from horovod_sparse.torch._horovod import claim, hvd
from horovod_sparse.torch.driver import carry_out_together, explain
from horovod_sparse.torch.horovod_engine import HorovodEngine, refuse_whole_gradients
from horovod_sparse.torch.planned import PlannedTraining
from horovod_sparse.training.collective_errors import some_of
from horovod_sparse.training.compression import refuse_later_momentum
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.outcome import Outcome, worst
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.state import check_entry, checked_states

_log = logging.getLogger("horovod_sparse")

#: parts that a hook finds not done before it looks no further: with many buckets under way, looking at all
#: of them in every hook would take longer than what is found is worth
_PATIENCE = 4
#: with which a step ends on all ranks, after all of its rounds
_ALIKE = (errors.NonFiniteGradientError, errors.EditedGradientError)


_ADVICE = (
    "the optimizer uses {}: use the same algorithm, or delete state_dict['horovod_sparse'] to start with "
    "no residual"
)
#: go before the names of optimizers' collectives: two may have parameters of the same names (networks that
#: are trained in turn). They need not be the same on all ranks: all take the first rank's.
_labels = itertools.chain([""], map("optimizer{}.".format, itertools.count(1)))


def clip_gradients(param_groups: Sequence[Mapping[str, Any]], max_norm: float) -> torch.Tensor:
    """Scales the gradients of an optimizer down to a norm over all of them; returns what it was."""
    return torch.nn.utils.clip_grad_norm_([p for group in param_groups for p in group["params"]], max_norm)


def _hook(synchronizer: weakref.ref[GradientSynchronizer]) -> Callable[[torch.Tensor], None]:
    """Tells a synchronizer of gradients as long as it lives.

    PyTorch's garbage collection does not see what a hook on a parameter refers to. A hook that referred to
    the synchronizer, which refers to the parameter, would keep both for ever.
    """

    def arrived(parameter: torch.Tensor) -> None:
        if (alive := synchronizer()) is not None:
            alive.on_gradient(parameter)

    return arrived


class GradientSynchronizer(PlannedTraining):
    """Starts every bucket when its last gradient is there; nothing waits but `synchronize`."""

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        recipe: Recipe,
        settings: Settings,
        groups: Any = None,
    ) -> None:
        engine = HorovodEngine(optimizer, named_parameters, recipe, settings.deadline_seconds)
        super().__init__(engine, recipe, settings, groups)
        self.optimizer = optimizer
        self.average, self.sparse_as_dense = optimizer.op == hvd.Average, optimizer.sparse_as_dense
        #: whether all gradients are given in COO form: what SparseAdam takes
        self.to_coo = isinstance(optimizer, torch.optim.SparseAdam)
        self._retired = False
        #: whether a gradient has arrived since the last synchronization
        self.under_way = False
        #: of the losses whose gradients these are
        self.loss_scale = ScaleOfStep()
        #: what a loss scaler is told by gradients of Inf, instead of being raised
        self.overflow: BaseException | None = None
        #: why the optimizer is not to step, where that is no error
        self.skipped: BaseException | None = None
        self._in_backward, self._num_started = settings.synchronize_at == "backward", 0
        self._kept_back: list[Part] = []
        # autograd runs the hooks of each device in a thread of its own
        self._hooks = threading.Lock()
        self._handles: list[Any] = []
        self._part_of: dict[torch.Tensor, Part] = {}
        self._name_of: dict[torch.Tensor, str] = {}
        self._kinds: list[tuple[torch.Tensor, torch.dtype, torch.device]] = []
        self._own_label = next(_labels)
        self.begin(self.facts, self._first.plan)
        self.claim(self.facts)
        watch_scalers()
        keep_out_of_graphs()

    def build(self, plan: Plan) -> None:
        self._part_of, self._kinds = {}, []
        super().build(plan)

    def _entered(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.scale = None if self.average else 1.0
            if part.streams is not None:
                part.streams.note()
        entered = {parameter: part for part in parts for parameter in part.gradient.parameters}
        self._part_of |= entered
        self._kinds += [(p, p.dtype, p.device) for p in entered]
        self._name_of = {parameter: name for name, (_, parameter) in self.facts.items()}

    def claim(self, facts: Facts) -> None:
        """Takes parameters from whoever synchronized them before, and hears of their gradients."""
        parameters = [parameter for _, parameter in facts.values()]
        claim(self, parameters)
        hook = _hook(weakref.ref(self))
        self._handles += [parameter.register_post_accumulate_grad_hook(hook) for parameter in parameters]

    def take_in(self) -> dict[str, tuple[ParameterFacts, Any]]:
        """See `Training.take_in`; the optimizer gets to know them as it knows those that it was made with."""
        new = super().take_in()
        for name, (_, parameter) in new.items():
            self.optimizer._parameter_names[parameter] = name
            self.optimizer._requires_update.add(parameter)
            self.optimizer._allreduce_delay[parameter] = 0
        if new:
            self.claim(new)
        return new

    def agree(self) -> None:
        try:
            super().agree()
        except errors.DeadlineError:
            refuse_whole_gradients(sorted(self.facts), self.process_set)
            raise
        self.driver.begin(self)

    def save(self, **more: Any) -> dict[str, Any]:
        """This rank's entry, of tensors, numbers and strings alone (``torch.load(weights_only=True)``)."""
        if any(part.task is not None for part in self.parts):
            raise errors.UnsupportedError(
                "an optimizer is saved between steps: call optimizer.step() or optimizer.synchronize() first"
            )
        return super().save(**more)

    def take_back(self, entry: Any) -> None:
        """Goes on from an entry that fits, or from nothing; a step under way is ended and given up."""
        if entry is not None:
            entry = self.checked(entry)
        self.finish_pending()
        self.load(entry)

    def checked(self, entry: Any) -> dict[str, Any]:
        """An entry, with all tensors on the host, if it fits; nothing is changed."""
        entry = host_entry(entry)
        check_entry(entry, self.recipe, _ADVICE)
        facts = {**self.facts, **self.engine.facts(self.facts)}
        known = {name: parameter for name, (_, parameter) in facts.items()}
        # of parameters that have joined, residuals are saved or zeros
        self.check_fits(entry, set(self.facts) - self.joined, known)
        checked_states(self, entry)
        return dict(entry)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """After every accumulation into a parameter's gradient. Never waits for other ranks."""
        with self._hooks:
            part = self._take(parameter)
            complete = self.optimizer._allreduce_delay[parameter] == 0
            ready = part.num_missing == 0 and complete and self._in_backward
            # the last one waits for `synchronize`: it tells all ranks whether one has changed gradients
            works = ready and len(self.parts) - self._num_started > 1 and self.is_agreed
            if ready and not works:
                part.gradient.settle()
                self._kept_back.append(part)
            warmup = self.warmup
            recording = warmup is not None and warmup.recording and complete
            entered = warmup.stamp() if warmup is not None and recording else None
            if works:
                self._start(part)
            if self.driver.parked:
                works = True
                self.driver.advance(_PATIENCE)
            if warmup is not None and recording:
                left = warmup.stamp() if works else entered
                warmup.arrived(self._name_of[parameter], entered, left)

    def _start(self, part: Part, *, refused: bool = False) -> None:
        part.start(self.driver, self.loss_scale.value, refused=refused)
        self._num_started += 1

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
            raise errors.UnsupportedError(
                f"{self.optimizer._parameter_names[parameter]} has a gradient in sparse (COO) form: pass "
                "sparse_as_dense=True to sparsify it like any other, or make its layer with sparse=False"
            )
        if not self.under_way:
            self._begin()
            if scaled_passes or self.loss_scale.scaler is not None:  # neither, and there is nothing to note
                self.loss_scale.note()
        part = self._part_of[parameter]
        if part.streams is not None:
            part.streams.note()
        delays[parameter] -= 1
        if delays[parameter] == 0:
            part.num_missing -= 1
        return part

    def _begin(self) -> None:
        """Before the first gradient of a step."""
        self.under_way, self.overflow, self.skipped = True, None, None
        self.optimizer._synchronized = False
        if any((p.dtype, p.device) != (dtype, device) for p, dtype, device in self._kinds):
            try:
                self._follow_parameters()
            except errors.UnsupportedError:
                self.under_way = False
                raise

    def _follow_parameters(self) -> None:
        """Parts of the types and on the devices that parameters have come to have."""
        facts, what = {}, ""
        for name, (fact, parameter) in self.facts.items():
            dtype, device = dtype_name(parameter) or str(parameter.dtype), str(parameter.device)
            facts[name] = dataclasses.replace(fact, dtype=dtype, device=device), parameter
            if facts[name][0] != fact and (not what or dtype_name(parameter) is None):
                what = f"{name} was {fact.dtype} on {fact.device} and is {dtype} on {device} now"
        self.follow(facts, what)

    def reduced(self, loss: Any) -> Any:
        """A loss over all ranks, as gradients are: their mean, or their sum."""
        if self.size == 1:
            return loss
        value = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().reshape(1)
        op = hvd.Average if self.average else hvd.Sum
        name = f"{self.driver.label}horovod_sparse.loss"
        total = hvd.allreduce(value, op=op, name=name, process_set=self.process_set).reshape(())
        return total.to(loss) if isinstance(loss, torch.Tensor) else float(total)

    def check_drift(self) -> None:
        """All ranks together, after the optimizer's step: whether they train the same model still."""
        if self.size == 1:
            self.drift.postpone(self.step)
            return
        from horovod_sparse.tensors.layout import shared_entries

        parameters = {name: parameter for name, (_, parameter) in self.facts.items()}
        entries = shared_entries(parameters, self.optimizer)
        name, seconds = f"{self.driver.label}horovod_sparse.drift", self.settings.deadline_seconds
        check = self.drift.run(self.step, entries)
        carry_out_together(check, self.process_set, name, deadline_seconds=seconds)

    def retire(self) -> None:
        """See `Owner.retire`. A step that is under way is given up."""
        for handle in self._handles:
            handle.remove()
        if self.under_way:
            self.give_up()
        self._retired = True

    def check_in_use(self) -> None:
        if self._retired:
            raise errors.UnsupportedError(
                "a parameter of this optimizer was given to another DistributedOptimizer afterwards, which "
                f"synchronizes it now: use that one ({', '.join(list(self.facts)[:3])}, ...)"
            )

    def synchronize(self) -> None:
        """Waits for all buckets, and scatters their sums into the gradients.

        Every error is raised on all ranks alike, and the step is given up whole. Where a loss scaler looks
        for them, or with `on_nonfinite="skip"`, gradients that are not finite raise nothing.

        Raises:
            HorovodSparseError: what a step can be refused for: see `horovod_sparse.errors`.
            HorovodInternalError: if Horovod failed.
        """
        self.check_in_use()
        if not self.under_way:
            self._begin()
            self.loss_scale.settle()
        idle_before = self.driver.idle_seconds
        edited = self._edited()
        try:
            if isinstance(self.recipe.feedback, MomentumCorrection):
                refuse_later_momentum(self.recipe, self.optimizer.param_groups)
            if any(p not in self._part_of for group in self.optimizer.param_groups for p in group["params"]):
                self.take_in()
            if not self.is_agreed:
                self.agree()
            for part in self.parts:
                if part.task is None:
                    self._start(part, refused=bool(edited))
            failures = self._waited()
        except errors.DeadlineError:
            self.give_up()
            raise
        except errors.HorovodSparseError:
            # what hooks have begun is ended first: its names are Horovod's until then
            self.finish_pending()
            raise
        except BaseException as error:
            self.give_up()
            explain(error)
            raise
        if failures:
            self._refuse(failures, edited)
            return
        size = int(self.process_set.size())
        scale = 1.0 / size if self.average else 1.0
        reports = [part.apply(scale) for part in self.parts]
        self._make_ready()
        self.step += 1
        self.telemetry.record(self.step, reports, self.driver.idle_seconds - idle_before)
        if self.warmup is not None:
            self.follow_times(self.warmup)

    def _waited(self) -> list[BaseException]:
        """What the parts have ended with that have not ended well."""
        tasks = [part.task for part in self.parts if part.task is not None]
        self.driver.wait(tasks)
        return [task.error for task in tasks if task.error is not None]

    def _edited(self) -> list[str]:
        """Parameters whose gradients were changed after their synchronization had begun."""
        return [
            part.names[number]
            for part in self.parts
            if part.task is not None or part in self._kept_back
            for number in part.gradient.edited()
        ]

    def _refuse(self, failures: Sequence[BaseException], edited: Sequence[str]) -> None:
        """No rank applies this step; raises why not, unless that is no error, or a loss scaler finds out."""
        verdict = self.policy.judge(failures, scaled=self.loss_scale.scaler is not None)
        error, drop = verdict.error, verdict.drop
        if verdict.outcome is Outcome.OVERFLOW:
            self.give_up(drop=drop, alike=True)
            self.parts[0].gradient.overflow()
            self.overflow = error
            return
        self.give_up(drop=drop, alike=isinstance(error, _ALIKE))
        if verdict.outcome is Outcome.SKIPPED:
            self.skipped = error
            return
        assert error is not None  # there are errors
        if isinstance(error, errors.EditedGradientError) and edited:
            error.where[self.rank] = some_of(edited)
        raise error

    def give_up(self, *, drop: bool = False, alike: bool = False) -> None:
        """Takes the step back as far as it came: gradients are zeros, selections return to residuals."""
        self.driver.clear(forget=not alike)
        for part in self.parts:
            if part.task is not None:
                part.abandon(drop=drop)
        for part in self.parts:
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
        if not self.is_agreed:  # then nothing has been started
            self.give_up()
            return
        for part in self.parts:
            if part.task is None:
                self._start(part)
        alike = False
        try:
            self.driver.wait()
            failures = self._waited()
            alike = not failures or isinstance(worst(failures), _ALIKE)
        except hvd.HorovodInternalError as error:
            _log.info("a step was given up, since Horovod has failed: %s", error)
        finally:
            self.give_up(alike=alike)

    def _make_ready(self) -> None:
        for part in self.parts:
            part.task, part.num_missing = None, len(part.names)
        delays, passes = self.optimizer._allreduce_delay, self.optimizer.backward_passes_per_step
        for parameter in delays:
            delays[parameter] = passes
        self.under_way, self._kept_back, self._num_started = False, [], 0

    def clip(self, max_norm: float) -> None:
        """Scales all gradients of the optimizer down to a norm, as `torch.nn.utils.clip_grad_norm_` does."""
        clip_gradients(self.optimizer.param_groups, max_norm * self.loss_scale.value)

    def convert(self) -> None:
        """Gradients in COO form, once they have been clipped."""
        if self.overflow is None:
            for part in self.parts:
                part.gradient.to_coo()
