"""Every primitive in plain PyTorch, on any device: the reference of the Triton kernels, and their stand-in.

All tensors of a call are on one device. `values` is float32 or float64 of shape (n,), `maxima` holds
magnitude bits (int32 or int64) of blocks of `layout.block` elements, `indices` are int32. Magnitude bits, the
bits without the sign, order like the magnitudes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.kernels.quantization import COUNTER, WORD, Quantization, as_int32, random_bits, windows


def device_block_size(density: float) -> int:
    """Returns the number of elements per block on an accelerator, for a density.

    About k blocks pass and are read again, so 1/8 of the blocks should pass: one read in 32 bytes of traffic.
    Larger blocks than 1024 would save nothing any more, smaller ones than 32 are not one transaction.
    """
    block = 1024
    while block > 32 and block * density > 0.125 + 0.01:
        block //= 2
    return block


def int_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the signed integer dtype as wide as float32 or float64."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def num_magnitude_bits(dtype: torch.dtype) -> int:
    """Returns the number of bits without the sign: 31 or 63."""
    return 63 if dtype == torch.float64 else 31


def infinity_bits(dtype: torch.dtype) -> int:
    """Returns the magnitude bits of infinity; those of finite numbers are smaller, of NaN larger."""
    return 0x7FF0000000000000 if dtype == torch.float64 else 0x7F800000


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Returns the values' bits without the sign: as integers they order like magnitudes, NaN on top."""
    kind = int_type(values.dtype)
    return values.view(kind) & torch.iinfo(kind).max


# Elements that are worked on together, which bounds the memory for intermediates; blocks divide it.
_TILE = 1 << 22


def _is_finite(values: Tensor) -> Tensor:
    return magnitudes(values) < infinity_bits(values.dtype)


def fold(
    values: Tensor,
    gradient: Tensor,
    maxima: Tensor,
    layout: Layout,
    factors: Tensor,
    square_norm: Tensor,
    companion: Tensor | None = None,
    moment: bool = False,
    plain: bool = False,
) -> Tensor:
    """Folds a gradient into values (by velocity or moment), and updates block maxima.

    `plain` says that decay is 1. Returns float64 [4]: how many elements were not finite and counted as 0, the
    position of the first (n or more if there is none), sum of squares of the new values, and that of decay *
    the old.
    """
    n, block = layout.num_elements, layout.block
    count = torch.zeros((), dtype=torch.int64, device=values.device)
    first = torch.full((), n, dtype=torch.int64, device=values.device)
    square = torch.zeros((), dtype=torch.float64, device=values.device)
    decay, lasting, *others = factors.unbind()
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        old, step = values[start:stop], gradient[start:stop].to(values.dtype)
        kept = old if plain else old * decay
        wrong = torch.zeros_like(old, dtype=torch.bool)
        if companion is not None and moment:
            before = companion[start:stop]
            after = lasting * before + others[0] * (step * step)
            wrong = ~_is_finite(after)
            companion[start:stop] = torch.where(wrong, before, after)
            step = torch.where(wrong, 0.0, others[1] * step / (_square_roots(after + others[3]) + others[2]))
        elif companion is not None:
            wrong = ~_is_finite(step)
            step = torch.where(wrong, 0.0, step)
            coasting = lasting * companion[start:stop]
            speed = coasting + step
            fine = _is_finite(speed)
            wrong |= ~fine
            speed = torch.where(fine, speed, coasting)
            companion[start:stop] = speed
            step = others[0] * step + others[1] * speed
        new = kept + step
        fine = _is_finite(new)
        wrong |= ~fine
        new = torch.where(fine, new, torch.where(_is_finite(kept), kept, old))
        square += new.double().square().sum()
        count += wrong.sum()
        # argmax of booleans finds the first one that is true; without one it says 0.
        here = start + wrong.to(torch.uint8).argmax()
        first = torch.minimum(first, torch.where(wrong.any(), here, n))
        values[start:stop] = new
        maxima[start // block : -(-stop // block)] = _block_maxima(new, block)
    carried = decay.double() ** 2 * square_norm[0]
    return torch.stack([count.double(), first.double(), square, carried])


def _square_roots(values: Tensor) -> Tensor:
    """Returns correctly rounded square roots; PyTorch's on the CPU may differ in the last bit."""
    if values.device.type != "cpu":
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(values.numpy()))


