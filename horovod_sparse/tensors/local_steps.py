"""Local steps of a PyTorch optimizer: displacements where gradients lie elsewhere, and hooks on its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from horovod_sparse.arrays import MovedParts
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.kernels.host.scatter import native_bits, step_by_sum
from horovod_sparse.tensors.flat_gradient import HOST, GradientLayout, host_view, zeros
from horovod_sparse.tensors.layout import TensorEntry, host_entry, view_into
from horovod_sparse.tensors.parts import Part, facts_of, make_parts
from horovod_sparse.topology import Topology
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.local_settings import RoundSettings
from horovod_sparse.training.rounds import Buffers, Rounds
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.state import check_entry

_ADVICE = "LocalSteps uses {}: use the same algorithm, or load None to begin anew"


class Displacement(GradientLayout):
    """How far the parameters of a part have come since they were equal on all ranks.

    ``flat = start - parameters``; a sum in its place moves `start`, and the parameters follow. Half types are
    kept in float32: what a round moves is often less than their rounding. On the host displacements are made
    as they are folded, and sums in cache.

    Args:
        parameters: of one type.
        name: of the first, for messages.
        rounds: what the user asks for. With `offload` all this lies on the host, wherever the parameters are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], name: str, rounds: RoundSettings) -> None:
        super().__init__(parameters, name)
        first = self.parameters[0]
        if rounds.offload:
            self.memory, first = HOST, torch.empty(0, dtype=first.dtype)
        pinned = self.parameters[0].device.type == "cuda" and rounds.offload
        wide = first.new_empty(0, dtype=torch.promote_types(first.dtype, torch.float32))

        def empty(like: torch.Tensor, count: int = self.num_elements) -> torch.Tensor:
            made = zeros(count, like)
            return made.pin_memory() if pinned else made

        self.outer, self.start = rounds.outer, empty(wide)
        self.velocity = empty(wide, self.num_elements if self.outer.momentum else 0)
        #: the parameters as they were when the exchange under way began, where they go on meanwhile
        self.sent = empty(first, self.num_elements if rounds.delay else 0)
        self._flat: torch.Tensor | None = None
        self.begin()

    @torch.no_grad()
    def _gather(self, into: torch.Tensor) -> None:
        for number, parameter in enumerate(self.parameters):
            self._view(into, number).copy_(parameter)

    def _view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        return view_into(flat, self.places[number][0], self.layouts[number])

    def _line(self, number: int) -> torch.Tensor:
        """A parameter's elements one behind the other, as in `start`: itself, if its strides have stayed."""
        parameter, layout = self.parameters[number].detach(), self.layouts[number]
        if parameter.stride() != layout.stride():
            moved = torch.empty_strided(
                layout.shape, layout.stride(), dtype=parameter.dtype, device=parameter.device
            )
            parameter = moved.copy_(parameter)
        return parameter.as_strided((parameter.numel(),), (1,), parameter.storage_offset())

    def begin(self) -> None:
        """See `Kept`."""
        self._gather(self.start)
        self.velocity.zero_()
        self.forget()

    def settle(self) -> None:
        """Of this moment."""
        self._flat = None
        self.forget()

    @property
    def flat(self) -> torch.Tensor:
        """[n], made when somebody asks for it, and held until a sum takes its place."""
        if self._flat is None:
            self._flat = self._made()
        return self._flat

    @torch.no_grad()
    def _made(self) -> torch.Tensor:
        # half types went on from `start` as they can hold it: its rounding is no displacement
        common = self.start.to(self.parameters[0].dtype).to(self.start.dtype)
        made = torch.empty_like(common)
        for number, (first, stop) in enumerate(self.places):
            given = self.sent[first:stop] if self.sent.numel() else self._line(number)
            torch.sub(common[first:stop], given.to(common.device), out=made[first:stop])
        return made

    def _arrays(self) -> Iterator[np.ndarray]:
        """What leaves `start`, on the host; parameters on another device come one by one."""
        lines = [self.sent] if self.sent.numel() else map(self._line, range(len(self.parameters)))
        return (native_bits(host_view(line.cpu())) for line in lines)

    def foldable(self, loss_scale: float) -> Any:
        """As an accumulator folds it, and leaves it as it is."""
        if self.memory is not HOST:
            memory: Any = self.memory
            return memory.made(self._made)
        return MovedParts(self.start.numpy(), self._arrays)

    @torch.no_grad()
    def scatter(self, indices: np.ndarray | None, values: Any, scale: float = 1.0) -> int:
        """See `GradientLayout`; on the host parameters follow while `start` is in the cache."""
        if indices is None or self.memory is not HOST:
            self._flat = torch.empty_like(self.start)
            return super().scatter(indices, values, scale)
        lines, others = [], []
        for number, place in enumerate(self.places):
            line, parameter = self._line(number), self.parameters[number]
            follows = not self.sent.numel() and line.data_ptr() == parameter.data_ptr()
            follows = follows and (line.dtype, line.device) == (self.start.dtype, self.start.device)
            lines.append((*place, line.numpy() if follows else None))
            others += [] if follows else [number]
        num_union = step_by_sum(self.start.numpy(), indices, values, self.outer.lr * scale, lines)
        for number in others:
            self._follow(number)
        self.forget()
        return num_union

    @torch.no_grad()
    def _give_out(self) -> None:
        """The outer step."""
        mean, self._flat = self.flat, None
        if self.outer.momentum:
            self.velocity.mul_(self.outer.momentum).add_(mean)
            mean = mean.add(self.velocity, alpha=self.outer.momentum)
        self.start.sub_(mean, alpha=self.outer.lr)
        self.return_to_start()

    @torch.no_grad()
    def return_to_start(self) -> None:
        """See `Kept`."""
        for number in range(len(self.parameters)):
            self._follow(number)
        self.forget()  # nothing is under way any more

    def forget(self) -> None:
        """See `Kept`."""
        if self.sent.numel():
            self.sent = self.sent.to(self.parameters[0].dtype)  # `model.float()` has changed it
            self._gather(self.sent)

    def _follow(self, number: int) -> None:
        parameter, start = self.parameters[number], self._view(self.start, number)
        if not self.sent.numel():
            parameter.copy_(start)
            return
        sent = self._view(self.sent, number)
        learned = parameter.to(start.device, start.dtype).sub(sent)
        parameter.copy_(torch.where(torch.isfinite(sent), learned, 0).add_(start))

    def entry(self, number: int, name: str) -> TensorEntry:
        """See `Kept`."""
        return TensorEntry(name, self._view(self.start, number))

    def to_host(self, name: str) -> np.ndarray:
        """See `Kept`: a view where it can be."""
        array: np.ndarray = getattr(self, name).cpu().to(self.start.dtype).numpy()
        return array

    def from_host(self, name: str, values: np.ndarray) -> None:
        """See `Kept`."""
        getattr(self, name).copy_(torch.from_numpy(np.array(values)))


