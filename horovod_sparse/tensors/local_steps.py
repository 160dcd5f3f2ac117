"""Local steps of a PyTorch optimizer: displacements of its parameters, and hooks on its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.arrays import WeightedParts
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.tensors.binding import unwrapped
from horovod_sparse.tensors.gradients import HOST, ParameterBucket, host_view
from horovod_sparse.tensors.layout import ReplicatedTensor, flat, local, view_into
from horovod_sparse.tensors.models import ModelBuffers, checked_entry, parameters_of, roll_back_before_loading
from horovod_sparse.tensors.own_steps import make_parameters
from horovod_sparse.topology import RankAndSize, Topology
from horovod_sparse.training.collective_errors import listed
from horovod_sparse.training.engine import Facts, PartSpec, Starter, Task
from horovod_sparse.training.local_steps import LocalTraining
from horovod_sparse.training.parts import scaled
from horovod_sparse.training.schedules import LocalSchedule
from horovod_sparse.training.settings import Settings

#: all parameters that some `LocalSteps` exchanges
_have_local_steps: Any = WeakTensorKeyDictionary()


class Displacement:
    """A bucket's common parameters and its displacement from them: for local steps, in `OwnMoves`' role.

    Half types are kept in float32: a round often moves a parameter by less than their rounding.

    Args:
        part: it belongs to.
        schedule: has the outer step.

    Attributes:
        start: [n], the common parameters.
        velocity: [n], of the outer step; empty without momentum.
        sent: [n], the parameters when the exchange in flight began; empty without a delay.
        task: the exchange in flight; None without one.
    """

    def __init__(self, part: LocalBucket, schedule: LocalSchedule) -> None:
        self.bucket, self.spans, self.schedule = part.bucket, part.spans, schedule
        self._parameters, self._layouts, self._memory = part.given, part.layouts, part.memory
        self.task: Any = None
        first, n = local(part.given[0]), part.bucket.info.num_elements
        wide = first.new_empty(0, dtype=torch.promote_types(first.dtype, torch.float32))

        def empty(like: torch.Tensor, count: int) -> torch.Tensor:
            if like.device.type != "cpu" or not count:
                return torch.zeros(count, dtype=like.dtype, device=like.device)
            # NumPy asks for huge pages: large folds miss the TLB less
            return torch.from_numpy(np.zeros(count * like.element_size(), np.uint8)).view(like.dtype)

        self.start, self.velocity = empty(wide, n), empty(wide, n if schedule.outer.momentum else 0)
        self.sent = empty(first, n if schedule.delay else 0)
        self._common = make_parameters([self.start], [(0, n)])
        self.take_as_common()

    # an exchange

    def begin(self, starter: Starter, name: str) -> None:
        self.task = Task(name)
        self.record_sent()
        report = self.bucket.fold(self.displacement())
        self.task = starter.start(name, self.bucket.synchronize(report))

    def received(self, scale: float) -> SparseSum:
        """Returns the sum of all ranks' displacements; raises the exchange's error on all ranks alike."""
        total: SparseSum = self.task.value()
        return total

    def apply_mean(self, total: SparseSum, scale: float, shrunk: Mapping[float, Sequence[int]]) -> int:
        """Moves `start` by the mean displacement, and the parameters to `start`; returns the union's size."""
        self.task, outer = None, self.schedule.outer
        total, scale = self.schedule.mean_of(total, self.bucket.recipe.sparsifier, self.bucket.info.size)
        if outer.momentum:  # all is sent
            num_union = len(total.values)
            self._step_with_momentum(scaled(total, scale))
        else:
            num_union, _ = self._common.replace(total=total, scale=outer.lr * scale)
        self.return_to_start()
        self.bucket.accept()
        return num_union

    def cancel(self) -> None:
        """Cancels the exchange: takes its displacement out of the residual, and leaves the parameters."""
        self.task = None
        self.bucket.abandon(drop=True)

    def step_back(self) -> None:
        """Does nothing: local steps take no step ahead."""

    def roll_back(self) -> None:
        """Cancels the exchange in flight; the parameters still contain its displacement."""
        if self.task is not None:
            self.cancel()

    # common parameters and this rank's own

    @torch.no_grad()
    def _copy_parameters(self, into: torch.Tensor) -> None:
        for number, parameter in enumerate(self._parameters):
            self._parameter_view(into, number).copy_(local(parameter))

    def _parameter_view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        return view_into(flat, self.spans[number][0], self._layouts[number])

    def take_as_common(self) -> None:
        """Copies the parameters to `start`, when they are equal on all ranks (at the begin, after a load)."""
        self._copy_parameters(self.start)
        self.velocity.zero_()
        self.record_sent()

    @torch.no_grad()
    def displacement(self) -> Any:
        """Returns ``start - parameters``, as the accumulator folds it."""
        lines = [
            self.sent[slice(*span)] if self.sent.numel() else flat(parameter, layout.stride())
            for span, parameter, layout in zip(self.spans, self._parameters, self._layouts, strict=True)
        ]
        # half types began from `start` rounded to their dtype: that rounding is no displacement
        pairs = [
            (self.start[slice(*span)].to(line.dtype), line)
            for span, line in zip(self.spans, lines, strict=True)
        ]
        if self._memory is HOST:
            common, own = ([host_view(one) for one in some] for some in zip(*pairs, strict=True))
            return WeightedParts(common, own, (1.0, -1.0))
        kind = self.start.dtype
        return self._memory.fold_input([one.to(kind) - other.to(kind) for one, other in pairs])

    @torch.no_grad()
    def _step_with_momentum(self, mean: Any) -> None:
        """Applies the outer step with momentum by the mean displacement, an array [n]."""
        mean, outer = torch.as_tensor(mean, device=self.start.device), self.schedule.outer
        self.velocity.mul_(outer.momentum).add_(mean)
        self.start.sub_(mean.add(self.velocity, alpha=outer.momentum), alpha=outer.lr)

    @torch.no_grad()
    def return_to_start(self) -> None:
        """Sets the parameters to `start` plus the steps that this rank made since the exchange began.

        A NaN of those steps stays, and is found in the next exchange.
        """
        for number, own in enumerate(self._parameters):
            parameter, start = local(own), self._parameter_view(self.start, number)
            if not self.sent.numel():
                parameter.copy_(start)
                continue
            sent = self._parameter_view(self.sent, number)
            learned = parameter.to(start.dtype).sub(sent)
            parameter.copy_(torch.where(torch.isfinite(sent), learned, 0).add_(start))
        self.record_sent()

    def record_sent(self) -> None:
        """Copies the parameters to `sent`: later steps belong to the next exchange."""
        if self.sent.numel():
            self.sent = self.sent.to(self._parameters[0].dtype)  # `model.float()` has changed it
            self._copy_parameters(self.sent)

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        parameters = [local(parameter) for parameter in self._parameters]
        own = [parameter.clone() for parameter in parameters]
        for number, parameter in enumerate(parameters):
            parameter.copy_(self._parameter_view(self.start, number))
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, own)

    def entry(self, number: int, name: str) -> ReplicatedTensor:
        """Returns the common value of parameter `number`, for a drift check between ranks."""
        return ReplicatedTensor(name, self._parameter_view(self.start, number))

    def to_host(self, name: str) -> np.ndarray:
        """Returns the array called `name` ("start", "velocity" or "sent") on the host, [n]."""
        return np.asarray(getattr(self, name).cpu().to(self.start.dtype).numpy())

    def assign_array(self, name: str, values: np.ndarray) -> None:
        """Copies values into the array called `name`: "start", "velocity" or "sent"."""
        getattr(self, name).copy_(torch.from_numpy(np.array(values)))


