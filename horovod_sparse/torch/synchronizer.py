"""Gradients of one optimizer over Horovod, and the optimizer's methods that synchronize them."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse import errors
from horovod_sparse.collectives import Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning import described_request, first_plan, plan_request
from horovod_sparse.plans import ParameterFacts, Plan
from horovod_sparse.tensors.backward import GradientTraining
from horovod_sparse.tensors.models import ENTRY, check_groups, checked_entry, claim
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.torch.driver import HorovodEngine, HorovodOptimizer, hvd, raise_explained
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.settings import Settings

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision

_log = logging.getLogger("horovod_sparse")

#: labels that begin the names of an optimizer's collectives, since parameters of two optimizers may have the
#: same names (networks trained in turn). Labels may differ between ranks: all take rank 0's.
_labels = itertools.chain([""], map("optimizer{}.".format, itertools.count(1)))


class GradientSynchronizer(GradientTraining):
    """Synchronizes gradients over Horovod; `decision` says why the plan was chosen, if a profile decided."""

    engine: HorovodEngine
    raise_explained = staticmethod(raise_explained)

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        recipe: Recipe,
        settings: Settings,
        groups: Any = None,
    ) -> None:
        names = {one: name for name, one in named_parameters}
        process_set, seconds = optimizer.process_set, settings.deadline_seconds
        engine = HorovodEngine(optimizer, names, recipe, process_set, seconds)
        super().__init__(engine, recipe, settings, optimizer)
        self.process_set = engine.process_set
        facts = dict(engine.facts({}))
        recipe.rules.warn_of_unmatched(facts)
        request, plan = plan_request(**settings.planning, groups=groups)
        arguments = {"plan": plan, "groups": groups, "bucket_bytes": settings.bucket_bytes}
        where = functools.partial(ClusterFacts.of, self.process_set, "torch", hvd)
        self._first = first_plan(request, facts, recipe.sparsifier, where, **arguments)
        if self._first.failure is not None and engine.rank_and_size()[1] == 1:
            raise self._first.failure
        self.telemetry.selection = self._first.selection
        self.decision = self._first.decision
        self.facts = facts
        self.average = optimizer.op == hvd.Average
        self.takes_coo = bool(optimizer.sparse_as_dense)
        self.delays = optimizer._allreduce_delay
        self.starts_early = settings.synchronize_at == "backward"
        self._own_label = next(_labels)
        self.begin(self.facts, self._first.plan)
        self.claim(self.facts)

    def plan_for_new(self, facts: Facts) -> Plan:
        """Returns the plan for new parameters by `merging` and `tensor_selection`, without measured times."""
        if self._first.request is None:
            return super().plan_for_new(facts)
        return self._first.request.plan_without_times([fact for fact, _ in facts.values()])

    def declared(self) -> dict[str, str]:
        own = self.optimizer
        more = {
            "op": "Average" if self.average else "Sum",
            "gradient_predivide_factor": str(float(own.gradient_predivide_factor)),
            "backward_passes_per_step": str(own.backward_passes_per_step),
            "sparse_as_dense": str(bool(own.sparse_as_dense)),
        }
        return {**super().declared(), **more, **described_request(self._first.request)}

    def _raise_plan_failures(self) -> Synchronization[None]:
        yield from raise_together(self._first.failure)

    @property
    def divisor(self) -> float:
        return int(self.process_set.size()) if self.average else 1.0

    def claim(self, facts: Facts) -> None:
        """Makes this optimizer the parameters' only owner, and registers hooks for their gradients."""
        parameters = [parameter for _, parameter in facts.values()]
        claim(self, parameters)
        self.register_hooks(parameters)

    def join_new_parameters(self) -> dict[str, tuple[ParameterFacts, Any]]:
        """Makes parts for new parameters, and registers these with Horovod's optimizer."""
        new = super().join_new_parameters()
        for name, (_, parameter) in new.items():
            self.optimizer._parameter_names[parameter] = name
            self.optimizer._requires_update.add(parameter)
            self.delays[parameter] = 0
        if new:
            self.claim(new)
        return new

    def reduce_loss(self, loss: Any) -> Any:
        """Returns a loss averaged (or summed) over ranks, as gradients are."""
        if self.size == 1:
            return loss
        value = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().reshape(1)
        op = hvd.Average if self.average else hvd.Sum
        name = f"{self.engine.label}horovod_sparse.loss"
        total = hvd.allreduce(value, op=op, name=name, process_set=self.process_set).reshape(())
        return total.to(loss) if isinstance(loss, torch.Tensor) else float(total)

    def synchronize(self) -> None:
        """Waits for all gradients' sums, and clips them if `max_grad_norm` was given."""
        if self.is_retired:
            raise errors.UnsupportedError(
                "a parameter of this optimizer was given to another DistributedOptimizer afterwards, which "
                f"synchronizes it now: use that one ({', '.join(list(self.facts)[:3])}, ...)"
            )
        super().synchronize()
        if self.overflow is None and (max_norm := self.settings.max_grad_norm) is not None:
            clip_gradients(self.optimizer.param_groups, max_norm * self.loss_scale.value)
        self.is_synchronized, self.for_scaler = True, False

    def cancel_collectives(self, *, alike: bool) -> None:
        self.engine.clear(forget=not alike)

    def finish_pending(self, *, drop: bool = False) -> None:
        """Completes the collectives of a step in progress, and cancels it; only logs a failure of Horovod."""
        try:
            super().finish_pending(drop=drop)
        except hvd.HorovodInternalError as error:
            _log.info("a step was cancelled, since Horovod has failed: %s", error)


