"""Gradients over torch.distributed.

A DistributedDataParallel's gradients are exchanged during backward, and are means at its end. Gradients of
FSDP2, which has them only at the end of a pass, and of plain modules are exchanged in `step()`.
"""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils.weak import TensorWeakRef

from horovod_sparse.collectives import gather_values
from horovod_sparse.ddp.distributed_engine import DistributedEngine
from horovod_sparse.ddp.steps import OverGroup, raise_within_join, skip_first_dense_sum
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import DEFAULT_BUCKET_BYTES, Plan, fixed_bytes
from horovod_sparse.tensors.backward import GradientTraining
from horovod_sparse.tensors.models import ENTRY, checked_entry
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.facts import present_bits
from horovod_sparse.training.settings import Settings

_log = logging.getLogger("horovod_sparse")


class GradientSynchronizer(OverGroup, GradientTraining):  # type: ignore[misc]
    """Synchronizes a model's gradients over torch.distributed; `attach` returns it."""

    compares_first = True

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: Recipe,
        optimizer: torch.optim.Optimizer | None,
        group: dist.ProcessGroup | None,
        settings: Settings,
    ) -> None:
        engine = DistributedEngine(model, recipe, optimizer, group, settings.deadline_seconds)
        super().__init__(engine, recipe, settings, optimizer)
        #: True if ranks exchange which parameters have gradients
        self._tells = True
        self._bucket_bytes = settings.bucket_bytes or DEFAULT_BUCKET_BYTES
        self._of_ddp = isinstance(model, DistributedDataParallel)
        #: True if the present pass exchanges gradients; False within `no_sync`
        self.exchanges = self._of_ddp
        #: gradients after the last exchange, with versions; and whether no step has used them
        self._left: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None], int]] = []
        self._unused = self._sums_untouched = False
        #: True if parameters get several gradients in a pass, so that buckets start at its end
        self._repeats = False
        #: parameters with a gradient in this pass
        self._with_gradient: set[torch.Tensor] = set()
        #: weak reference to this pass's end callback; dead after the pass has ended or failed
        self._ending: Callable[[], object] = lambda: None
        if isinstance(model, DistributedDataParallel):
            self._tells = model.find_unused_parameters or model.static_graph
            self._repeats = model.static_graph
            self._bucket_bytes = settings.bucket_bytes or model.bucket_bytes_cap
            self.ensure_parts()
            skip_first_dense_sum(model)
            hooks = _ForwardHooks(self)
            self._handles += [
                model.register_forward_pre_hook(hooks.before, prepend=True),
                model.register_forward_hook(hooks.after, always_call=True),
            ]
        if optimizer is not None:
            self._handles += [
                optimizer.register_step_pre_hook(self._step_pre_hook),
                optimizer.register_state_dict_post_hook(self._state_dict_post_hook),
                optimizer.register_load_state_dict_pre_hook(self._load_state_dict_pre_hook),
            ]
            if not self._of_ddp:
                optimizer._synchronize_for_scaler = self._synchronize_for_scaler

    def declared(self) -> dict[str, str]:
        plan = "none" if self.settings.plan is None else "given"
        return {**super().declared(), "plan": plan, "find_unused_parameters": str(self._tells)}

    def plan_for_new(self, facts: Facts) -> Plan:
        """Returns buckets in the order of backward; parameters that a rule sends whole stay dense."""
        parameters = [fact for fact, _ in facts.values()]
        sparse = [fact for fact in parameters if fact.density != 1.0]
        dense = [fact.name for fact in parameters if fact.density == 1.0]
        return Plan(fixed_bytes(sparse, self._bucket_bytes).buckets if sparse else (), tuple(dense))

    def ensure_parts(self) -> None:
        """Makes the first parts, or parts for parameters added since; called before a step, save or load."""
        if not self.facts:
            facts = self.engine.facts({})
            self.begin(facts, self.settings.plan or self.plan_for_new(facts))
        else:
            self.join_new_parameters()

    join_any_new_parameters = ensure_parts

    def _connect_parts(self, parts: Any) -> None:
        super()._connect_parts(parts)
        for part in parts:
            part.tells_absent, part.keeps_sum = self._tells, self._of_ddp
        if self._of_ddp:
            self.register_hooks(parameter for part in parts for parameter in part.given)

    # a pass of DistributedDataParallel

    def watch_pass(self, first: torch.Tensor | None = None) -> None:
        """Makes autograd call `_end_pass` after the pass in progress; `first`: the first with a gradient."""
        if self._ending() is not None:
            return
        if self.under_way:
            self.finish_pending(drop=True)  # that pass has failed
        self._sums_untouched = bool(self._left) and all(
            left() is one.grad and version == (0 if one.grad is None else one.grad._version - (one is first))
            for one, left, version in self._left
        )
        self._sums_untouched = self._sums_untouched and all(part.has_last_sum() for part in self.parts)
        ending = functools.partial(self._end_pass)
        self._ending = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)

    def _begin_pass(self, first: torch.Tensor) -> None:
        """Begins a step with a pass's first gradient; raises if the last sums were discarded unused."""
        self.watch_pass(first)
        if self.under_way:
            return
        if self._unused and not self._sums_untouched:
            self._unused = False
            raise UnsupportedError(
                "gradients that were exchanged have been thrown away or changed without a step. Unsent "
                "elements would go into later steps. Put such backward passes into model.no_sync(), or "
                'attach(model, "best", optimizer), which exchanges in optimizer.step()'
            )
        for part in self.parts:  # autograd adds to gradients that exist
            part.carried = part.last_sum if self._sums_untouched else None
        self._begin_step()
        self.loss_scale.read()

    def on_gradient(self, parameter: torch.Tensor) -> None:
        if not self.exchanges:
            return
        with self._hooks:
            self._begin_pass(parameter)
            part = self._part_of[parameter]
            if parameter.grad is not None and parameter.grad.requires_grad:
                raise UnsupportedError(
                    "backward(create_graph=True) is not supported: sums over ranks have no graph"
                )
            if part.streams is not None:
                part.streams.note_writer()
            if parameter in self._with_gradient:
                self._repeats = True
            self._with_gradient.add(parameter)
            if self._repeats or not self.is_agreed:
                return
            # torch.distributed matches messages by their order: it is the plan's
            for part in self.parts[self.num_started : -1]:
                if not self._with_gradient.issuperset(part.given):
                    break
                self._start_part(part)

    def _end_pass(self) -> None:
        if not self.under_way:
            return  # no parameter had a gradient: autograd.grad of an output
        before, self._left, self._unused = self.step, [], False
        self.synchronize()
        if self.step > before:
            for part in self.parts:
                part.remember_sum()
            for one in self._part_of:  # weak references: clearing gradients has to free them
                grad = one.grad
                left = (lambda: None, 0) if grad is None else (TensorWeakRef(grad), grad._version)
                self._left.append((one, *left))
            self._unused = self.optimizer is not None

    # a step of the optimizer

    def _step_pre_hook(self, optimizer: Any, arguments: Any, named: dict[str, Any]) -> Any:
        exchanged, self._unused = self._unused, False
        if self._of_ddp and self.under_way:
            raise UnsupportedError("the last backward pass failed on all ranks: run it again")
        if self._of_ddp:
            left = {one: left() for one, left, _ in self._left}
            found = [one for one in self._part_of if one.grad is not None]
            if not exchanged and any(left.get(one) is not one.grad for one in found):
                raise UnsupportedError(
                    "this step has gradients of this rank alone: they come from torch.autograd.grad, or from "
                    "model.no_sync(). Call backward() outside of it before each step, or "
                    'attach(model, "best", optimizer), which exchanges in optimizer.step()'
                )
            return None
        given = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if given is None:
            if not self.for_scaler:
                self.synchronize()
            self.for_scaler = False
            return None

        def step_closure() -> Any:
            loss = given()
            self.synchronize()
            return loss

        return (optimizer, step_closure), {name: one for name, one in named.items() if name != "closure"}

    def _synchronize_for_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Synchronizes gradients before a loss scaler reads them: so all ranks find the same overflow."""
        self.loss_scale.set_scaler(scaler)
        self.synchronize()
        self.for_scaler = self.overflow is None  # else it skips the step

    # an exchange

    def synchronize(self) -> None:
        if not self.facts:
            self.ensure_parts()
        super().synchronize()
        if self.skipped is not None:
            for parameter in self._part_of:  # the optimizer passes over parameters without gradients
                parameter.grad = None

    def _wait_for_failures(self) -> list[BaseException]:
        if not self._tells or not self.parts:
            return super()._wait_for_failures()
        present = self.starter.start("present", gather_values(hex(present_bits(self.parts))))
        failures = super()._wait_for_failures()
        self.starter.wait([present])
        somewhere = functools.reduce(operator.or_, (int(bits, 16) for bits in present.value()))
        for part in self.parts:
            part.unused = [number for number in range(len(part.names)) if not somewhere >> number & 1]
            somewhere >>= len(part.names)
        return failures

    def reset_counters(self) -> None:
        super().reset_counters()
        self._with_gradient = set()

    def retire(self) -> None:
        super().retire()
        if self.optimizer is not None:
            vars(self.optimizer).pop("_synchronize_for_scaler", None)

    # checkpoints

    def _state_dict_post_hook(self, _: Any, saved: dict[str, Any]) -> None:
        """Hook of the optimizer's `state_dict`: adds this rank's residual."""
        if self.under_way:
            _log.warning("the optimizer is saved without its residual, since a backward pass has failed")
        else:
            saved[ENTRY] = self.state_dict()

    def _load_state_dict_pre_hook(self, _: Any, saved: dict[str, Any]) -> None:
        if ENTRY in saved:
            self.load_state_dict(saved[ENTRY])

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's checkpoint entry: residuals and states, as tensors, numbers and strings.

        The entry is that of an optimizer of `horovod_sparse.torch` (``state_dict()["horovod_sparse"]``): each
        loads the other's, if parameters have the same names.
        """
        self.ensure_parts()
        return self.save()

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a saved entry, or resets if it is None; ranks agree in the next step.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
        """
        if self.under_way:
            raise UnsupportedError("load_state_dict was called within a backward pass: call it between steps")
        self.ensure_parts()
        self.load(None if entry is None else checked_entry(self, entry))


class _ForwardHooks:
    """Forward hooks that keep a DistributedDataParallel from exchanging gradients itself.

    A copy of a model, or a model that was pickled, has hooks that do nothing.
    """

    def __init__(self, training: GradientSynchronizer | None) -> None:
        self._training, self._asked = training, True

    def __reduce__(self) -> tuple[Any, ...]:
        _log.warning(
            "a copied or pickled model is not synchronized sparsely until you attach it. "
            "Its residual is saved by state_dict()"
        )
        return _ForwardHooks, (None,)

    def before(self, model: Any, _: Any) -> None:
        if self._training is None:
            return
        raise_within_join(model)
        self._asked = model.require_backward_grad_sync  # False within no_sync()
        model.require_backward_grad_sync = False  # else it would exchange dense gradients

    def after(self, model: Any, _: Any, output: Any) -> None:
        training = self._training
        if training is None:
            return
        model.require_backward_grad_sync = self._asked
        model.require_forward_param_sync = self._asked and torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            return
        training.exchanges = self._asked
        if not self._asked:
            return
        # of the whole pass: hooks of parameters may run in a pass within it (activation checkpointing)
        for one in _pytree.tree_leaves(output):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(lambda _: training.watch_pass())
