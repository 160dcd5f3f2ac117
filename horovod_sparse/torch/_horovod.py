"""Horovod's PyTorch binding: its import, a token of its present start, and uses of its private names.

Horovod's optimizers register gradient hooks in `_register_hooks`, after they have checked their arguments:
`pass_new_optimizers_to` takes over those with a sparsifier there. A parameter belongs to the optimizer made
for it last, of this package or of Horovod (`claim`). Every ``hvd.init()`` makes a new table of handles, which
Horovod 0.28.1 keeps in Python: comparing tables by identity notices a new start.

**Who frees tensors.** When a worker is lost, Horovod's thread lets go of all tensors under way while it holds
a mutex. Freeing a tensor needs the interpreter's lock if Python's reference is the last one; and a hook that
starts a collective holds that lock and waits for that mutex: both wait for ever. So every tensor that Horovod
gets is also held by another tensor (`hold_tensors`) until its collective has succeeded, or Horovod starts
again.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from horovod_sparse.tensors.models import claim
from horovod_sparse.training.collective_errors import horovod_binding

hvd: Any = horovod_binding("PyTorch", has="allreduce_async")
HorovodOptimizer: Any = hvd.optimizer._DistributedOptimizer

#: a start of Horovod, and by handle the tensors of its collectives in flight
_holders: tuple[Any, dict[int, list[torch.Tensor]]] = (None, {})


#: gives a token of Horovod's present start: compare it with ``is``, and hold it to compare with later
present_start: Callable[[], Any] = functools.partial(getattr, hvd.mpi_ops, "_handle_map")


def pass_new_optimizers_to(adopt: Callable[[Any], bool]) -> None:
    """Makes Horovod call `adopt` with each new optimizer; if that is False, Horovod registers its hooks."""
    for kind in (HorovodOptimizer, hvd.optimizer._DistributedAdasumOptimizer):

        def register_or_adopt(self: Any, register: Callable[[Any], None] = kind._register_hooks) -> None:
            if not adopt(self):
                register(self)

        kind._register_hooks = register_or_adopt


def tensor_holding(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a new tensor with `tensor` as its `.grad`, which keeps it alive without a Python reference."""
    while True:
        holder = tensor.new_empty(()).expand(tensor.shape)
        try:
            holder.grad = tensor
        except RuntimeError:
            # PyTorch wants both of one shape; Horovod's thread may have given an output its own meanwhile
            if holder.shape == tensor.shape:
                raise
        else:
            return holder


def hold_tensors(handle: int) -> int:
    """Keeps a started collective's tensors alive until `wait_for_result`; returns the handle."""
    global _holders
    start = present_start()
    if _holders[0] is not start:
        _holders = start, {}
    under_way = _pytree.tree_leaves(start[handle])
    _holders[1][handle] = [tensor_holding(one) for one in under_way if isinstance(one, torch.Tensor)]
    return handle


def wait_for_result(handle: int) -> Any:
    """Waits for a collective, and returns its result."""
    result = hvd.synchronize(handle)
    if _holders[0] is present_start():
        _holders[1].pop(handle, None)
    return result


class _HorovodOwner:
    """Marks parameters as those of Horovod's own optimizer, whose hooks `retire` can disable."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def retire(self) -> None:
        """Disables the hooks of Horovod's optimizer, which would wait for passes that never come."""
        if (optimizer := self._optimizer()) is not None:
            optimizer._grad_accs.clear()
            optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, sys.maxsize)


def claim_for_horovod(optimizer: Any) -> None:
    """Makes one of Horovod's own optimizers the owner of its parameters (`claim`)."""
    optimizer._owner_of_parameters = _HorovodOwner(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # claims among Horovod's own optimizers need no action
    claim(optimizer._owner_of_parameters, parameters, spared=_HorovodOwner)
