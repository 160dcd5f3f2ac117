"""Local steps of a PyTorch optimizer: displacements where gradients lie elsewhere, and hooks on its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from horovod_sparse.collectives import AllReduce, Synchronization
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.tensors.flat_gradient import HOST, GradientLayout
from horovod_sparse.tensors.layout import TensorEntry, host_entry, view_into
from horovod_sparse.tensors.parts import Part, facts_of, make_parts
from horovod_sparse.topology import Topology
from horovod_sparse.training.drift import brought
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.local_settings import RoundSettings
from horovod_sparse.training.rounds import Rounds
from horovod_sparse.training.settings import Settings
from horovod_sparse.training.state import check_entry

_ADVICE = "LocalSteps uses {}: use the same algorithm, or load None to begin anew"


class Displacement(GradientLayout):
    """How far the parameters of a part have come since they were equal on all ranks.

    ``flat = start - parameters``; a sum in its place moves `start`, and the parameters follow. Half types are
    kept in float32: what a round moves is often less than their rounding.

    Args:
        parameters: of one type.
        name: of the first, for messages.
        rounds: what the user asks for. With `offload` all this lies on the host, wherever the parameters are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], name: str, rounds: RoundSettings) -> None:
        super().__init__(parameters, name)
        device = self.parameters[0].device
        pinned = rounds.offload and device.type == "cuda"
        if rounds.offload:
            self.memory, device = HOST, torch.device("cpu")
        kind = torch.promote_types(self.parameters[0].dtype, torch.float32)
        empty = partial(torch.empty, dtype=kind, device=device, pin_memory=pinned)
        self.outer, self.flat, self.start = rounds.outer, empty(self.num_elements), empty(self.num_elements)
        self.velocity = empty(self.num_elements if self.outer.momentum else 0).zero_()
        #: the parameters as they were when the exchange under way began, where they go on meanwhile
        self._sent = empty(self.num_elements) if rounds.delay else None
        self.begin()

    @torch.no_grad()
    def _gather(self, into: torch.Tensor) -> None:
        for number, parameter in enumerate(self.parameters):
            self._view(into, number).copy_(parameter)

    def _view(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        return view_into(flat, self.places[number][0], self.layouts[number])

    def begin(self) -> None:
        """See `Kept`."""
        self._gather(self.start)
        if self._sent is not None:
            self._sent.copy_(self.start)

    @torch.no_grad()
    def settle(self) -> None:
        """Of this moment; parameters on another device come one by one."""
        # parameters of half types went on from `start` as they can hold it: its rounding is no displacement
        common = self.start.to(self.parameters[0].dtype).to(self.start.dtype)
        if self._sent is not None:
            self._gather(self._sent)
            torch.sub(common, self._sent, out=self.flat)
            return
        for number, parameter in enumerate(self.parameters):
            given = parameter.to(self.flat.device)
            torch.sub(self._view(common, number), given, out=self._view(self.flat, number))

    def foldable(self, loss_scale: float) -> Any:
        """As an accumulator folds it, and leaves it as it is."""
        return self.memory.foldable(self.flat)

    def _give_out(self) -> None:
        """The outer step; dense, since reading and writing single elements takes longer."""
        if self.outer.momentum:
            self.velocity.mul_(self.outer.momentum).add_(self.flat)
            self.flat.add_(self.velocity, alpha=self.outer.momentum)
        self.start.sub_(self.flat, alpha=self.outer.lr)
        self.return_to_start()

    @torch.no_grad()
    def return_to_start(self) -> None:
        """See `Kept`."""
        for number, parameter in enumerate(self.parameters):
            start = self._view(self.start, number)
            if self._sent is None:
                parameter.copy_(start)
                continue
            sent = self._view(self._sent, number)
            learned = parameter.to(start.device).sub(sent)
            parameter.copy_(torch.where(torch.isfinite(sent), learned, 0).add_(start))
        self.forget()  # nothing is under way any more

    def forget(self) -> None:
        """See `Kept`."""
        if self._sent is not None:
            self._gather(self._sent)

    def to_host(self, name: str) -> np.ndarray:
        """See `Kept`: a view where it can be."""
        array: np.ndarray = getattr(self, name).cpu().numpy()
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
            self.rounds.recipe.rules if self.rounds.recipe.rules else ParameterRules(),
        )

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Part]:
        return make_parts(specs, facts, place, None, None, partial(Displacement, rounds=self.rounds))

    def declared(self) -> Mapping[str, object]:
        return self.rounds.describe()

    def entries(self, parts: Sequence[Any]) -> list[Any]:
        """See `RoundEngine`."""
        return [
            TensorEntry(name, part.gradient._view(part.gradient.start, number))
            for part in parts
            for number, name in enumerate(part.names)
        ]


