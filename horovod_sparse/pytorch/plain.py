"""Every primitive in plain PyTorch, on any device: the reference of the Triton kernels, and their stand-in.

All tensors of a call are on one device. `values` is float32 or float64 of shape (n,), `maxima` holds
magnitude bits (int32 or int64) of blocks of `layout.block` elements, `indices` are int32. Magnitude bits, the
bits without the sign, order like the magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horovod_sparse.kernels.layout import Layout


def device_block_size(density: float) -> int:
    """Elements per block on an accelerator, for a density.

    The k-th largest block maximum bounds the k-th largest element, and about k blocks pass it. They
    are read again, so 1/8 of the blocks should pass: one read in 32 bytes of traffic. Larger blocks
    than 1024 would save nothing any more, smaller ones than 32 are not one transaction.

    Args:
        density: kept fraction, in (0, 1].

    Returns:
        A power of two from 32 to 1024.

    Example:
        >>> [device_block_size(density) for density in (0.1, 0.001, 1e-6)]
        [32, 128, 1024]
    """
    block = 1024
    while block > 32 and block * density > 0.125 + 0.01:
        block //= 2
    return block


def int_type(dtype: torch.dtype) -> torch.dtype:
    """The signed type as wide as float32 or float64: magnitude bits are below its sign."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def num_magnitude_bits(dtype: torch.dtype) -> int:
    """31 or 63."""
    return 63 if dtype == torch.float64 else 31


