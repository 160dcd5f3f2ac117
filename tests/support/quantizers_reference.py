"""SignSGD and QSGD as their papers write them, in plain NumPy, and how their messages are laid out."""

import math

import numpy as np

from horovod_sparse.kernels.quantization import COUNTER, FIRST, SECOND, Quantization


def random_bits(start: int, stop: int, key: int) -> np.ndarray:
    """24 random bits for every position, uint32, as the kernels draw them; `COUNTER` says how."""
    words = np.arange(start, stop, dtype=np.uint32)
    words *= np.uint32(COUNTER)
    words += np.uint32(key & 0xFFFFFFFF)
    words ^= words >> np.uint32(16)
    words *= np.uint32(FIRST)
    words ^= np.uint32(key >> 32)
    words ^= words >> np.uint32(15)
    words *= np.uint32(SECOND)
    drawn: np.ndarray = words >> np.uint32(8)
    return drawn


def groups(num_elements: int, length: int) -> list[slice]:
    """Elements that share a unit; a length of 0 is all of them."""
    length = length or max(1, num_elements)
    return [slice(start, min(start + length, num_elements)) for start in range(0, num_elements, length)]


def of_24_bits(number: float) -> float:
    """The nearest number with 24 significant bits, halves away from 0."""
    if not 1e-300 < number < math.inf:
        return number
    fraction, exponent = math.frexp(number)
    return math.ldexp(math.floor(fraction * 2**24 + 0.5), exponent - 24)


def norm_of(values: np.ndarray, kind: str) -> float:
    """Of one group, in float64: by its largest magnitude, so that no square is too large or too small."""
    magnitudes = np.abs(values.astype(np.float64))
    top = float(magnitudes.max())
    if kind == "max" or top == 0.0:
        return top
    if top > 1e100 or top < 1e-100:
        parts = magnitudes / top
        found = top * float(parts.mean() if kind == "mean" else np.sqrt(np.square(parts).sum()))
    else:
        found = float(magnitudes.mean() if kind == "mean" else np.sqrt(np.square(magnitudes).sum()))
    return of_24_bits(found)


def quantized(
    values: np.ndarray, code: Quantization, key: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Units by group; and of every element whether it is below 0, and how many units it has.

    EF-SignSGD, Algorithm 1: ``||p||_1 / d sign(p)``. QSGD, Section 3.1: with ``|p_i| / ||p||`` between l / s
    and (l + 1) / s it is (l + 1) / s with the probability that makes the expectation right, else l / s.
    """
    kind = values.dtype.type
    units, levels = np.zeros(code.num_units(values.size), kind), np.ones(values.size, np.int64)
    uniform = (random_bits(0, values.size, key) / 2**24).astype(kind)
    for number, group in enumerate(groups(values.size, code.group)):
        unit = norm_of(values[group], code.norm) / max(1, code.levels)
        units[number] = min(unit, float(np.finfo(kind).max))
        if not code.levels:
            continue
        with np.errstate(divide="ignore", over="ignore"):
            inverse = kind(1) / units[number]
        if not np.isfinite(inverse):
            units[number] = inverse = kind(0)
        lower = np.floor(np.abs(values[group]) * inverse + uniform[group])
        levels[group] = np.minimum(lower, code.levels)
    return units, values < 0, levels


def decoded(units: np.ndarray, below: np.ndarray, levels: np.ndarray, code: Quantization) -> np.ndarray:
    sent = np.empty(below.size, units.dtype)
    for number, group in enumerate(groups(below.size, code.group)):
        sent[group] = levels[group].astype(units.dtype) * units[number]
    return np.where(below, -sent, sent)


def packed(units: np.ndarray, below: np.ndarray, levels: np.ndarray, code: Quantization) -> np.ndarray:
    """int32: units, then for every 32 elements a word of signs, and one for each bit of the levels."""
    planes = [below] + [levels >> bit & 1 for bit in range(code.planes - 1)]
    padded = [np.pad(np.asarray(plane, np.uint8), (0, -below.size % 32)) for plane in planes]
    words = [np.packbits(plane, bitorder="little").view("<u4") for plane in padded]
    return np.concatenate([units.view(np.int32), np.stack(words, 1).reshape(-1).view(np.int32)])
