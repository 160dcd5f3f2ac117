"""The methods of our `DistributedOptimizer` that differ from those of Horovod's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import Plan
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensors.models import ENTRY, check_groups
from horovod_sparse.torch._horovod import HorovodOptimizer
from horovod_sparse.torch.synchronizer import GradientSynchronizer
from horovod_sparse.training.settings import Settings

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision

_IN_FLIGHT = (
    "optimizer.{method}() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)


def clip_gradients(param_groups: Sequence[Mapping[str, Any]], max_norm: float) -> None:
    """Scales the gradients of an optimizer down to a norm over all of them."""
    torch.nn.utils.clip_grad_norm_([p for group in param_groups for p in group["params"]], max_norm)


class Methods(torch.optim.Optimizer):
    """Methods that replace those of Horovod's optimizer, copied into a class made for each optimizer.

    ``super(self.__class__, self)`` is the user's optimizer class, as in Horovod: the class is made by
    `DistributedOptimizer` and never derived from.
    """

    _synchronizer: GradientSynchronizer
    _settings: Settings
    #: whether a loss scaler has had gradients synchronized for the step to come
    _for_scaler = False

    def _register_hooks(self) -> None:
        """Called by Horovod's `__init__` with two ranks or more; `_attach` registers ours, with one, too."""

    def _attach(
        self: Any, recipe: Recipe, named_parameters: list[tuple[str, Any]] | None, settings: Settings
    ) -> None:
        """Buckets and hooks, once Horovod's `__init__` has checked its arguments."""
        known = self._parameter_names
        listed = [(known[p], p) for group in self.param_groups for p in group["params"]]
        names, self._settings = named_parameters or listed, settings
        self._synchronizer = GradientSynchronizer(self, names, recipe, settings, self._groups)
        self._requires_update = {parameter for _, parameter in self._synchronizer.facts.values()}

    @property
    def telemetry(self) -> Telemetry:
        """Returns figures of the last step, and means."""
        return self._synchronizer.telemetry

    @property
    def plan(self) -> Plan:
        """Returns which parameters form which bucket."""
        return self._synchronizer.plan

    @property
    def decision(self) -> Decision | None:
        """Why the plan was taken, where times decided about it: predictions, and the profile behind them.

        None during the warm-up, and where the plan needs no times.
        """
        warmup = self._synchronizer.warmup
        return None if warmup is None else warmup.decision

    def replan(self, plan: Plan | None = None, *, measure_steps: int | None = None) -> None:
        """Changes the buckets, between two steps; every rank does so alike. Residuals are kept.

        Args:
            plan: the new one. If left out, it is made as `merging` and `tensor_selection` ask for: costs
                are measured again, unless a profile was given, and all ranks take rank 0's plan.
            measure_steps: without a plan: how many further steps are measured first; the plan changes after
                them. If left out, it changes at once, by the backward times that were measured last.

        Raises:
            ArgumentError: if no plan is given and `merging` was not either, or the plan does not fit.
            ProfileMismatchError: on every rank alike, if no step has been measured.
        """
        synchronizer = self._synchronizer
        if synchronizer.under_way:
            raise AssertionError(_IN_FLIGHT.format(method="replan"))
        warmup = synchronizer.warmup
        if plan is not None:
            if measure_steps is not None:
                raise ArgumentError("measure_steps", measure_steps, "measure_steps or a plan, not both")
            if warmup is not None:
                warmup.stop()
            synchronizer.replan(plan)
        elif warmup is None:
            raise ArgumentError("plan", plan, "a plan, or make the optimizer with merging='optimal'")
        elif measure_steps is not None:
            warmup.measure(measure_steps)
        else:
            synchronizer.replan(warmup.decide_now().plan)

    def synchronize(self: Any) -> None:
        """Waits until all gradients are synchronized, and clips them if `max_grad_norm` was given.

        See `GradientSynchronizer.synchronize`. Changes of gradients have their place after it:

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        synchronizer = self._synchronizer
        if synchronizer.is_retired:
            raise UnsupportedError(
                "a parameter of this optimizer was given to another DistributedOptimizer afterwards, which "
                f"synchronizes it now: use that one ({', '.join(list(synchronizer.facts)[:3])}, ...)"
            )
        before = synchronizer.step
        synchronizer.synchronize()
        if synchronizer.step > before:
            synchronizer.replan_if_measured()
        max_grad_norm = self._settings.max_grad_norm
        if synchronizer.overflow is None:
            if max_grad_norm is not None:
                clip_gradients(self.param_groups, max_grad_norm * synchronizer.loss_scale.value)
            if synchronizer.to_coo:
                synchronizer.convert_to_coo()
        self._synchronized, self._for_scaler = True, False

    def _synchronize_for_scaler(self: Any, scaler: torch.amp.GradScaler) -> None:
        """Called before a loss scaler unscales gradients; `step` has nothing left to synchronize then."""
        # a scaler asks once for a step: where it has asked before, it has skipped that step
        is_due = self._for_scaler or not self._synchronized
        if self._should_synchronize and is_due:
            if not self._synchronizer.under_way:
                self._synchronizer.loss_scale.expect(scaler)
            self.synchronize()
            self._for_scaler = True

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes and lets the optimizer step.

        A closure's gradients are synchronized after each of its calls, before the optimizer uses them,
        unless it called `synchronize` itself, or the step runs within `skip_synchronize`. LBFGS gets its
        losses over all ranks, too (`op` of them), and returns such a one.
        """
        synchronizer = self._synchronizer
        if closure is not None:
            inner = closure if not self._should_synchronize else self._synchronized_after(closure)
            self._synchronized = False
            result = super(self.__class__, self).step(inner)
            synchronizer.compare_if_due()
            return result
        if self._should_synchronize and not (self._synchronized and self._for_scaler):
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the synchronized gradients are synchronized once more. Use the "
                    "context, as with Horovod's own optimizer.",
                    stacklevel=2,
                )
            if not synchronizer.under_way:
                synchronizer.loss_scale.expect(None)
            self.synchronize()
        self._synchronized = self._for_scaler = False
        if synchronizer.overflow is not None:
            raise synchronizer.overflow  # by who scales losses, but does not step by the scaler
        if synchronizer.skipped is not None:
            return None
        result = super(self.__class__, self).step()
        synchronizer.compare_if_due()
        return result

    # PyTorch wraps step() of every optimizer class with its step hooks. The user's class has them already:
    # with this mark they run once, after synchronization.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronized_after(self: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            self._synchronized = False
            loss = closure()
            if not self._synchronized:
                self.synchronize()
            self._synchronized = False
            if self._synchronizer.skipped is not None:
                raise self._synchronizer.skipped  # the optimizer's step is under way
            if isinstance(self, torch.optim.LBFGS):
                # it goes on or stops by the loss: with a loss of its own every rank would do so elsewhere
                return self._synchronizer.reduce_loss(loss)
            return loss

        return evaluate

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Sets gradients to zero, or to None."""
        if self._synchronizer.under_way:
            raise AssertionError(_IN_FLIGHT.format(method="zero_grad"))
        if self._for_scaler:  # the scaler has skipped the step that gradients were synchronized for
            self._synchronized = self._for_scaler = False
        super(self.__class__, self).zero_grad(set_to_none)

    def state_dict(self: Any) -> dict[str, Any]:
        """Returns the optimizer's own state, with this rank's residuals in the entry 'horovod_sparse'.

        Residuals differ from rank to rank: to resume exactly, let every rank save a file of its own.
        Optimizers of PyTorch and of Horovod load it too and pass over the entry.
        """
        saved: dict[str, Any] = super(self.__class__, self).state_dict()
        return {**saved, ENTRY: self._synchronizer.save()}

    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        """Loads a state; for other numbers of ranks, or plans, see `horovod_sparse.training.state`.

        All ranks load between the same two steps, or any before the first: in the next step they compare what
        they have; where it is not of one step and one run, sparsifiers start anew on all. A step that is
        under way is cancelled.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
        """
        check_groups(self, state_dict)
        self._synchronizer.restore_entry(state_dict.get(ENTRY))
        HorovodOptimizer.load_state_dict(self, state_dict)
