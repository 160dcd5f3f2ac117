"""Every element into a few bits, and back into a sum over ranks.

Kernels first, sixteen elements at once, then what calls them. What arrives is read word by word, whatever
stands in it: every code is a number.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels import lanes as v
from horovod_sparse.kernels import quantization as c
from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.host.fold import maximum
from horovod_sparse.kernels.quantization import NORMS, WORD, Quantization

Array = NDArray[Any]


@kernel
def _sums_of(values, start, stop, squares):  # type: ignore[no-untyped-def]
    """Sum of magnitudes, or of squares, of [start, stop) in float64."""
    whole = start + (stop - start) // v.LANES * v.LANES
    total = 0.0
    if whole > start:
        summed = v.zeros_like(c.doubled(v.load(values, start)))
        if squares:
            for i in range(start, whole, v.LANES):
                wide = c.doubled(v.load(values, i))
                summed = v.add(summed, v.multiply(wide, wide))
        else:
            for i in range(start, whole, v.LANES):
                summed = v.add(summed, c.doubled(c.unsigned(v.load(values, i))))
        total = v.sum_of(summed)
    for i in range(whole, stop):
        number = np.float64(values[i])
        total += number * number if squares else abs(number)
    return total


@kernel
def _top_of(values, start, stop):  # type: ignore[no-untyped-def]
    """The largest magnitude of [start, stop), which is not empty, as float64."""
    top = v.as_key(v.magnitude(values[start]), maximum(values, start, stop))
    return np.float64(c.bits_as_float(top, values[start]))


@kernel
def norm_of(values, start, stop, norm):  # type: ignore[no-untyped-def]
    """Norm 0 (mean of magnitudes), 1 (the largest) or 2 (L2) of [start, stop), with 24 significant bits."""
    if norm == 1:
        return _top_of(values, start, stop)
    count = stop - start
    found = _sums_of(values, start, stop, norm == 2)
    found = math.sqrt(found) if norm == 2 else found / count
    if not math.isfinite(found) or found == 0.0:  # of numbers near the ends of what float64 holds
        top = _top_of(values, start, stop)
        found = 0.0
        if top > 0.0:
            for i in range(start, stop):
                part = abs(np.float64(values[i])) / top
                found += part * part if norm == 2 else part / count
            found = top * math.sqrt(found) if norm == 2 else top * found
    return c.coarse(found) if 1e-300 < found < math.inf else found


@kernel
def encode_signs(values, group, norm, largest, units, words):  # type: ignore[no-untyped-def]
    """Units, and one word of signs for every 32 elements."""
    n = values.size
    left = 0.0
    for number in range(units.size):
        start = number * group
        stop = min(start + group, n)
        units[number] = min(norm_of(values, start, stop, norm), largest)
        unit = np.float64(units[number])
        whole = start + (stop - start) // WORD * WORD
        for i in range(start, whole, WORD):
            bits = c.signs(v.load(values, i)) | c.signs(v.load(values, i + v.LANES)) << np.uint64(v.LANES)
            words[i // WORD] = np.uint32(bits)
        if whole < stop:
            rest = np.uint32(0)
            for i in range(whole, stop):
                if values[i] < 0:
                    rest |= np.uint32(1) << np.uint32(i - whole)
            words[whole // WORD] = rest
        if norm == 0:  # sum of (|x| - unit)^2, less that of x^2, which the fold knows
            left -= (stop - start) * unit * unit
        else:
            left += unit * ((stop - start) * unit - 2.0 * _sums_of(values, start, stop, False))
    return left


@kernel
def _encode_word(values, i, inverse, levels, planes, low, high, position, words, at):  # type: ignore[no-untyped-def]
    """Codes of the 32 elements from i on, at words[at]; returns the squares lost, in units, by lane."""
    a, b = v.load(values, i), v.load(values, i + v.LANES)
    sizes_a, sizes_b = v.multiply(c.unsigned(a), inverse), v.multiply(c.unsigned(b), inverse)
    drawn_a, drawn_b = c.drawn(a, position, low, high), c.drawn(b, position + v.LANES, low, high)
    codes_a = c.floored(v.add(sizes_a, drawn_a), levels)
    codes_b = c.floored(v.add(sizes_b, drawn_b), levels)
    words[at] = np.uint32(c.signs(a) | c.signs(b) << np.uint64(v.LANES))
    for plane in range(planes - 1):
        bits = c.plane(codes_a, plane) | c.plane(codes_b, plane) << np.uint64(v.LANES)
        words[at + 1 + plane] = np.uint32(bits)
    lost_a, lost_b = c.minus(sizes_a, c.floats_of(codes_a, a)), c.minus(sizes_b, c.floats_of(codes_b, b))
    return v.add(v.multiply(lost_a, lost_a), v.multiply(lost_b, lost_b))


@kernel
def encode_levels(values, group, norm, largest, levels, planes, low, high, units, words, scratch):  # type: ignore[no-untyped-def]
    """Units, and `planes` words for every 32 elements: a sign, and whole units, rounded at random."""
    n = values.size
    left = 0.0
    for number in range(units.size):
        start = number * group
        stop = min(start + group, n)
        units[number] = min(norm_of(values, start, stop, norm) / levels, largest)
        one = units[number] / units[number] if units[number] > 0 else units[number]
        inverse = one / units[number] if units[number] > 0 else units[number]
        if not math.isfinite(inverse):  # so small that its inverse is no number: all of it stays
            units[number] = 0.0
            inverse = units[number]
        factor = v.splat(inverse)
        lost = v.zeros_like(factor)
        whole = start + (stop - start) // WORD * WORD
        for i in range(start, whole, WORD):
            at = i // WORD * planes
            lost = v.add(lost, _encode_word(values, i, factor, levels, planes, low, high, i, words, at))
        if whole < stop:
            for j in range(WORD):
                scratch[j] = values[whole + j] if whole + j < stop else 0.0
            at = whole // WORD * planes
            lost = v.add(lost, _encode_word(scratch, 0, factor, levels, planes, low, high, whole, words, at))
        unit = np.float64(units[number])
        left += unit * unit * v.sum_of(lost)
        if unit == 0.0:
            left += _sums_of(values, start, stop, True)
    return left


@kernel
def _decoded(words, at, stride, size, half, planes, units, unit, num_units, like):  # type: ignore[no-untyped-def]
    """The sum over ranks of sixteen elements, half 0 or 1 of the 32 whose words begin at words[at]."""
    total = v.zeros_like(like)
    shift = np.uint64(half * v.LANES)
    if planes == 1:
        for rank in range(size):
            plus = v.splat(units[rank * num_units + unit])
            bits = np.uint64(words[at + rank * stride]) >> shift
            total = v.add(total, c.chosen(bits, c.minus(v.zeros_like(plus), plus), plus))
        return total
    for rank in range(size):
        here = at + rank * stride
        number = v.zeros_like(like)
        weight = c.ones(like)
        for plane in range(1, planes):
            bits = np.uint64(words[here + plane]) >> shift
            number = v.add(number, c.chosen(bits, weight, v.zeros_like(weight)))
            weight = v.add(weight, weight)
        number = v.multiply(number, v.splat(units[rank * num_units + unit]))
        bits = np.uint64(words[here]) >> shift
        total = v.add(total, c.chosen(bits, c.minus(v.zeros_like(number), number), number))
    return total


@kernel
def decode(words, first, stride, size, planes, group, units, base, subtract, out, scratch):  # type: ignore[no-untyped-def]
    """out = the sum over ranks of what their codes stand for; or base less that. Ranks in their order."""
    n = out.size
    num_units = units.size // size
    for unit in range(num_units):
        start = unit * group
        stop = min(start + group, n)
        whole = start + (stop - start) // WORD * WORD
        for i in range(start, whole, WORD):
            at = first + i // WORD * planes
            like = v.splat(units[0])
            for half in range(2):
                j = i + half * v.LANES
                total = _decoded(words, at, stride, size, half, planes, units, unit, num_units, like)
                if subtract:
                    total = c.minus(v.load(base, j), total)
                v.store(out, j, total)
        if whole < stop:
            at = first + whole // WORD * planes
            like = v.splat(units[0])
            for half in range(2):
                total = _decoded(words, at, stride, size, half, planes, units, unit, num_units, like)
                v.store(scratch, half * v.LANES, total)
            for i in range(whole, stop):
                out[i] = base[i] - scratch[i - whole] if subtract else scratch[i - whole]


def encode(values: Array, code: Quantization, key: int, words: NDArray[np.int32], squares: float) -> float:
    """Writes the words of all values."""
    n, norm = values.size, NORMS.index(code.norm)
    group, at = code.length_of_group(n), code.unit_words(n, values.dtype)
    units, codes = np.empty(code.num_units(n), values.dtype), words[at:].view(np.uint32)
    largest = float(np.finfo(values.dtype).max)
    if code.levels:
        halves = key & 0xFFFFFFFF, key >> 32
        scratch = np.empty(WORD, values.dtype)
        left = encode_levels(
            *(values, group, norm, largest, code.levels, code.planes, *halves), units, codes, scratch
        )
    else:
        left = squares + encode_signs(values, group, norm, largest, units, codes)
    words[:at] = units.view(np.int32)
    # what float64 cannot hold is told as its largest number
    return float(min(max(left, 0.0), np.finfo(np.float64).max)) if left == left else 0.0


def decode_sum(
    messages: NDArray[np.int32], size: int, header: int, code: Quantization, out: Array
) -> NDArray[Any]:
    """The sum over ranks of the values that their words stand for, in the order of the ranks."""
    length, at = messages.size // size, code.unit_words(out.size, out.dtype)
    units = np.ascontiguousarray(messages.reshape(size, length)[:, header : header + at]).view(out.dtype)
    scratch = np.empty(WORD, out.dtype)
    group, words = code.length_of_group(out.size), messages.view(np.uint32)
    decode(words, header + at, length, size, code.planes, group, units.reshape(-1), out, False, out, scratch)
    return units


def take_away(base: Array, words: NDArray[np.int32], code: Quantization, out: Array) -> None:
    """out = base less what one message's words stand for."""
    at = code.unit_words(out.size, out.dtype)
    units, codes = words[:at].view(out.dtype), words.view(np.uint32)
    scratch, group = np.empty(WORD, out.dtype), code.length_of_group(out.size)
    decode(codes, at, 0, 1, code.planes, group, units.copy(), base, True, out, scratch)
