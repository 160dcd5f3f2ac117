"""Local steps of a PyTorch optimizer: displacements of its parameters, and hooks on its steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.arrays import WeightedParts
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import Bucket, Member
from horovod_sparse.kernels.host import scatter
from horovod_sparse.sparsifiers import BucketInfo, SparseSum
from horovod_sparse.tensors.binding import unwrapped
from horovod_sparse.tensors.flat_gradient import HOST, host_view, memory_of, zeros
from horovod_sparse.tensors.layout import (
    TensorEntry,
    dtype_name,
    host_entry,
    memory_strides,
    shaped,
    unshaped,
    view_into,
)
from horovod_sparse.tensors.parameters import local
from horovod_sparse.tensors.parts import facts_of
from horovod_sparse.topology import Topology
from horovod_sparse.training import local_steps, parts
from horovod_sparse.training.collective_errors import some_of
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.local_settings import LocalSchedule, mean_over_senders
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.state import check_entry

_ADVICE = "LocalSteps uses {}: use the same algorithm, or load None to begin anew"
#: parameters that some LocalSteps exchanges
_have_local_steps: Any = WeakTensorKeyDictionary()


class Displacement(local_steps.Displacement):
    """See `local_steps.Displacement`.

    Half types are kept in float32: a round often moves a parameter by less than their rounding.
    """

    def __init__(self, part: LocalBucket, parameters: Sequence[torch.Tensor], schedule: Any) -> None:
        super().__init__(part.bucket, schedule)
        self._parameters, self._places, self._layouts = tuple(parameters), part.places, part.layouts
        self._memory, first = part.memory, parameters[0]
        pinned = first.device.type == "cuda" and schedule.offload
        if schedule.offload:
            first = torch.empty(0, dtype=first.dtype)
        wide = first.new_empty(0, dtype=torch.promote_types(first.dtype, torch.float32))
        n = part.bucket.info.num_elements

        def empty(like: torch.Tensor, count: int) -> torch.Tensor:
            made = zeros(count, like)
            return made.pin_memory() if pinned else made

        self.start, self.velocity = empty(wide, n), empty(wide, n if schedule.outer.momentum else 0)
        self.sent = empty(first, n if schedule.delay else 0)
        self.adopt()

    @torch.no_grad()
    def _gather(self, into: torch.Tensor) -> None:
        for number, parameter in enumerate(self._parameters):
            self._view(into, number).copy_(parameter)

    def _view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        return view_into(flat, self._places[number][0], self._layouts[number])

    def _line(self, number: int) -> torch.Tensor:
        """Returns a parameter's elements in the order of `start`, its own memory if strides have stayed."""
        parameter, layout = self._parameters[number].detach(), self._layouts[number]
        if parameter.stride() != layout.stride():
            like = {"dtype": parameter.dtype, "device": parameter.device}
            parameter = torch.empty_strided(layout.shape, layout.stride(), **like).copy_(parameter)
        return parameter.as_strided((parameter.numel(),), (1,), parameter.storage_offset())

    def adopt(self) -> None:
        self._gather(self.start)
        self.velocity.zero_()
        self.forget()

    @torch.no_grad()
    def displacement(self) -> Any:
        lines = [
            self.sent[slice(*place)] if self.sent.numel() else self._line(number)
            for number, place in enumerate(self._places)
        ]
        # half types went on from `start` as they can hold it: its rounding is no displacement
        pairs = [
            (self.start[slice(*place)].to(line.dtype), line.to(self.start.device))
            for place, line in zip(self._places, lines, strict=True)
        ]
        if self._memory is HOST:
            common, own = ([host_view(one) for one in some] for some in zip(*pairs, strict=True))
            return WeightedParts(common, own, (1.0, -1.0))
        kind = self.start.dtype
        return self._memory.foldable([one.to(kind) - other.to(kind) for one, other in pairs])

    @torch.no_grad()
    def step_by(self, sum_: SparseSum, scale: float | None) -> int:
        outer = self.schedule.outer
        if not sum_.whole and self._memory is HOST:
            return self._step_in_cache(sum_, outer.lr if scale is None else outer.lr * scale, scale is None)
        if scale is None:
            sum_, scale = mean_over_senders(sum_, self.start.numel()), 1.0
        mean, indices = torch.empty_like(self.start), None if sum_.whole else sum_.indices
        num_union = self._memory.write([mean], [(0, mean.numel())], indices, sum_.values, scale)
        if outer.momentum:
            self.velocity.mul_(outer.momentum).add_(mean)
            mean.add_(self.velocity, alpha=outer.momentum)
        self.start.sub_(mean, alpha=outer.lr)
        self.return_to_start()
        return num_union

    def _step_in_cache(self, sum_: SparseSum, rate: float, mean: bool) -> int:
        """Steps while `start` is in the cache; parameters of its type and memory follow at once."""
        lines, others = [], []
        for number, place in enumerate(self._places):
            line, parameter = self._line(number), self._parameters[number]
            follows = not self.sent.numel() and line.data_ptr() == parameter.data_ptr()
            follows = follows and (line.dtype, line.device) == (self.start.dtype, self.start.device)
            lines.append((*place, line.numpy() if follows else None))
            others += [] if follows else [number]
        start = self.start.numpy()
        num_union = scatter.step_by_sum(start, sum_.indices, sum_.values, rate, lines, mean)
        self._follow(others)
        self.forget()
        return num_union

    @torch.no_grad()
    def return_to_start(self) -> None:
        self._follow(range(len(self._parameters)))
        self.forget()

    def _follow(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            parameter, start = self._parameters[number], self._view(self.start, number)
            if not self.sent.numel():
                parameter.copy_(start)
                continue
            sent = self._view(self.sent, number)
            learned = parameter.to(start.device, start.dtype).sub(sent)
            parameter.copy_(torch.where(torch.isfinite(sent), learned, 0).add_(start))

    def forget(self) -> None:
        if self.sent.numel():
            self.sent = self.sent.to(self._parameters[0].dtype)  # `model.float()` has changed it
            self._gather(self.sent)

    @contextlib.contextmanager
    def common(self) -> Iterator[None]:
        own = [parameter.detach().clone() for parameter in self._parameters]
        with torch.no_grad():
            for number, parameter in enumerate(self._parameters):
                parameter.copy_(self._view(self.start, number))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(self._parameters), own)

    def entry(self, number: int, name: str) -> TensorEntry:
        return TensorEntry(name, self._view(self.start, number))

    def to_host(self, name: str) -> np.ndarray:
        array: np.ndarray = getattr(self, name).cpu().to(self.start.dtype).numpy()
        return array

    def from_host(self, name: str, values: np.ndarray) -> None:
        getattr(self, name).copy_(torch.from_numpy(np.array(values)))


