"""Gradients of one optimizer: from backward's hooks to the synchronized sum."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horovod_sparse import errors
from horovod_sparse.collectives import Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.planning import asked_of, first_plan, plan_request
from horovod_sparse.plans import ParameterFacts, Plan
from horovod_sparse.tensors.backward import GradientTraining
from horovod_sparse.tensors.gradients import GradientBucket
from horovod_sparse.tensors.loss_scale import scaled_passes
from horovod_sparse.tensors.models import checked_entry, claim
from horovod_sparse.topology import ClusterFacts, launched_hosts
from horovod_sparse.torch import driver
from horovod_sparse.torch._horovod import hvd
from horovod_sparse.torch.driver import HorovodEngine, OverHorovod
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.settings import Settings

if TYPE_CHECKING:
    from horovod_sparse.planning.request import Decision
    from horovod_sparse.planning.warmup import Decide

_log = logging.getLogger("horovod_sparse")

#: parts that a hook finds not done before it looks no further: with many buckets under way, looking at all
#: of them in every hook would take longer than what is found is worth
_PATIENCE = 4
#: go before the names of optimizers' collectives: two may have parameters of the same names (networks that
#: are trained in turn). They need not be the same on all ranks: all take the first rank's.
_labels = itertools.chain([""], map("optimizer{}.".format, itertools.count(1)))


class GradientSynchronizer(OverHorovod, GradientTraining):
    """Synchronizes gradients over Horovod; `warmup` measures and decides where the plan goes by times."""

    engine: HorovodEngine
    raise_explained = staticmethod(driver.raise_explained)

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
        self.process_set, self.driver = engine.process_set, engine
        facts = dict(engine.facts({}))
        recipe.rules.hint(facts)
        request, plan = plan_request(**settings.planning, groups=groups)
        arguments = {"plan": plan, "groups": groups, "bucket_bytes": settings.bucket_bytes}
        parameters = [fact for fact, _ in facts.values()]

        def where() -> ClusterFacts:
            hosts = launched_hosts(settings.levels, engine.ranks())
            return dataclasses.replace(self._place(parameters)[0], topology=hosts)

        self._first = first_plan(request, facts, recipe.sparsifier, where, **arguments)
        if self._first.failure is not None and engine.rank_and_size()[1] == 1:
            raise self._first.failure
        self.telemetry.selection = self._first.selection
        if self._first.request is not None:
            # most trainings measure nothing
            from horovod_sparse.planning.warmup import WarmUp
            from horovod_sparse.tensors.measuring import stamps_for

            stamps, decision = stamps_for(parameter.device for parameter in parameters), self._first.decision
            self.warmup = WarmUp(
                self._first.request, parameters, recipe.sparsifier, self._decide_together, stamps, decision
            )
        self.facts = facts
        self.average, self.sparse_as_dense = optimizer.op == hvd.Average, optimizer.sparse_as_dense
        #: whether all gradients are given in COO form: what SparseAdam takes
        self.to_coo = isinstance(optimizer, torch.optim.SparseAdam)
        self.delays = optimizer._allreduce_delay
        self._in_backward = settings.synchronize_at == "backward"
        self._own_label = next(_labels)
        self.begin(self.facts, self._first.plan)
        self.claim(self.facts)

    def _decide_together(self, decide: Decide) -> Decision:
        """Runs the coroutine that decides on a plan by measured times, on all ranks."""
        from horovod_sparse.tensors.measuring import bucket_memory

        cluster, device, dtype = self._place(self.parameters)
        cluster = dataclasses.replace(cluster, topology=self.topology)
        starts, name = [0.0], "horovod_sparse.planning"
        more = {"memory": bucket_memory(device), "dtype": dtype, "starting_seconds": lambda: starts[-1]}
        with torch.no_grad():
            decision: Decision = driver.carry_out_together(
                decide(cluster, **more), self.process_set, name, starts.append, topology=self.topology
            )
        return decision

    def _place(self, parameters: Sequence[ParameterFacts]) -> tuple[ClusterFacts, torch.device, str]:
        """Returns facts of the cluster, and device and type of the largest parameter: measured for all."""
        largest = max(parameters, key=lambda one: one.num_elements)
        device = torch.device(largest.device)
        words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return ClusterFacts.of(self.process_set, "torch", hvd, words), device, largest.dtype

    def first_plan_of(self, facts: Facts) -> Plan:
        """Returns the plan that `merging` and `tensor_selection` ask for, as far as that needs no times."""
        if self._first.request is None:
            return super().first_plan_of(facts)
        return self._first.request.first_plan([fact for fact, _ in facts.values()])

    def declared(self) -> dict[str, str]:
        own = self.optimizer
        more = {
            "op": "Average" if self.average else "Sum",
            "gradient_predivide_factor": str(float(own.gradient_predivide_factor)),
            "backward_passes_per_step": str(own.backward_passes_per_step),
            "sparse_as_dense": str(bool(own.sparse_as_dense)),
        }
        return {**super().declared(), **more, **asked_of(self._first.request)}

    def _compare_plans(self) -> Synchronization[None]:
        yield from raise_together(self._first.failure)

    @property
    def divisor(self) -> float:
        return int(self.process_set.size()) if self.average else 1.0

    def claim(self, facts: Facts) -> None:
        """Takes parameters over from the optimizer that had them, and registers hooks for their gradients."""
        parameters = [parameter for _, parameter in facts.values()]
        claim(self, parameters)
        self.watch(parameters)

    def join_new_parameters(self) -> dict[str, tuple[ParameterFacts, Any]]:
        """Adds new parameters to the optimizer, too, as if made with it."""
        new = super().join_new_parameters()
        if new and self.warmup is not None:
            self.warmup.measure_anew(self.parameters)  # what was measured without them decides nothing
        for name, (_, parameter) in new.items():
            self.optimizer._parameter_names[parameter] = name
            self.optimizer._requires_update.add(parameter)
            self.delays[parameter] = 0
        if new:
            self.claim(new)
        return new

    def restore_entry(self, entry: Any) -> None:
        """Loads a saved entry that fits, or resets; cancels a step in progress first."""
        if entry is not None:
            entry = checked_entry(self, entry)
        self.finish_pending()
        self.load(entry)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        with self._hooks:
            part = self._count_gradient(parameter)
            complete = self.delays[parameter] == 0
            ready = part.num_missing == 0 and complete and self._in_backward
            # the last one waits for `synchronize`: it tells all ranks whether one has changed gradients
            works = ready and len(self.parts) - self.num_started > 1 and self.is_agreed
            if ready and not works:
                part.take_gradients()
                self._deferred_parts.append(part)
            warmup = self.warmup
            entered = warmup.stamp() if warmup is not None and warmup.recording and complete else None
            if works:
                self._start(part)
            if self.driver.parked:
                works = True
                self.driver.advance(_PATIENCE)
            if warmup is not None and entered is not None:
                left = warmup.stamp() if works else entered
                name = next(
                    name for name, one in zip(part.names, part.given, strict=True) if one is parameter
                )
                warmup.arrived(name, entered, left)

    def _count_gradient(self, parameter: torch.Tensor) -> GradientBucket:
        """Counts a gradient; returns its part, which lacks `num_missing` more."""
        delays, gradient = self.delays, parameter.grad
        if delays[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                "backward(create_graph=True) cannot be synchronized: what is sent has no gradient"
            )
        if gradient is not None and gradient.is_sparse and not (self.sparse_as_dense or self.to_coo):
            raise errors.UnsupportedError(
                f"{self.optimizer._parameter_names[parameter]} has a gradient in sparse (COO) form: pass "
                "sparse_as_dense=True to sparsify it like any other, or make its layer with sparse=False"
            )
        if not self.under_way:
            self.optimizer._synchronized = False
            self._begin()
            if scaled_passes or self.loss_scale.scaler is not None:  # neither, and there is nothing to note
                self.loss_scale.note()
        part = self._part_of[parameter]
        if part.streams is not None:
            part.streams.note_writer()
        delays[parameter] -= 1
        if delays[parameter] == 0:
            part.num_missing -= 1
        return part

    def reduce_loss(self, loss: Any) -> Any:
        """Returns the mean of a loss over all ranks, or its sum, as gradients are."""
        if self.size == 1:
            return loss
        value = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().reshape(1)
        op = hvd.Average if self.average else hvd.Sum
        name = f"{self.driver.label}horovod_sparse.loss"
        total = hvd.allreduce(value, op=op, name=name, process_set=self.process_set).reshape(())
        return total.to(loss) if isinstance(loss, torch.Tensor) else float(total)

    def replan_if_measured(self) -> None:
        """Replans if the warm-up has decided on a plan with this step."""
        plan = self.warmup.after_step() if self.warmup is not None and self.warmup.recording else None
        if plan is not None:
            self.replan(plan)

    def cancel_collectives(self, *, alike: bool) -> None:
        self.driver.clear(forget=not alike)

    def cancel_step(self, *, drop: bool = False, alike: bool = False) -> None:
        super().cancel_step(drop=drop, alike=alike)
        if self.warmup is not None:
            self.warmup.forget_step()

    def finish_pending(self, *, drop: bool = False) -> None:
        """Cancels the pending step; if Horovod has failed, elastic training takes back an older state."""
        try:
            super().finish_pending(drop=drop)
        except hvd.HorovodInternalError as error:
            _log.info("a step was given up, since Horovod has failed: %s", error)

    def convert_to_coo(self) -> None:
        """Converts clipped gradients to COO form."""
        for parameter in self._part_of:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to_sparse()
