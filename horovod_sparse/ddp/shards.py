"""Gradients of one model of FSDP2: sharded within a host, synchronized sparsely between hosts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from horovod_sparse.ddp.collectives import Carrier
from horovod_sparse.ddp.step import Synchronizer, after_backward
from horovod_sparse.errors import UnsupportedError
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensors.parts import Part
from horovod_sparse.training.collective_errors import worst_of_all
from horovod_sparse.training.engine import carry_out
from horovod_sparse.training.settings import Settings

#: what reduce-scattered gradients may be: FSDP divides others once more when the hook has returned
_DTYPES = (torch.float32, torch.bfloat16)


class _Shards:
    """What FSDP reduce-scatters at once: this rank's shards of some parameters, one behind the other."""

    def __init__(self, group: Any, names: Mapping[torch.Tensor, str]) -> None:
        self.group = group
        #: FSDP's parameters that are trained, and what stands for each of the shards: it has no memory
        self.members: list[tuple[Any, torch.Tensor]] = []
        #: where each one begins, and how long all are
        self.starts: list[int] = []
        self.length = 0
        self.dtype = torch.float32
        for one in group.fsdp_params:
            if not one.sharded_param.requires_grad:
                continue
            policy = group.mp_policy
            self.dtype = dtype = policy.reduce_dtype or policy.param_dtype or one.sharded_param.dtype
            if dtype not in _DTYPES:
                raise UnsupportedError(
                    f"gradients of {names[one.sharded_param]} are reduced in {dtype}: give fully_shard "
                    "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )
            shape = one.sharded_size
            stand_in = torch.empty(1 if shape.numel() else 0, dtype=dtype, device=group.device)
            self.members.append((one, stand_in.expand(shape) if shape.numel() else stand_in))
            self.starts.append(self.length)
            self.length += one.padded_sharded_param_size.numel()

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(one.sharded_size, one.contiguous_sharded_stride, start)
            for (one, _), start in zip(self.members, self.starts, strict=True)
        ]

    def pieces(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What stands for each shard, and its view into a flat tensor; shards without elements left out."""
        pairs = zip(self.members, self._views(flat), strict=True)
        return [(stand_in, view) for (_, stand_in), view in pairs if stand_in.numel()]

    def is_kept(self, flat: torch.Tensor) -> bool:
        """Whether FSDP makes views of a reduced tensor the gradients, and so leaves it to its writers."""
        return not self.group.force_sum_reduction_for_comms and all(
            one.sharded_param.grad is None
            and not one.offload_to_cpu
            and one.sharded_param.dtype == flat.dtype
            for one, _ in self.members
        )

    def add(self, flat: torch.Tensor) -> None:
        """Adds to the gradients; a parameter without one gets it, on all ranks alike."""
        if flat.is_cuda:  # made on FSDP's stream, and freed before the work here is done
            flat.record_stream(torch.cuda.current_stream(flat.device))
        for (one, _), piece in zip(self.members, self._views(flat), strict=True):
            parameter = one.sharded_param
            own = piece.to(device=parameter.device, dtype=parameter.dtype)  # it may be offloaded to the host
            if parameter.grad is None:
                parameter.grad = one.to_sharded_dtensor(own.clone())
            else:
                parameter.grad.to_local().add_(own)


class ShardedState(Synchronizer):
    """What synchronizes shards of ranks that have the same ones: see `attach`, which makes it.

    FSDP gives a hook this rank's shards of the mean within its host. They are synchronized with those of the
    other hosts while backward goes on, and are gradients at its end. So the residual has as many elements as
    the shards, and every rank saves its own. Ranks in errors are those among the replicas of a shard.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compression: str | Recipe | None,
        optimizer: torch.optim.Optimizer | None,
        replicas: dist.ProcessGroup,
        settings: Settings,
    ) -> None:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        names = {parameter: name for name, parameter in model.named_parameters()}
        # nested ones first, as backward mostly has them; several modules may share a group
        groups = {
            id(group): group for module in reversed(modules) if (group := _group_of(module)) is not None
        }
        self._groups = [_Shards(group, names) for group in groups.values()]
        if not any(shards.members for shards in self._groups):
            raise UnsupportedError("fully_shard has no parameter of this model that is trained")
        named = [
            (names[one.sharded_param], stand_in)
            for shards in self._groups
            for one, stand_in in shards.members
        ]
        super().__init__(compression, optimizer, replace(settings, check_every=0), named, replicas)
        within = {shards.group.mesh_info.shard_process_group for shards in self._groups}
        if len(within) > 1:
            raise UnsupportedError("parts of the model are sharded over different ranks: give all one mesh")
        (self._within,) = within
        self.engine.shard = dist.get_rank(self._within), dist.get_world_size(self._within)
        self._neighbours: Carrier | None = None
        self._layout = [[one for _, one in shards.members] for shards in self._groups]
        #: what has come in this pass, by group, and whether FSDP has made gradients of this memory
        self._come: dict[int, tuple[torch.Tensor, bool]] = {}
        #: the end of this pass, which PyTorch holds until then, or until the pass fails
        self._ending: Callable[[], object] = lambda: None
        #: parts that are complete before it is their turn, and whose turn it is: as many as have been started
        self._ready: set[int] = set()
        self._order: list[Part] = []
        self._num_started = 0
        #: whether parts are started at the end of the pass: a group may come several times in it
        self._repeats = self._waits = False
        self._refusal: UnsupportedError | None = None
        number_of = {id(shards.group): number for number, shards in enumerate(self._groups)}
        for module in modules:
            if (group := _group_of(module)) is not None:
                module.set_all_reduce_hook(partial(self.on_shards, number_of[id(group)]))

    def _group_of(self) -> Mapping[torch.Tensor, int] | None:
        by_parameter = super()._group_of()
        if by_parameter is None:
            return None
        return {
            stand_in: by_parameter[one.sharded_param]
            for shards in self._groups
            for one, stand_in in shards.members
            if one.sharded_param in by_parameter
        }

    def on_shards(self, number: int, reduced: torch.Tensor) -> None:
        """This rank's shards of a group are reduced within the host; does not wait."""
        shards = self._groups[number]
        if self.under_way and self._ending() is None:
            self._forget()  # that pass has failed
        if not self.under_way:
            self._begin_pass()
        before, dtype = self._come.get(number), shards.dtype
        if reduced.numel() != shards.length or reduced.dtype != dtype:
            self._refusal = UnsupportedError(
                f"{reduced.numel()} elements of {reduced.dtype} came for {shards.length} of {dtype}: some of "
                "their parameters had no gradient (call set_reduce_scatter_unused_params(True)), or others "
                "are trained than before"
            )
        elif before is None:
            kept = shards.is_kept(reduced)
            flat = reduced if kept else reduced.clone()
            self._come[number] = flat, kept
            self._arrive(shards, flat)
            if kept:
                return
        elif self._waits:
            self._repeats = True
            before[0].add_(reduced)
        else:
            self._refusal = UnsupportedError(
                "FSDP has reduced the same parameters twice in one backward pass, as it has not in the first "
                "one: run the same modules in every step, or attach anew"
            )
        reduced.zero_()  # what is added to gradients meanwhile

    def _forget(self) -> None:
        """A backward pass has failed before its end: what it has begun is taken back, on all ranks alike."""
        if self.engine.communicator is not None:
            self._wait(self.engine.communicator)
        for part in self.parts:
            if part.task is not None:
                part.abandon()
        self._end_step()

    def _begin_pass(self) -> None:
        self._begin()
        self._waits = self._repeats or not self.is_agreed
        ending = partial(self._end_pass)
        self._ending = weakref.ref(ending)
        after_backward(ending)

    def _arrive(self, shards: _Shards, flat: torch.Tensor) -> None:
        if self._waits:
            self._keep(shards.pieces(flat))
        else:
            self._take(shards.pieces(flat))

    def _complete(self, part: Part) -> None:
        """Starts what can be: the order of groups in a pass may differ between hosts."""
        if not self._order:
            place = {name: i for i, name in enumerate(self._named)}
            self._order = sorted(self.parts, key=lambda one: max(place[name] for name in one.names))
        self._ready.add(id(part))
        while self._num_started < len(self._order) and id(self._order[self._num_started]) in self._ready:
            self._start(self._order[self._num_started], refused=self._refusal is not None)
            self._num_started += 1

    def _end_pass(self) -> None:
        """All that FSDP reduces in this pass has come."""
        for number, shards in enumerate(self._groups):
            if number not in self._come:
                flat = torch.zeros(shards.length, dtype=shards.dtype, device=shards.group.device)
                self._come[number] = flat, False
                self._arrive(shards, flat)
        failure = self._finish(self._layout)
        if failure is not None:
            raise failure

    def _end_step(self) -> None:
        super()._end_step()
        self._come, self._ready, self._order, self._num_started, self._refusal = {}, set(), [], 0, None

    def _of_all(self, failure: BaseException | None) -> BaseException | None:
        failure = self._refusal or failure
        if self.engine.shard[1] == 1:  # type: ignore[index]
            return failure
        if self._neighbours is None:
            self._neighbours = Carrier(self._within)
        return carry_out(worst_of_all(failure), self._neighbours)

    def _zero(self) -> None:
        for flat, _ in self._come.values():
            flat.zero_()

    @torch.no_grad()
    def _overflow(self) -> None:
        for shards in self._groups:
            for one, _ in shards.members:
                if one.sharded_param.grad is not None:
                    one.sharded_param.grad.to_local().fill_(torch.inf)

    @torch.no_grad()
    def _give_out(self) -> None:
        for number, (flat, kept) in self._come.items():
            if not kept:
                self._groups[number].add(flat)


def _group_of(module: FSDPModule) -> Any:
    """FSDP's group of a module's parameters; None where all are those of modules within."""
    groups = module._get_fsdp_state()._fsdp_param_groups
    if len(groups) > 1:
        raise UnsupportedError("shard_placement_fn gives parameters of one module other meshes: leave it out")
    if not groups:
        return None
    if not isinstance(groups[0].mesh_info, FSDPMeshInfo) or isinstance(groups[0].mesh_info, DDPMeshInfo):
        raise UnsupportedError(
            "fully_shard has a mesh over hosts, too, and would sum up densely between them: give it the "
            'ranks of a host alone (mesh["shard"]), and attach(..., replicas=mesh["replicate"])'
        )
    if groups[0]._all_reduce_hook is not None:
        raise UnsupportedError("the model has an all-reduce hook already, and can have only one")
    return groups[0]