class LocalBucket(parts.BucketPart):
    """Parameters whose displacements are exchanged together; see `StepPart`."""

    def __init__(self, spec: PartSpec, facts: Facts, place: tuple[int, int], schedule: LocalSchedule) -> None:
        self.label = self.name = spec.label
        self.names, self.dense = tuple(spec.names), spec.dense
        parameters = [facts[name][1] for name in spec.names]
        stops = np.cumsum([parameter.numel() for parameter in parameters]).tolist()
        self.places = list(zip([0, *stops[:-1]], stops, strict=True))
        #: shape and order of each parameter, which stay when it changes its own
        strides = [(one.shape, memory_strides(one)) for one in parameters]
        self.layouts = [torch.empty_strided(*one, device="meta") for one in strides]
        first = parameters[0]
        self.memory = HOST if schedule.offload else memory_of(first.device, self.names[0])
        self.num_bytes = stops[-1] * first.element_size()
        info = BucketInfo(spec.title, stops[-1], *place, dtype_name(first) or "unknown")
        members = [Member(name, *span) for name, span in zip(self.names, self.places, strict=True)]
        memory = self.memory.whole(info) if spec.whole else self.memory.accumulator(info, spec.recipe)
        self.bucket = Bucket(info, spec.recipe, memory, members)
        self.moves = Displacement(self, parameters, schedule)

    def shaped(self, number: int, values: np.ndarray) -> torch.Tensor:
        return shaped(values, self.layouts[number])

    def flat(self, number: int, values: torch.Tensor) -> np.ndarray:
        return unshaped(values, self.layouts[number])


class LocalEngine:
    """Parameters and buckets of local steps; an engine of a front end comes behind it among a class's bases.

    Attributes:
        named: the parameters by name.
        schedule: of the exchanges.
    """

    named: Mapping[str, torch.Tensor]
    schedule: LocalSchedule

    def facts(self, known: Facts) -> Facts:
        trained = [(name, p) for name, p in self.named.items() if name not in known and p.requires_grad]
        return facts_of(trained, None, self.schedule.recipe.rules)

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Any]:
        return [LocalBucket(spec, facts, place, self.schedule) for spec in specs]

    def declared(self) -> Mapping[str, object]:
        return {}