_IN_FLIGHT = (
    "optimizer.{method}() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)


def clip_gradients(param_groups: Sequence[Mapping[str, Any]], max_norm: float) -> None:
    """Scales an optimizer's gradients so that their common norm is at most `max_norm`."""
    torch.nn.utils.clip_grad_norm_([p for group in param_groups for p in group["params"]], max_norm)


class Methods(torch.optim.Optimizer):
    """Methods that replace those of Horovod's optimizer, in a class made for each optimizer.

    ``super(self.__class__, self)`` is the user's optimizer class, as in Horovod: the class is made by
    `DistributedOptimizer` and never derived from.
    """

    _synchronizer: GradientSynchronizer

    def _register_hooks(self) -> None:
        """Called by Horovod's `__init__`; does nothing, since `_make_synchronizer` registers hooks."""

    def _make_synchronizer(
        self: Any, recipe: Recipe, named_parameters: list[tuple[str, Any]] | None, settings: Settings
    ) -> None:
        """Makes the synchronizer with its hooks, after Horovod's `__init__` has checked the arguments."""
        known = self._parameter_names
        listed = [(known[p], p) for group in self.param_groups for p in group["params"]]
        names = named_parameters or listed
        self._synchronizer = GradientSynchronizer(self, names, recipe, settings, self._groups)
        self.telemetry = self._synchronizer.telemetry
        self._requires_update = {parameter for _, parameter in self._synchronizer.facts.values()}

    @property
    def plan(self) -> Plan:
        """Returns which parameters form which bucket."""
        return self._synchronizer.plan

    @property
    def decision(self) -> Decision | None:
        """The predictions and the profile that decided the plan; None where times decided nothing."""
        return self._synchronizer.decision

    def replan(self, plan: Plan) -> None:
        """Changes the plan of buckets between two steps; all ranks call it with the same. Residuals stay.

        Raises:
            ArgumentError: if the plan does not fit.
        """
        synchronizer = self._synchronizer
        if synchronizer.under_way:
            raise AssertionError(_IN_FLIGHT.format(method="replan"))
        synchronizer.replan(plan)
        synchronizer.decision = None

    def synchronize(self: Any) -> None:
        """Waits for all gradients' sums, and clips them if `max_grad_norm` was given.

        See `GradientTraining.synchronize`. Changes of gradients have their place after it:

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._synchronizer.synchronize()

    def _synchronize_for_scaler(self: Any, scaler: torch.amp.GradScaler) -> None:
        """Called before a loss scaler unscales gradients: synchronizes them, so that `step` need not."""
        # a scaler asks once per step: if it asked before, it has skipped that step
        synchronizer = self._synchronizer
        is_due = synchronizer.for_scaler or not synchronizer.is_synchronized
        if self._should_synchronize and is_due:
            if not synchronizer.under_way:
                synchronizer.loss_scale.set_scaler(scaler)
            self.synchronize()
            synchronizer.for_scaler = True

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes the gradients, unless within `skip_synchronize`; then runs the optimizer's step.

        A closure's gradients are synchronized after each of its calls, before the optimizer uses them,
        unless it called `synchronize` itself, or the step runs within `skip_synchronize`. LBFGS also gets and
        returns losses that are reduced over all ranks by `op`.
        """
        synchronizer = self._synchronizer
        if closure is not None:
            inner = closure if not self._should_synchronize else self._synchronizing_closure(closure)
            synchronizer.is_synchronized = False
            result = super(self.__class__, self).step(inner)
            if synchronizer.step >= synchronizer.drift.next_step:
                synchronizer.compare_models()
            return result
        if self._should_synchronize and not (synchronizer.is_synchronized and synchronizer.for_scaler):
            if synchronizer.is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the synchronized gradients are synchronized once more. Use the "
                    "context, as with Horovod's own optimizer.",
                    stacklevel=2,
                )
            if not synchronizer.under_way:
                synchronizer.loss_scale.set_scaler(None)
            self.synchronize()
        synchronizer.is_synchronized = synchronizer.for_scaler = False
        if synchronizer.overflow is not None:
            raise synchronizer.overflow  # to a loop that does not call scaler.step
        if synchronizer.skipped is not None:
            return None
        result = super(self.__class__, self).step()
        if synchronizer.step >= synchronizer.drift.next_step:
            synchronizer.compare_models()
        return result

    # PyTorch wraps step() of every optimizer class with its step hooks. The user's class has them already:
    # with this mark they run once, after synchronization.
    step.hooked = True  # type: ignore[attr-defined]

    def _synchronizing_closure(self: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        synchronizer = self._synchronizer

        def evaluate() -> Any:
            synchronizer.is_synchronized = False
            loss = closure()
            if not synchronizer.is_synchronized:
                self.synchronize()
            synchronizer.is_synchronized = False
            if synchronizer.skipped is not None:
                raise synchronizer.skipped  # the optimizer's step is under way
            if isinstance(self, torch.optim.LBFGS):
                # it decides by the loss: with different losses ranks would decide differently
                return synchronizer.reduce_loss(loss)
            return loss

        return evaluate

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        """Sets the gradients to zero, or to None."""
        if self._synchronizer.under_way:
            raise AssertionError(_IN_FLIGHT.format(method="zero_grad"))
        if self._synchronizer.for_scaler:  # the scaler has skipped the last step
            self._synchronizer.is_synchronized = self._synchronizer.for_scaler = False
        super(self.__class__, self).zero_grad(set_to_none)

    def state_dict(self: Any) -> dict[str, Any]:
        """Returns the optimizer's state, with this rank's residuals in the entry 'horovod_sparse'.

        Residuals differ from rank to rank: to resume exactly, let every rank save a file of its own.
        Optimizers of PyTorch and of Horovod load it too and pass over the entry.
        """
        saved: dict[str, Any] = super(self.__class__, self).state_dict()
        return {**saved, ENTRY: self._synchronizer.save()}

    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, for the same number of ranks.

        All ranks load between the same two steps, or any of them before the first. In the next step they
        compare their states; unless all are of one step and one run, all ranks reset their sparsifiers'
        states. Cancels a step in progress.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
        """
        check_groups(self, state_dict)
        synchronizer, entry = self._synchronizer, state_dict.get(ENTRY)
        if entry is not None:
            entry = checked_entry(synchronizer, entry)
        synchronizer.finish_pending()
        synchronizer.load(entry)
        synchronizer.is_synchronized = False
        HorovodOptimizer.load_state_dict(self, state_dict)