class LocalBucket(ParameterBucket):
    """A bucket of parameters whose displacements are exchanged."""

    def __init__(self, spec: PartSpec, facts: Facts, ranks: RankAndSize, schedule: LocalSchedule) -> None:
        super().__init__(spec, facts, ranks)
        self.moves = Displacement(self, schedule)


def _unexchanged_in(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns names and parameters of a model that no `LocalSteps` exchanges."""
    return [(name, one) for name, one in parameters_of(model) if one not in _have_local_steps]


def _digest(tensor: torch.Tensor, by_version: bool) -> bytes:
    """Returns a tensor's version number, or a hash of its contents, to notice changes."""
    sums = None if by_version else ReplicatedTensor("", local(tensor)).sums()
    return str(tensor._version).encode() if sums is None else sums.tobytes()


class LocalBinding(LocalTraining):
    """Hooks local steps to one optimizer; base of `LocalSteps` in both front ends."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        engine: Any,
        schedule: LocalSchedule,
        settings: Settings,
    ) -> None:
        self.schedule, self.optimizer, self._model = schedule, optimizer, model
        _have_local_steps.update(dict.fromkeys(self._trained_parameters(), True))
        #: of parameters that others may train, whether they were frozen, and a digest, where training begins
        self._known: dict[str, tuple[bool, bytes]] = {}
        #: hashes of the parameters before a state was loaded since the last step; None without a load
        self._before_load: list[bytes] | None = None
        self._is_restored = False
        super().__init__(engine, schedule, settings, engine.facts({}), ModelBuffers(model))
        for hook in getattr(optimizer, "_local_hooks", ()):  # the newer binding takes the optimizer over
            hook.remove()
        roll_back_before_loading(model.modules(), self)
        # a reference from the optimizer keeps this alive; torch.compile(optimizer.step) does not change it
        optimizer._local_hooks = [
            optimizer.register_step_pre_hook(self._step_pre_hook),
            optimizer.register_step_post_hook(self._step_post_hook),
        ]

    @torch._disable_dynamo
    def _step_pre_hook(self, optimizer: Any, arguments: Any, named: Any) -> None:
        self.before_step()

    @torch._disable_dynamo
    def _step_post_hook(self, optimizer: Any, arguments: Any, named: Any) -> None:
        # GradScaler calls a fused optimizer also for a skipped step, and sets found_inf
        skipped = getattr(optimizer, "found_inf", None)
        if not (skipped is not None and bool(skipped)):
            self.after_step()

    def _trained_parameters(self) -> Iterator[torch.Tensor]:
        given = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return (one for one in given if one.requires_grad and local(one).numel())

    def before_step(self) -> None:
        self.agree()
        self._adopt_loaded()
        self._is_restored = False

    def agree(self) -> None:
        is_due = not (self._has_begun and self.is_agreed)
        super().agree()
        if is_due:
            self._remember_unexchanged()

    def _remember_unexchanged(self) -> None:
        others = [(name, one, not one.requires_grad) for name, one in _unexchanged_in(self._model)]
        self._known = {name: (frozen, _digest(one, frozen)) for name, one, frozen in others}

    def _begin_exchange(self, *, finishing: bool = False) -> None:
        self._adopt_loaded()
        known = {id(parameter) for _, parameter in self.facts.values()}
        if new := [list(one.shape) for one in self._trained_parameters() if id(one) not in known]:
            raise UnsupportedError(
                f"the optimizer trains parameters of shapes {new[:3]} that LocalSteps did not find when it "
                "was made: other ranks would not hear of them. On all ranks, finish() this one before "
                "add_param_group() or requires_grad_(True), and make another after it"
            )
        moved = []
        for name, one in _unexchanged_in(self._model):
            frozen, digest = self._known.get(name, (False, None))
            if digest is not None and _digest(one, frozen) != digest:
                moved.append((name, one))
        if trained := [name for name, one in moved if one.requires_grad]:
            raise UnsupportedError(
                f"another optimizer trains {listed(trained)}, whose gradients stay on their ranks: give it "
                f"LocalSteps, too: LocalSteps(other_optimizer, model, every={self.schedule.every})"
            )
        if moved:
            raise UnsupportedError(
                f"{listed([name for name, _ in moved])}, which no optimizer trains, have changed here: "
                "give averages of parameters to register_buffer, which is averaged over ranks"
            )
        super()._begin_exchange(finishing=finishing)

    def finish(self) -> None:
        """Ends a training: takes part in exchanges until all ranks have called it, even with unequal steps.

        Ranks that have skipped steps, or have had fewer batches, take part in the others' exchanges.
        """
        if not self._has_begun and any(one.grad is not None for one in self._trained_parameters()):
            raise UnsupportedError(
                f"LocalSteps has seen no step() of {type(self.optimizer).__name__}, though there are "
                "gradients: give it the optimizer whose step() moves the parameters"
            )
        super().finish()

    @torch.no_grad()
    def _clear_nonfinite_state(self) -> None:
        """Sets NaN and Inf in the optimizer's moments to 0; called when an exchange with NaN is cancelled."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    torch.nan_to_num_(local(value), 0.0, 0.0, 0.0)

    # checkpoints

    def before_load(self) -> None:
        """Called before the model loads a state: hashes its parameters, to notice whether they change."""
        if self._has_begun and not self._is_restored and self._before_load is None:
            self._apply_exchanges(0)
            self._before_load = self._digests()

    def _digests(self) -> list[bytes]:
        return [_digest(one, False) for _, one in self.facts.values()]

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, ranks: RankAndSize, topology: Topology | None
    ) -> list[LocalBucket]:
        return [LocalBucket(spec, facts, ranks, self.schedule) for spec in specs]

    def _adopt_loaded(self) -> None:
        before, self._before_load = self._before_load, None
        if before is not None and before != self._digests():  # not lent for an evaluation
            self.replace_common()
            self._remember_unexchanged()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's checkpoint entry: common parameters, residuals, steps since the last exchange.

        Each rank saves its own, beside its optimizer's state and its model's, which differ from rank to rank
        within a round. All save between the same two steps, and this first: with a delay it waits for the
        exchange in flight, which moves parameters.
        """
        self._adopt_loaded()
        return self.save()

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Loads a saved entry; ranks agree in the next step.

        Args:
            entry: of this rank, from `state_dict`; None to begin with the parameters as they are then.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
        """
        if entry is not None:
            entry = checked_entry(self, entry)
        self.load(entry)
        self._before_load, self._is_restored = None, entry is not None


def stepping_optimizer(optimizer: Any, module: Any) -> torch.optim.Optimizer:
    """Returns the optimizer whose `step` changes the parameters: the one within a wrapper, or within SAM."""
    optimizer = unwrapped(getattr(optimizer, "base_optimizer", optimizer))
    others = "_allreduce_delay", "_horovod_sparse", "_synchronize_for_scaler"
    if not isinstance(optimizer, torch.optim.Optimizer) or any(hasattr(optimizer, one) for one in others):
        allowed = "one of PyTorch, without attach or DistributedOptimizer: torch.optim.AdamW(...)"
        raise ArgumentError("optimizer", type(optimizer).__name__, allowed)
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "model", type(module).__name__, "the module whose parameters the optimizer trains"
        )
    return optimizer