class LocalEngine:
    """What differs from an engine of a front end, which comes behind it among a class's bases.

    Attributes:
        named: the parameters by name.
        rounds: what the user asks for.
    """

    named: Mapping[str, torch.Tensor]
    rounds: RoundSettings

    def facts(self, known: Facts) -> Facts:
        return facts_of(
            [(name, p) for name, p in self.named.items() if name not in known and p.requires_grad],
            None,
            self.rounds.recipe.rules,
        )

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Part]:
        return make_parts(specs, facts, place, None, None, partial(Displacement, rounds=self.rounds))

    def declared(self) -> Mapping[str, object]:
        return self.rounds.describe()


def digests_of(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """By name, what tells whether a tensor has changed."""
    return {name: TensorEntry(name, tensor).sums().tobytes() for name, tensor in named.items()}


class ModelBuffers(Buffers):
    """Buffers of a model, by contents: statistics of batches are written past PyTorch's counters."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        super().__init__()

    def entries(self) -> list[TensorEntry]:
        """Asked for each time: ``self.mean = 0.9 * self.mean + ...`` puts another tensor in its place."""
        return [TensorEntry(name, one) for name, one in self._module.named_buffers() if one.numel()]

    def wide(self, entry: TensorEntry) -> np.ndarray | None:
        """See `Buffers`."""
        buffer = entry.tensor.detach()
        return buffer.double().cpu().numpy().reshape(-1) if buffer.is_floating_point() else None

    @torch.no_grad()
    def assign(self, entry: TensorEntry, wide: np.ndarray) -> None:
        """See `Buffers`."""
        entry.tensor.copy_(torch.from_numpy(wide).view(entry.tensor.shape))


class LocalTraining(Rounds):
    """Hooks on the steps of one optimizer; see `LocalSteps` of the front ends."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, engine: Any, settings: Settings
    ) -> None:
        self.optimizer = optimizer
        self._ids = {id(parameter) for parameter in self._trained()}
        super().__init__(engine, engine.rounds, settings, engine.facts({}), ModelBuffers(module))
        for hook in getattr(optimizer, "_local_hooks", ()):  # the one that was made last has it
            hook.remove()
        # the optimizer keeps this alive: a script need not. torch.compile(optimizer.step) leaves it as it is
        hooks = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)
        optimizer._local_hooks = hooks

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

    def _begin(self, *, finishing: bool = False) -> None:
        if new := [list(one.shape) for one in self._trained() if id(one) not in self._ids]:
            raise UnsupportedError(
                f"the optimizer trains parameters of shapes {new[:3]} that LocalSteps did not find when it "
                "was made: other ranks would not hear of them. On all ranks, finish() this one before "
                "add_param_group() or requires_grad_(True), and make another after it"
            )
        super()._begin(finishing=finishing)

    def state_dict(self) -> dict[str, Any]:
        """This rank's entry: common parameters, residuals, and where in its round it is.

        Each rank saves its own, beside its optimizer's state and its model's, which differ from rank to rank
        within a round. All save between the same two steps, and this first: with a delay it waits for the
        exchange under way, which moves parameters.
        """
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


def plain(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter that this rank has all of."""
    if type(parameter.data) is not torch.Tensor:
        allowed = "a model of plain tensors; horovod_sparse.ddp.LocalSteps takes one of fully_shard"
        raise ArgumentError("model", f"{name}, a {type(parameter.data).__name__}", allowed)
    return parameter


def named_in(
    optimizer: Any, module: Any, local: Callable[[str, torch.Tensor], torch.Tensor] = plain
) -> dict[str, torch.Tensor]:
    """The parameters that an optimizer trains, by their names in a model: what of them is this rank's.

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
    return {name: local(name, parameter) for name, parameter in named.items()}