def _block_maxima(values: Tensor, block: int) -> Tensor:
    keys = magnitudes(values)
    missing = -keys.numel() % block
    return torch.nn.functional.pad(keys, (0, missing)).view(-1, block).amax(1)


def scan_maxima(values: Tensor, maxima: Tensor, layout: Layout) -> None:
    """Computes the maxima of all blocks."""
    block = layout.block
    for start in range(0, layout.num_elements, _TILE):
        stop = min(start + _TILE, layout.num_elements)
        maxima[start // block : -(-stop // block)] = _block_maxima(values[start:stop], block)


def refresh_maxima(values: Tensor, maxima: Tensor, layout: Layout, indices: Tensor) -> None:
    """Recomputes the maxima of the blocks that contain the given indices."""
    blocks = torch.unique(indices // layout.block)
    where = blocks[:, None].long() * layout.block + torch.arange(layout.block, device=values.device)
    # The last block may end early; its last element again changes no maximum.
    maxima[blocks.long()] = magnitudes(values[where.clamp_(max=layout.num_elements - 1)]).amax(1)


def zero(values: Tensor, indices: Tensor) -> None:
    values[indices.long()] = 0


def put(values: Tensor, indices: Tensor, new: Tensor) -> None:
    """values[indices] = new; indices are unique."""
    values[indices.long()] = new


def add(values: Tensor, indices: Tensor, new: Tensor) -> None:
    """values[indices] += new; indices are unique."""
    where = indices.long()
    values[where] = values[where] + new


def add_sum(dense: Tensor, indices: Tensor, new: Tensor, unique: bool) -> Tensor:
    """Adds values at repeated indices to `dense`; returns how many different indices there are."""
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
    """Returns indices and magnitude bits of a window's elements that reach the threshold."""
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
    """Returns how many magnitude bits in [start, stop) are >= `bits` (int32 [1]), and their indices.

    With more than `capacity` the indices are incomplete.
    """
    found, _ = _candidates(values, maxima, layout, bits, start, stop)
    count = torch.full((1,), found.numel(), dtype=torch.int32, device=values.device)
    return count, found[:capacity].to(torch.int32)


def _kth_bits(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int
) -> tuple[int, Tensor, Tensor]:
    """Returns the k-th largest's magnitude bits, with indices and bits of all candidates."""
    first, last = layout.whole_blocks(start, stop)
    floor: int | Tensor = 1
    if k <= last - first:
        floor = maxima[first:last].topk(k).values[-1].clamp_(min=1)
    where, keys = _candidates(values, maxima, layout, floor, start, stop)
    if keys.numel() < k:
        return 0, where, keys
    return int(keys.topk(k).values[-1]), where, keys


def kth(values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool) -> Tensor:
    """Returns int64 [2]: magnitude bits of the k-th largest in [start, stop), and 1 if memory was short.

    If it was, call again with `dense`.
    """
    smallest, _, _ = _kth_bits(values, maxima, layout, k, start, stop)
    return torch.tensor([smallest, 0], dtype=torch.int64, device=values.device)


def largest(
    values: Tensor, maxima: Tensor, layout: Layout, k: int, start: int, stop: int, dense: bool
) -> tuple[Tensor, Tensor]:
    """Returns `kth`'s bits, and the indices of a window's k largest, ascending; of equal ones the lowest."""
    smallest, where, keys = _kth_bits(values, maxima, layout, k, start, stop)
    if smallest == 0:
        where = torch.arange(start, stop, device=values.device)
        keys = magnitudes(values[start:stop])
    ties = keys == smallest
    larger = keys > smallest
    chosen = larger | (ties & (ties.cumsum(0) <= k - larger.sum()))
    report = torch.tensor([smallest, 0], dtype=torch.int64, device=values.device)
    return report, where[chosen].to(torch.int32)


def largest_of_each(values: Tensor, chunk: int, quotas: Tensor) -> Tensor:
    """Returns indices of each chunk's largest elements, as many as its quota; of equal ones the lowest."""
    found, rows = [], max(1, _TILE // chunk)
    places = torch.arange(min(chunk, values.numel()), device=values.device)
    for first in range(0, quotas.numel(), rows):
        keys = magnitudes(values[first * chunk : (first + rows) * chunk])
        padded = torch.nn.functional.pad(keys, (0, -keys.numel() % places.numel()), value=-1)
        order = padded.view(-1, places.numel()).sort(dim=1, descending=True, stable=True).indices
        chosen = torch.zeros_like(order, dtype=torch.bool)
        chosen.scatter_(1, order, places < quotas[first : first + rows, None])
        found.append(chosen.view(-1).nonzero().view(-1) + first * chunk)
    return torch.cat(found).to(torch.int32)


#: elements per chunk, which bounds the memory for intermediates
_QUANTIZED = 1 << 20


def _norms(values: Tensor, code: Quantization) -> Tensor:
    """Returns each group's largest or mean magnitude in float64, as `kernels.quantization` does."""
    n, length = values.numel(), code.length_of_group(values.numel())
    if length >= n:
        rows, counts = values.view(1, -1), torch.tensor([[max(1, n)]], device=values.device)
    else:
        rows = torch.nn.functional.pad(values, (0, -n % length)).view(-1, length)
        counts = torch.full((rows.shape[0], 1), length, device=values.device)
        counts[-1] = n - (rows.shape[0] - 1) * length
    tops = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True).double()
    if code.levels:
        return tops.view(-1)
    found = torch.linalg.vector_norm(rows, 1, dim=1, keepdim=True, dtype=torch.float64) / counts
    # numbers near the ends of what float64 holds: by the largest
    bad = ((~torch.isfinite(found) | (found == 0)) & (tops > 0)).view(-1).nonzero().view(-1)
    if bad.numel():
        parts = rows[bad].double() / tops[bad]
        found[bad] = tops[bad] * torch.linalg.vector_norm(parts, 1, dim=1, keepdim=True) / counts[bad]
    found = found.contiguous()
    bits = (found.view(torch.int64) + (1 << 28)) & -(1 << 29)
    coarse = bits.view(torch.float64)
    return torch.where((found > 1e-300) & torch.isfinite(found), coarse, found).view(-1)


def encode(values: Tensor, code: Quantization, key: int) -> tuple[Tensor, Tensor]:
    """Returns the encoding (units and codes) of all values, and the rounding errors.

    As `kernels.quantization.encode`, bit for bit.
    """
    n, length, device = values.numel(), code.length_of_group(values.numel()), values.device
    units = (_norms(values, code) / max(1, code.levels)).clamp_(max=torch.finfo(values.dtype).max)
    units = units.to(values.dtype)
    inverse = 1 / units
    if code.levels:
        units, inverse = (torch.where(torch.isfinite(inverse), one, 0.0) for one in (units, inverse))
    rest, codes = torch.empty_like(values), [units.view(torch.int32)]
    places = torch.arange(WORD, device=device)
    for start, stop in windows(n, length, _QUANTIZED):
        part, positions = values[start:stop], torch.arange(start, stop, dtype=torch.int32, device=device)
        group = positions // length
        below, sent = part < 0, units[group]
        planes = [below]
        if code.levels:
            bits = random_bits(positions * as_int32(COUNTER) + as_int32(key), key).to(values.dtype)
            numbers = (part.abs() * inverse[group] + bits * 2.0**-24).int().clamp_(max=code.levels)
            planes += [(numbers >> place & 1).bool() for place in range(code.code_bits - 1)]
            sent = numbers.to(values.dtype) * sent
        rest[start:stop] = part - torch.where(below, -sent, sent)
        full = torch.stack([torch.nn.functional.pad(plane, (0, -part.numel() % WORD)) for plane in planes], 1)
        words = (full.view(-1, WORD, code.code_bits).long() << places[:, None]).sum(1)
        codes.append(words.to(torch.int32).view(-1))  # int64 wraps: the low 32 bits
    return torch.cat(codes), rest
