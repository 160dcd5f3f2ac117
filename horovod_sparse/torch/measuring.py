"""`measured_profile`: measures the times that plans need, before a training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError
from horovod_sparse.planning.backward import BackwardRecorder, with_times
from horovod_sparse.planning.calibration import QUICK, calibration
from horovod_sparse.planning.profile import Profile
from horovod_sparse.tensors.layout import dtype_name
from horovod_sparse.tensors.measuring import bucket_memory
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.torch.compression import Compression, SparseCompressor
from horovod_sparse.torch.driver import carry_out_together, construction_errors, hvd
from horovod_sparse.training.agreement import compare


@construction_errors.publishing_errors
def measured_profile(
    loss: Callable[[], torch.Tensor],
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    compression: SparseCompressor | str,
    process_set: Any = hvd.global_process_set,
    *,
    num_steps: int = 5,
    cluster: Profile | str | Path | None = None,
) -> Profile:
    """Measures the times that "omgs", "optimal" and ``tensor_selection="cost"`` need; all ranks call it.

    Call it before the optimizer is made. It trains nothing; only `loss` itself may change batch statistics.

    Args:
        loss: function that computes the loss of a batch; called in `num_steps` + 1 steps.
        named_parameters: names and parameters, as from ``model.named_parameters()``.
        compression: a sparsifier, or its text.
        process_set: the ranks that train.
        num_steps: number of steps whose backward pass is measured.
        cluster: a profile from `horovod-sparse calibrate`; by default measured here, in about two seconds.

    Returns:
        A profile for ``profile=``, equal on all ranks; its `save` writes it for the next run.
    """
    check_count("num_steps", num_steps)
    compression = Compression.parse(compression) if isinstance(compression, str) else compression
    if not isinstance(compression, SparseCompressor):
        raise ArgumentError("compression", compression, "a sparsifier: Compression.topk(density=0.01)")
    found = {name: one for name, one in named_parameters if one.requires_grad}
    if not found:
        raise ArgumentError("named_parameters", found, "some that require a gradient")
    if not (cluster is None or isinstance(cluster, (Profile, str, Path))):
        raise ArgumentError("cluster", cluster, "a Profile, or the path of a saved one")
    given = Profile.load(cluster) if isinstance(cluster, (str, Path)) else cluster
    stamp, between = _clock({one.device for one in found.values()})
    recorder = BackwardRecorder(list(found), 1, between)
    before = {one: one.grad for one in found.values()}

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: recorder.arrived(name, stamp())

    hooks = [one.register_post_accumulate_grad_hook(noting(name)) for name, one in found.items()]
    try:
        for number in range(1 + num_steps):
            for one in before:
                one.grad = None
            recorder.begin(stamp())
            value = loss()
            # not by backward(inputs=...), which reentrant checkpoints refuse
            for one in _leaf_tensors(value) if number == 0 else ():
                before.setdefault(one, one.grad)
                one.grad = None
            value.backward()
            recorder.end()
    finally:
        for hook in hooks:
            hook.remove()
        for one, grad in before.items():
            one.grad = grad
    sparsifier, largest = compression.recipe.sparsifier, max(found.values(), key=torch.Tensor.numel)
    device, dtype = largest.device, dtype_name(largest)
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def measured() -> Synchronization[Profile]:
        told = {"compression": sparsifier.describe(), "named_parameters": str(list(found))}
        yield from compare({**told, "cluster": "none" if given is None else given.digest()})
        profile = given
        if profile is None:
            where = ClusterFacts.of(process_set, "torch", hvd, words)
            profile = yield from calibration(
                where,
                [sparsifier],
                extent=QUICK,
                memory=bucket_memory(device),
                dtype=dtype or "float32",
                starting_seconds=lambda: starts[-1],
            )
        return (yield from with_times(profile, recorder.times()))

    starts, name, look = [0.0], "horovod_sparse.planning", construction_errors.watcher(process_set)
    with torch.no_grad():
        profile: Profile = carry_out_together(measured(), process_set, name, starts.append, meanwhile=look)
    return profile


def _leaf_tensors(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors to whose `.grad` a backward pass adds, also those that have no name."""
    seen, nodes = set[Any](), [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [one for one, _ in node.next_functions]
            if hasattr(node, "variable"):
                yield node.variable


def _clock(
    devices: Collection[torch.device],
) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Returns a function that takes a stamp, and one that returns the seconds between two.

    Where all gradients are on one GPU stamps are its events: a hook runs when its gradient's kernel has been
    queued, and the event when it is done.
    """
    device = next(iter(devices))
    if len(devices) > 1 or device.type != "cuda":
        return time.perf_counter, lambda start, stop: float(stop - start)

    def stamp() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def between(start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    return stamp, between
