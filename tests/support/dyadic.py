"""Gradients whose sums are exact in any order of addition."""

import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np


def dyadic(shape: Sequence[int], *key: object) -> np.ndarray:
    """float64 values that depend on the key alone: multiples of 1/256, at most 4 in magnitude.

    Sums of a few thousand of them are exact in float32, so every order of addition gives the same bits.
    Magnitudes are spread, so that a selection means something.
    """
    generator = np.random.default_rng(zlib.crc32(repr(key).encode()))
    spread = generator.standard_normal(tuple(shape)) * generator.choice([0.05, 0.2, 1.0], tuple(shape))
    return np.asarray(np.clip(np.rint(spread * 256), -1024, 1024) / 256)


def gradients_for(shapes: Mapping[str, Sequence[int]]) -> Callable[[int, int], dict[str, np.ndarray]]:
    return lambda rank, step: {name: dyadic(shape, rank, step, name) for name, shape in shapes.items()}
