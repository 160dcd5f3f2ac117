"""Gradients for tests: of every dtype, of several shapes of distribution, and with exact sums."""

from typing import Any

import numpy as np

from support.reference import widen

DTYPES = ("float32", "float16", "bfloat16", "float64")


def as_gradient(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as a fresh gradient of a dtype; bfloat16 as its bits in uint16, rounded to even."""
    if dtype != "bfloat16":
        return np.array(values, dtype)
    bits = np.array(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # rounding must not turn a NaN into something else
    rounded = np.where(np.isnan(values), 0x7FC0, np.where(np.isinf(values), bits >> 16, rounded))
    return rounded.astype(np.uint16)


def wide(gradient: np.ndarray) -> np.ndarray:
    """A gradient of any dtype as float64, exactly."""
    return widen(gradient, np.dtype(np.float64))


def dyadic(generator: np.random.Generator, shape: Any) -> np.ndarray:
    """Multiples of 1/64 in [-1, 1]: sums of up to 2**16 of them are exact in float32, each is in bfloat16."""
    return generator.integers(-64, 65, shape) / 64.0


def gaussian(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return generator.standard_normal(shape)


def laplace(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return generator.laplace(size=shape)


def layered(generator: np.random.Generator, shape: Any) -> np.ndarray:
    """Gaussian, in 12 layers whose scales spread over two decades, as the layers of a network do."""
    num_elements = shape[-1]
    scales = 10.0 ** np.linspace(-1.0, 1.0, 12)[[7, 2, 10, 0, 5, 11, 3, 8, 1, 6, 9, 4]]
    layer = np.minimum(np.arange(num_elements) * 12 // max(num_elements, 1), 11)
    return generator.standard_normal(shape) * scales[layer]