def _others_in(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters that no LocalSteps exchanges."""
    return [(name, one) for name, one in model.named_parameters() if one not in _have_local_steps]


def _mark(tensor: torch.Tensor, by_version: bool) -> bytes:
    """Returns a digest of a tensor's version, or of its contents."""
    return str(tensor._version).encode() if by_version else TensorEntry("", local(tensor)).sums().tobytes()


class ModelBuffers(local_steps.Buffers):
    """Buffers of a model, by contents, and frozen parameters, which a moving average may follow.

    Statistics of batches are written past PyTorch's counters of versions; frozen parameters are not.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        super().__init__()

    def entries(self) -> list[TensorEntry]:
        # asked for each time: ``self.mean = 0.9 * self.mean + ...`` puts another tensor in its place
        named = dict(self._module.named_buffers())
        self._frozen = {name: one for name, one in _others_in(self._module) if not one.requires_grad}
        return [TensorEntry(name, local(one)) for name, one in (named | self._frozen).items() if one.numel()]

    def mark(self, entry: TensorEntry) -> bytes:
        return _mark(entry.tensor, entry.name in self._frozen)

    def wide(self, entry: TensorEntry) -> np.ndarray | None:
        buffer = entry.tensor.detach()
        return buffer.double().cpu().numpy().reshape(-1) if buffer.is_floating_point() else None

    @torch.no_grad()
    def assign(self, entry: TensorEntry, wide: np.ndarray) -> None:
        entry.tensor.copy_(torch.from_numpy(wide).view(entry.tensor.shape))


class _LoadHook:
    """Tells a training before a module loads a state; a copy of the module has one that does nothing."""

    def __init__(self, training: LocalBinding | None = None) -> None:
        self._training = (lambda: None) if training is None else weakref.ref(training)

    def __call__(self, *_: Any) -> None:
        if (training := self._training()) is not None:
            training.before_load()

    def __deepcopy__(self, memo: Any) -> _LoadHook:
        return _LoadHook()

    def __reduce__(self) -> Any:
        return _LoadHook, ()


class LocalBinding(local_steps.LocalTraining):
    """Binds one optimizer's steps to local steps; see `LocalSteps` of the front ends."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, engine: Any, settings: Settings
    ) -> None:
        self.optimizer, self._model = optimizer, model
        self._ids = {id(parameter) for parameter in self._trained()}
        exchanged = [one for name, one in model.named_parameters() if name in engine.named]
        _have_local_steps.update(dict.fromkeys(exchanged, True))
        #: of parameters that others may train, whether they were frozen, and a digest, where training begins
        self._known: dict[str, tuple[bool, bytes]] = {}
        #: digests of the parameters before a state was loaded since the last step
        self._before_load: list[bytes] | None = None
        self._is_restored = False
        super().__init__(engine, engine.schedule, settings, engine.facts({}), ModelBuffers(model))
        for hook in getattr(optimizer, "_local_hooks", ()):  # the one that was made last has the optimizer
            hook.remove()
        # the optimizer keeps this alive: a script need not. torch.compile(optimizer.step) leaves it as it is
        optimizer._local_hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            *(one._register_load_state_dict_pre_hook(_LoadHook(self)) for one in model.modules()),
        ]

    @torch._disable_dynamo
    def _before(self, optimizer: Any, arguments: Any, named: Any) -> None:
        self.before_step()

    @torch._disable_dynamo
    def _after(self, optimizer: Any, arguments: Any, named: Any) -> None:
        # a fused optimizer is called by a GradScaler where it skips, too, and told so
        skipped = getattr(optimizer, "found_inf", None)
        if not (skipped is not None and bool(skipped)):
            self.after_step()

    def _trained(self) -> Iterator[torch.Tensor]:
        given = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return (parameter for parameter in given if parameter.requires_grad and parameter.numel())

    def before_step(self) -> None:
        super().before_step()
        self._take_loaded()
        self._is_restored = False

    def agree(self, *, as_first: bool = False) -> None:
        is_due = not (self._has_begun and self.is_agreed)
        super().agree(as_first=as_first)
        if is_due:
            self._know_others()

    def _know_others(self) -> None:
        others = [(name, one, not one.requires_grad) for name, one in _others_in(self._model)]
        self._known = {name: (frozen, _mark(one, frozen)) for name, one, frozen in others}

    def _is_as_known(self, name: str, parameter: torch.Tensor) -> bool:
        frozen, mark = self._known[name]
        return _mark(parameter, frozen) == mark

    def _begin_exchange(self, *, finishing: bool = False) -> None:
        self._take_loaded()
        if new := [list(one.shape) for one in self._trained() if id(one) not in self._ids]:
            raise UnsupportedError(
                f"the optimizer trains parameters of shapes {new[:3]} that LocalSteps did not find when it "
                "was made: other ranks would not hear of them. On all ranks, finish() this one before "
                "add_param_group() or requires_grad_(True), and make another after it"
            )
        moved = [
            name
            for name, one in _others_in(self._model)
            if one.requires_grad and name in self._known and not self._is_as_known(name, one)
        ]
        if moved:
            raise UnsupportedError(
                f"another optimizer trains {some_of(moved)}, whose gradients stay on their ranks: give it "
                f"LocalSteps, too: LocalSteps(other_optimizer, model, every={self.schedule.every})"
            )
        super()._begin_exchange(finishing=finishing)

    def finish(self) -> None:
        """Ends a training: exchanges until all ranks have called it, at whatever step each is.

        Ranks that have skipped steps, or have had fewer batches, are met by the others' exchanges.
        """
        if not self._has_begun and any(one.grad is not None for one in self._trained()):
            raise UnsupportedError(
                f"LocalSteps has seen no step() of {type(self.optimizer).__name__}, though there are "
                "gradients: give it the optimizer whose step() moves the parameters"
            )
        super().finish()

    @torch.no_grad()
    def _heal(self) -> None:
        """Clears moments that are not finite: with them no later step would be."""
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    torch.nan_to_num_(local(value), 0.0, 0.0, 0.0)

    # checkpoints

    def before_load(self) -> None:
        """Notes the parameters before the model loads a state in the midst of a training."""
        if self._has_begun and not self._is_restored and self._before_load is None:
            self._land(0)
            self._before_load = self._digests()

    def _digests(self) -> list[bytes]:
        return [_mark(one, False) for _, one in self.facts.values()]

    def _take_loaded(self) -> None:
        before, self._before_load = self._before_load, None
        if before is not None and before != self._digests():  # not lent for an evaluation
            self.replace_common()
            self._know_others()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's entry: common parameters, residuals, and where in its round it is.

        Each rank saves its own, beside its optimizer's state and its model's, which differ from rank to rank
        within a round. All save between the same two steps, and this first: with a delay it waits for the
        exchange in flight, which moves parameters.
        """
        self._take_loaded()
        return self.save()

    def load_state_dict(self, entry: Mapping[str, Any] | None) -> None:
        """Goes on from an entry; ranks agree in the next step.

        Args:
            entry: of this rank, from `state_dict`; None to begin with the parameters as they are then.

        Raises:
            StateMismatchError: if parameters, shapes or the algorithm differ. Nothing has been loaded then.
        """
        if entry is not None:
            entry = host_entry(entry)
            check_entry(entry, self.recipe, _ADVICE)
            known = {name: parameter for name, (_, parameter) in self.facts.items()}
            self.check_fits(entry, known, known)
        self.load(entry)
        self._before_load, self._is_restored = None, entry is not None


def stepping(optimizer: Any) -> Any:
    """Returns the optimizer whose `step` moves the parameters: that within a wrapper, or within SAM."""
    return unwrapped(getattr(optimizer, "base_optimizer", optimizer))


def plain(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a parameter that this rank has all of; refuses a sharded one."""
    if type(parameter.data) is not torch.Tensor:
        allowed = "a model of plain tensors; horovod_sparse.ddp.LocalSteps takes one of fully_shard"
        raise ArgumentError("model", f"{name}, a {type(parameter.data).__name__}", allowed)
    return parameter


def named_in(
    optimizer: Any, module: Any, own: Callable[[str, torch.Tensor], torch.Tensor] = plain
) -> dict[str, torch.Tensor]:
    """Returns what this rank has of the parameters that an optimizer trains, by their names in a model.

    Raises:
        ArgumentError: for what is no optimizer of PyTorch, or no model, or one without some of them.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "_allreduce_delay"):
        allowed = "one of PyTorch, whose gradients nobody synchronizes: torch.optim.AdamW(...)"
        raise ArgumentError("optimizer", type(optimizer).__name__, allowed)
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            "model", type(module).__name__, "the module whose parameters the optimizer trains"
        )
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in given}
    if len(named) < len(given):
        allowed = f"the one that has all {len(given)} parameters of the optimizer"
        raise ArgumentError("model", f"one that has {len(named)} of them", allowed)
    return {name: own(name, parameter) for name, parameter in named.items()}
