"""What a bucket costs: everything that plans and tensor selection are decided by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.planning.times import AffineTime, SortingTime, TimeModel
from horovod_sparse.plans.dense import bytes_by_round
from horovod_sparse.plans.network import AlphaBeta
from horovod_sparse.sparsifiers import Sparsifier

#: Horovod's default (HOROVOD_FUSION_THRESHOLD).
FUSION_BYTES = 128 * 2**20


@dataclass(frozen=True)
class CostModel:
    """Times of what happens to a bucket or a dense parameter, for one sparsifier, density and cluster.

    Args:
        selection: of a bucket, by its elements n: what the thread that runs backward does for it.
        communication: of a bucket, by its n: from the first message to the last one's arrival.
        dense: allreduce of a parameter that stays dense, by its bytes.
        dense_work: for a parameter that stays dense, by its elements: what that thread does for it.
        fuse_dense: dense parameters that wait for the network together go as one allreduce, as Horovod
            does it: all but one save `dense.fixed_seconds`.
        fuse_sparse: the same for buckets. Horovod does this too for what waits at the same time; the
            paper's model, and `optimal`'s proof, are without it.
        fusion_bytes: at most so many bytes in one fused allreduce.

    Example:
        >>> cost = CostModel(AffineTime(0.0, 1e-9), AffineTime(1e-3, 1e-10), AffineTime(1e-3, 1e-8))
        >>> cost.communication.seconds(10_000_000)
        0.002
    """

    selection: TimeModel
    communication: TimeModel
    dense: TimeModel = dataclasses.field(default_factory=AffineTime)
    dense_work: TimeModel = dataclasses.field(default_factory=AffineTime)
    fuse_dense: bool = True
    fuse_sparse: bool = False
    fusion_bytes: int = FUSION_BYTES


def starting_cost(
    network: AlphaBeta,
    size: int,
    density: float,
    *,
    selection: TimeModel,
    bytes_per_selected: int = 8,
) -> CostModel:
    """DRAGONN's formulas: what is used before anything is measured.

    ``T_full = 2 (P - 1) (alpha + n A / (P B))``, ``T_spr = (P - 1) (alpha + d n A' / B)``, n A in bytes

    Args:
        network: alpha, and beta = 1 / B.
        size: P.
        density: d, of each rank's message.
        selection: T_comp by n: selecting and decoding.
        bytes_per_selected: A', of an index and its value.

    Source: DRAGONN, section 4.2. Its printed difference of the two has 1/K where its own terms give 2/K.

    Example:
        >>> cost = starting_cost(AlphaBeta(1e-3, 1e-8), 4, 0.01, selection=AffineTime())
        >>> round(cost.dense.seconds(4_000_000), 6), round(cost.communication.seconds(1_000_000), 6)
        (0.066, 0.0054)
    """
    links, alpha, beta = size - 1, network.alpha_seconds, network.beta_seconds
    sparse_bytes = density * bytes_per_selected
    return CostModel(
        selection=selection,
        communication=AffineTime(links * alpha, links * sparse_bytes * beta),
        dense=AffineTime(2 * links * alpha, 2 * links * beta / size),
    )


#: a and b of the allgather on 1 Gbit/s Ethernet, by number of ranks; the paper only plots them (Fig. 2b).
_OMGS_GIGABIT = {2: (1.6e-3, 1.0e-8), 4: (2.7e-3, 1.3e-8), 8: (4.0e-3, 1.5e-8), 16: (1.1e-2, 1.7e-8)}


def omgs_cost(size: int, density: float) -> CostModel:
    """The constants that OMGS-SGD was evaluated with: P102-100 GPUs, 1 Gbit/s Ethernet.

    ``t_s = 2.19e-10 n log2 n``, ``t_c = 2 (a + b * 4 P d n)``: one allgather for values, one for indices.

    Args:
        size: P: 2, 4, 8 or 16, the only ones there are.
        density: rho.

    Source: OMGS-SGD, Fig. 2; the numbers themselves stand in the public program that it names.

    Raises:
        ArgumentError: for another size.

    Example:
        >>> round(omgs_cost(16, 0.001).communication.seconds(25_557_032), 4)
        0.0776
    """
    if size not in _OMGS_GIGABIT:
        raise ArgumentError("size", size, f"one of {sorted(_OMGS_GIGABIT)}, for which there are constants")
    alpha, beta = _OMGS_GIGABIT[size]
    gather = AffineTime(2 * alpha, 2 * beta * 4 * size * density)
    # no constants for allreduce are given: twice the latency, and 2 (P - 1) / P of the bytes one way
    return CostModel(
        selection=SortingTime(2.18896957e-10),
        communication=gather,
        dense=AffineTime(2 * alpha, 2 * (size - 1) / size * beta),
    )


def communication_of(
    sparsifier: Sparsifier, size: int, collectives: Mapping[str, AffineTime], *, dtype: str = "float32"
) -> AffineTime:
    """Time of a bucket's rounds as a function of its n, from fitted collectives.

    What each round carries is the algorithm's own declaration (`Sparsifier.traffic`), read off at two
    bucket sizes; ranks are taken to select equally many.

    Args:
        sparsifier: which algorithm, at which density.
        size: P.
        collectives: time by the bytes that a rank puts in, by kind ("allgather", ...).
        dtype: of the gradients.

    Raises:
        UnknownNameError: if a kind that the sparsifier needs was not measured.
    """
    small, large = (bytes_by_round(sparsifier, size, n, dtype) for n in (2**20, 2**24))
    total = AffineTime()
    for (name, few), (_, many) in zip(small, large, strict=True):
        if name not in collectives:
            raise UnknownNameError("measured collective", name, collectives)
        per_element = (many - few) / (2**24 - 2**20)
        total += collectives[name].per(per_element, offset=max(0.0, few - per_element * 2**20))
    return total
