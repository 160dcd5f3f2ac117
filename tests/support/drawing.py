"""Arrays for property tests: hypothesis draws the shape, the kind and the seed, NumPy the numbers."""

import numpy as np
from hypothesis import strategies as st

SIZES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([1023, 1024, 4095, 4096, 4097, 8191, 8225, 10_000]),
    st.integers(200, 9000),
)
SEEDS = st.integers(0, 2**32 - 1)


def _kinds(generator, n):
    normal = generator.standard_normal(n)
    return {
        "gaussian": normal,
        "laplace": generator.laplace(size=n),
        "ties": np.round(normal * 2),
        "few ties": np.round(normal * 40) / 7,
        "zeros": np.zeros(n),
        "negative zeros": np.copysign(np.zeros(n), normal),
        "equal": np.full(n, -1.5),
        "equal size": np.copysign(1.5, normal),
        "sparse": np.where(generator.random(n) < 0.02, normal, 0.0),
        "one": np.where(np.arange(n) == n // 2, 3.0, 0.0),
        "subnormal": normal * 1e-40,
        "wide": normal * np.exp(generator.uniform(-60, 60, n)),
        "huge": np.where(generator.random(n) < 0.1, np.copysign(3e38, normal), normal),
        "layers": normal * np.repeat(np.exp(generator.normal(0, 3, n // 97 + 1)), 97)[:n],
        "rising": np.arange(n) + 1.0,
        "falling": -(n - np.arange(n) + 0.0),
        "cluster": np.where((np.arange(n) % 2048) < 300, 50 + normal, normal),
    }


KINDS = tuple(_kinds(np.random.default_rng(0), 1))


def make(kind, n, seed, dtype=np.float32):
    with np.errstate(all="ignore"):
        return _kinds(np.random.default_rng(seed), n)[kind].astype(dtype)


def spoil(gradient, generator, share):
    places = generator.random(gradient.size) < share
    gradient[places] = generator.choice(np.array([np.nan, np.inf, -np.inf], gradient.dtype), places.sum())
    return gradient