def infinity_bits(dtype: torch.dtype) -> int:
    """Magnitude bits of Inf: smaller are finite, larger are NaN."""
    return 0x7FF0000000000000 if dtype == torch.float64 else 0x7F800000


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The bits without the sign; they order like the magnitudes, Inf and NaN on top.

    Args:
        values: float32 or float64.

    Returns:
        int32 or int64, a fresh tensor.
    """
    kind = int_type(values.dtype)
    return values.view(kind) & torch.iinfo(kind).max


# Elements that are worked on together, which bounds the memory for intermediates; blocks divide it.
_TILE = 1 << 22


def _finite(values: Tensor) -> Tensor:
    return magnitudes(values) < infinity_bits(values.dtype)


def fold(
    values: Tensor,
    gradient: Tensor,
    maxima: Tensor,
    layout: Layout,
    factors: Tensor,
    square_norm: Tensor,
    velocity: Tensor | None = None,
    plain: bool = False,
    keep: bool = False,
) -> Tensor:
    """values = decay * values + step; gradient = 0; block maxima.

    ``step = gradient``, or with a velocity ``velocity = momentum * velocity + gradient;
    step = factors[2] * gradient + factors[3] * velocity``.

    Args:
        values: changed.
        gradient: shape (n,), float32, float16 or bfloat16, or float64 if values are; set to 0.
        maxima: shape (layout.num_blocks,), overwritten.
        layout: of the blocks.
        factors: of the type of values, shape (4,): decay, momentum, and those of the step.
        square_norm: float64, shape (1,): sum of squares of values before.
        velocity: like values, changed.
        plain: says that decay is 1, so that nothing need be multiplied.
        keep: leaves the gradient as it is.

    Returns:
        float64, shape (4,): how many elements were not finite and counted as 0, the position of the first
        (n or more if there is none), sum of squares of the new values, and that of decay * the old.
    """
    n, block = layout.num_elements, layout.block
    count = torch.zeros((), dtype=torch.int64, device=values.device)
    first = torch.full((), n, dtype=torch.int64, device=values.device)
    square = torch.zeros((), dtype=torch.float64, device=values.device)
    decay, momentum, from_gradient, from_velocity = factors.unbind()
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        old, step = values[start:stop], gradient[start:stop].to(values.dtype)
        kept = old if plain else old * decay
        wrong = torch.zeros_like(old, dtype=torch.bool)
        if velocity is not None:
            wrong = ~_finite(step)
            step = torch.where(wrong, 0.0, step)
            coasting = momentum * velocity[start:stop]
            speed = coasting + step
            fine = _finite(speed)
            wrong |= ~fine
            speed = torch.where(fine, speed, coasting)
            velocity[start:stop] = speed
            step = from_gradient * step + from_velocity * speed
        new = kept + step
        fine = _finite(new)
        wrong |= ~fine
        new = torch.where(fine, new, torch.where(_finite(kept), kept, old))
        square += new.double().square().sum()
        count += wrong.sum()
        # argmax of booleans finds the first one that is true; without one it says 0.
        here = start + wrong.to(torch.uint8).argmax()
        first = torch.minimum(first, torch.where(wrong.any(), here, n))
        values[start:stop] = new
        maxima[start // block : -(-stop // block)] = _block_maxima(new, block)
    if not keep:
        gradient.zero_()
    carried = decay.double() ** 2 * square_norm[0]
    return torch.stack([count.double(), first.double(), square, carried])


def _block_maxima(values: Tensor, block: int) -> Tensor:
    keys = magnitudes(values)
    missing = -keys.numel() % block
    return torch.nn.functional.pad(keys, (0, missing)).view(-1, block).amax(1)


def scan_maxima(values: Tensor, maxima: Tensor, layout: Layout) -> None:
    """Maxima of all blocks, without a gradient (after an assignment)."""
    block = layout.block
    for start in range(0, layout.num_elements, _TILE):
        stop = min(start + _TILE, layout.num_elements)
        maxima[start // block : -(-stop // block)] = _block_maxima(values[start:stop], block)


def refresh_maxima(values: Tensor, maxima: Tensor, layout: Layout, indices: Tensor) -> None:
    """Maxima of the blocks that hold the given elements."""
    blocks = torch.unique(indices // layout.block)
    where = blocks[:, None].long() * layout.block + torch.arange(layout.block, device=values.device)
    # The last block may end early; its last element again changes no maximum.
    maxima[blocks.long()] = magnitudes(values[where.clamp_(max=layout.num_elements - 1)]).amax(1)


def raise_maxima(values: Tensor, maxima: Tensor, layout: Layout, indices: Tensor) -> None:
    """Makes the maxima upper bounds again after the given elements grew."""
    where = indices.long()
    maxima.scatter_reduce_(0, where // layout.block, magnitudes(values[where]), "amax")


def clear(values: Tensor, indices: Tensor) -> Tensor:
    """values[indices] = 0; returns what stood there."""
    where = indices.long()
    old = values[where]
    values[where] = 0
    return old


def put(values: Tensor, indices: Tensor, new: Tensor) -> None:
    """values[indices] = new; indices are unique."""
    values[indices.long()] = new


def add(values: Tensor, indices: Tensor, new: Tensor) -> Tensor:
    """values[indices] += new; returns what stood there. Indices are unique."""
    where = indices.long()
    old = values[where]
    values[where] = old + new
    return old


def add_sum(dense: Tensor, indices: Tensor, new: Tensor, unique: bool) -> Tensor:
    """Adds runs of equal indices to a dense tensor, each run in order.

    Args:
        dense: float32, float64, float16 or bfloat16, shape (n,), changed.
        indices: equal ones stand together.
        new: float64 if dense is, else float32, in the same order.
        unique: no index stands twice.

    Returns:
        int32, shape (1,): how many different elements held +0.0. A float32 or float64 sum that comes out
        as +0.0 is stored as -0.0; half types are rounded once, after the sum.
    """
    where = indices.long()
    heads = torch.ones_like(where, dtype=torch.bool)
    heads[1:] = where[1:] != where[:-1]
    starts = heads.nonzero().view(-1)
    slots = where[starts]
    total = dense[slots].to(new.dtype)
    raw = dense[slots].view(torch.int16 if dense.itemsize == 2 else int_type(dense.dtype))
    touches = (raw == 0).sum(dtype=torch.int32).view(1)
    lengths = torch.diff(starts, append=starts.new_tensor([where.numel()]))
    longest = 1 if unique or not where.numel() else int(lengths.max())
    for turn in range(longest):
        here = lengths > turn
        total[here] += new[starts[here] + turn]
    if dense.itemsize > 2:
        total = torch.where(total.view(int_type(total.dtype)) == 0, -total, total)
    dense[slots] = total.to(dense.dtype)
    return touches


def _candidates(
    values: Tensor, maxima: Tensor, layout: Layout, threshold: int | Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Positions (int64, ascending) and magnitude bits of what reaches the threshold in a window."""
    block = layout.block
    first, last = start // block, -(-stop // block)
    passing = first + (maxima[first:last] >= threshold).nonzero().view(-1)
    where = (passing[:, None] * block + torch.arange(block, device=values.device)).view(-1)
    where = where[(where >= start) & (where < stop)]
    keys = magnitudes(values[where])
    hits = keys >= threshold
    return where[hits], keys[hits]


