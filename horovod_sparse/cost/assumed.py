"""What a bucket costs before anything is measured: by formulas, and what rounds cost on any cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from horovod_sparse.cost.fitting import Fit
from horovod_sparse.cost.formulas import TYPICAL_SELECTION, assumed_profile
from horovod_sparse.cost.model import CostModel
from horovod_sparse.cost.times import AffineTime, AlphaBeta
from horovod_sparse.sparsifiers import Sparsifier

#: between hosts nothing slower is taken than Gigabit Ethernet, so that a network nobody has told of counts in
#: favour of sparsifying
BETWEEN_HOSTS = AlphaBeta(50e-6, 8e-9)
#: between processes of one host: two of Horovod's need 0.3 to 1 ns for a byte, by Gloo's loopback or MPI's
#: shared memory
IN_MEMORY = AlphaBeta(20e-6, 0.5e-9)
#: between devices of one host: PCIe 4.0 with 16 lanes
BETWEEN_DEVICES = AlphaBeta(20e-6, 0.04e-9)
#: of a round beside Horovod's cycle and the network: negotiation, and until the rank has noticed its end
#: (docs/performance.md, "What a round costs")
ROUND_SECONDS = 2.5e-4
#: of a bucket, whatever is in it: its coroutine, its messages, and that it begins with its last gradient
BUCKET_SECONDS = 5e-4
#: a device folds and selects at its memory's rate, not at that of one core
_DEVICE_SELECTION = Fit(1e-4, 3e-11)


def assumed_cost(
    sparsifier: Sparsifier,
    size: int,
    *,
    one_host: bool,
    on_device: bool = False,
    on_mpi: bool = False,
    cycle_seconds: float = 1e-3,
    per_host: int = 1,
) -> CostModel:
    """What is known of a cluster before its first step.

    Every round costs a cycle of Horovod's and `ROUND_SECONDS` besides, whatever it carries. A sparsifier has
    one or more of them where an allreduce has one: what loses a small bucket.

    Args:
        sparsifier: which, at which density (once a schedule has ended).
        size: P, 2 or more.
        one_host: whether all ranks are on the same host.
        on_device: whether gradients are on an accelerator.
        on_mpi: whether messages between two ranks can go beside Horovod, and wait for no cycle.
        cycle_seconds: Horovod's cycle time.
        per_host: L, where gradients are summed within hosts of so many ranks first.

    Raises:
        ArgumentError: if P is below 2, or no multiple of L.

    Example:
        >>> from horovod_sparse.sparsifiers import ExDyna
        >>> near = assumed_cost(ExDyna(density=0.01), 2, one_host=True)
        >>> far = assumed_cost(ExDyna(density=0.01), 2, one_host=False)
        >>> sparse = near.selection.seconds(180_000) + near.communication.seconds(180_000)
        >>> sparse > near.dense.seconds(720_000), sparse < far.dense.seconds(720_000)
        (True, True)
    """
    inside = BETWEEN_DEVICES if on_device else IN_MEMORY
    formulas = assumed_profile(
        inside if one_host else BETWEEN_HOSTS,
        size,
        selection=_DEVICE_SELECTION if on_device else TYPICAL_SELECTION,
        per_host=per_host,
        host_network=inside,
    )

    wait, by_pairs = cycle_seconds + ROUND_SECONDS, ("exchange",) if on_mpi else ()

    def waiting(fits: Mapping[str, Fit], *free: str) -> dict[str, Fit]:
        extra = {kind: 0.0 if kind in free else wait for kind in fits}
        return {k: dataclasses.replace(f, fixed_seconds=f.fixed_seconds + extra[k]) for k, f in fits.items()}

    # of one level all messages are between pairs of ranks
    levels = {name: waiting(fits, *(fits if on_mpi else ())) for name, fits in formulas.levels.items()}
    flat = waiting(formulas.collectives, *by_pairs)
    profile = dataclasses.replace(formulas, collectives=flat, levels=levels)
    cost = profile.cost(sparsifier, levels="flat" if per_host == 1 else "host")
    return dataclasses.replace(
        cost, selection=profile.work(sparsifier, size // per_host, per_host) + AffineTime(BUCKET_SECONDS)
    )