def digests_of(named: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """By name, what tells whether a tensor has changed."""
    return {name: TensorEntry(name, tensor).sums().tobytes() for name, tensor in named.items()}


class ModelBuffers:
    """Buffers of a model: floats are averaged over ranks, all others are rank 0's."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known = digests_of(self._buffers)

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        """Asked for each time: ``self.mean = 0.9 * self.mean + ...`` puts another tensor in its place."""
        return dict(self._module.named_buffers())

    def changed(self) -> list[str]:
        """See `Buffers`: by contents, since statistics of batches are written past PyTorch's counters."""
        return [name for name, digest in digests_of(self._buffers).items() if digest != self._known.get(name)]

    @torch.no_grad()
    def shared(self, names: Sequence[str], size: int, root: int | None = None) -> Synchronization[None]:
        """See `Buffers`: one allreduce, and a broadcast for each that is no float."""
        buffers = self._buffers
        some = [
            buffer
            for name, buffer in buffers.items()
            if buffer.numel() and (root is not None or name in names)
        ]
        floats = [buffer for buffer in some if buffer.is_floating_point()] if root is None else []
        if floats:
            total = yield AllReduce(
                np.concatenate([one.double().cpu().numpy().reshape(-1) for one in floats])
            )
            pieces = torch.from_numpy(np.array(total) / size).split([one.numel() for one in floats])
            for buffer, piece in zip(floats, pieces, strict=True):
                buffer.copy_(piece.view(buffer.shape))
        for buffer in some:
            if root is not None or not buffer.is_floating_point():
                yield from brought(TensorEntry("", buffer), root or 0)
        self._known = digests_of(self._buffers)


class LocalTraining(Rounds):
    """Hooks on the steps of one optimizer; see `LocalSteps` of the front ends."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: torch.nn.Module, engine: Any, settings: Settings
    ) -> None:
        self.optimizer = optimizer
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

    def _begin(self, *, finishing: bool = False) -> None:
        known = {id(parameter) for _, parameter in self.facts.values()}
        given = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if new := [list(p.shape) for p in given if p.requires_grad and p.numel() and id(p) not in known]:
            raise UnsupportedError(
                f"the optimizer trains parameters of shapes {new[:3]} that LocalSteps did not find when it "
                "was made: other ranks would not hear of them. On all ranks, finish() this one before "
                "add_param_group() or requires_grad_(True), and make another after it"
            )
        super()._begin(finishing=finishing)

    def state_dict(self) -> dict[str, Any]:
        """This rank's entry: common parameters, residuals, and where in its round it is.

        Each rank saves its own, beside its optimizer's state and its model's, which differ from rank to rank
        within a round. All save between the same two steps.
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


def named_in(optimizer: Any, module: Any) -> dict[str, torch.Tensor]:
    """The parameters that an optimizer trains, by their names in a model.

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
    for name, parameter in named.items():
        if type(parameter.data) is not torch.Tensor:
            allowed = "a model of plain tensors: sharded ones (FSDP) are not taken yet"
            raise ArgumentError("model", f"{name}, a {type(parameter.data).__name__}", allowed)
    return named