def at_least(
    values: Tensor, maxima: Tensor, layout: Layout, bits: int, start: int, stop: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Positions in [start, stop) whose magnitude bits are >= bits, ascending.

    Args:
        maxima: upper bounds.
        bits: 1 or more.
        capacity: how many there is room for.

    Returns:
        How many there are (int32, shape (1,)), and the positions: only the first that many of them count,
        and if there was not room for all, none.
    """
    found, _ = _candidates(values, maxima, layout, bits, start, stop)
    count = torch.full((1,), found.numel(), dtype=torch.int32, device=values.device)
    return count, found[:capacity].to(torch.int32)


def _smallest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int
) -> tuple[int, Tensor, Tensor]:
    """Magnitude bits of the k-th largest, and positions and bits of the candidates for the k largest."""
    first, last = layout.whole_blocks(start, stop)
    floor: int | Tensor = 1
    if k <= last - first:
        floor = maxima[first:last].topk(k).values[-1].clamp_(min=1)
    where, keys = _candidates(values, maxima, layout, floor, start, stop)
    if keys.numel() < k:
        return 0, where, keys
    return int(keys.topk(k).values[-1]), where, keys


def kth(values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool) -> Tensor:
    """The k-th largest magnitude of a window, 1 <= k <= stop - start.

    Args:
        maxima: exact.
        dense: read the whole window instead of looking for candidates; always right here.

    Returns:
        int64, shape (2,): its magnitude bits, and 1 if there was no room for the candidates and the call
        must be repeated with `dense`.
    """
    smallest, _, _ = _smallest(values, maxima, layout, k, start, stop)
    return torch.tensor([smallest, 0], dtype=torch.int64, device=values.device)


def largest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
) -> tuple[Tensor, Tensor]:
    """Exactly the k largest of a window, 0 < k <= stop - start, ascending; ties go to the lowest index.

    Args:
        maxima, dense: as in `kth`.

    Returns:
        What `kth` returns, and the positions, int32, shape (k,).
    """
    smallest, where, keys = _smallest(values, maxima, layout, k, start, stop)
    if smallest == 0:
        where = torch.arange(start, stop, device=values.device)
        keys = magnitudes(values[start:stop])
    ties = keys == smallest
    larger = keys > smallest
    chosen = larger | (ties & (ties.cumsum(0) <= k - larger.sum()))
    report = torch.tensor([smallest, 0], dtype=torch.int64, device=values.device)
    return report, where[chosen].to(torch.int32)


# Elements that are worked on together, which bounds the memory for intermediates.
_TILE = 1 << 22


def count_at_least(values: Tensor, maxima: Tensor, layout: Layout, thresholds: Sequence[int]) -> Tensor:
    """How many magnitudes reach each threshold.

    Args:
        maxima: upper bounds.
        thresholds: magnitude bits, 1 or more.

    Returns:
        int64, one per threshold.
    """
    counts = torch.zeros(len(thresholds), dtype=torch.int64, device=values.device)
    for piece in values.split(_TILE):
        keys = magnitudes(piece)
        counts += torch.stack([(keys >= bits).sum() for bits in thresholds]) if thresholds else 0
    return counts


def moments(values: Tensor, bits: int) -> Tensor:
    """Number, sum, sum of squares and sum of logarithms of the magnitudes that reach a threshold.

    Args:
        bits: magnitude bits, 1 or more.

    Returns:
        float64, shape (4,).
    """
    out = torch.zeros(4, dtype=torch.float64, device=values.device)
    for piece in values.split(_TILE):
        size = piece[magnitudes(piece) >= bits].abs().double()
        number = torch.full((), size.numel(), dtype=torch.float64, device=values.device)
        out += torch.stack([number, size.sum(), size.square().sum(), size.log().sum()])
    return out
