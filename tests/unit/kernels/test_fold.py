"""The fold against its reference, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.kernels.host import fold as kernels
from horovod_sparse.kernels.host.scatter import native_bits
from horovod_sparse.kernels.layout import Layout, bits_dtype
from support import kernels_reference as reference
from unit.kernels.drawing import KINDS, SEEDS, SIZES, bfloat16_bits, make, spoil

HELD = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}
DTYPES = st.sampled_from(list(HELD))


def same_bits(left, right):
    """Bit for bit, but for the sign of 0 (what is not finite leaves -0 where 0 would be added)."""
    return left.dtype == right.dtype and np.array_equal(left, right)


def gradient_of(name, kind, n, seed, share):
    made = make(kind, n, seed, np.float64 if name == "float64" else np.float32)
    spoil(made, np.random.default_rng(seed), share)
    if name == "bfloat16":
        return bfloat16_bits(made)
    with np.errstate(all="ignore"):
        return made.astype(HELD[name])


def fold(values, gradient, decay, block, velocity=None, momentum=0.0, nesterov=False):
    layout = Layout(values.size, block)
    maxima = np.full(layout.num_blocks, 7, bits_dtype(values.dtype))
    factors = kernels.fold_factors(values.dtype, decay, momentum, nesterov)
    pieces = [(0, native_bits(gradient))]
    return kernels.fold(values, pieces, maxima, layout, factors, velocity), maxima


def check(values, gradient, decay, block, velocity=None, momentum=0.0, nesterov=False):
    expected = reference.fold(
        values, gradient, decay=decay, velocity=velocity, momentum=momentum, nesterov=nesterov
    )
    got, maxima = fold(values, gradient, decay, block, velocity, momentum, nesterov)
    assert same_bits(values, expected.values)
    if velocity is not None:
        assert same_bits(velocity, expected.velocity)
    assert not gradient.view(np.uint8).any()
    assert got.num_nonfinite == expected.nonfinite.size
    assert got.first_nonfinite == (expected.nonfinite[0] if expected.nonfinite.size else -1)
    np.testing.assert_allclose(got.square_norm, expected.square_norm, rtol=3e-6)
    assert same_bits(maxima.view(values.dtype), reference.block_maxima(values, block))


@given(
    name=DTYPES,
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    n=SIZES,
    seed=SEEDS,
    decay=st.sampled_from([1.0, 0.9, 0.0, 10.0, -0.5]),
    share=st.sampled_from([0.0, 0.0, 0.001, 0.3]),
    block=st.sampled_from([32, 64, 256]),
)
@settings(max_examples=150, deadline=None)
def test_plain(name, kinds, n, seed, decay, share, block):
    values = make(kinds[0], n, seed, np.float64 if name == "float64" else np.float32)
    check(values, gradient_of(name, kinds[1], n, seed ^ 1, share), decay, block)


@given(
    name=DTYPES,
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS), st.sampled_from(KINDS)),
    n=SIZES,
    seed=SEEDS,
    decay=st.sampled_from([1.0, 0.9, 0.0]),
    momentum=st.sampled_from([0.9, 0.0, 1.0]),
    nesterov=st.booleans(),
    share=st.sampled_from([0.0, 0.001, 0.3]),
    block=st.sampled_from([64, 256]),
)
@settings(max_examples=100, deadline=None)
def test_momentum(name, kinds, n, seed, decay, momentum, nesterov, share, block):
    kind = np.float64 if name == "float64" else np.float32
    values, velocity = make(kinds[0], n, seed, kind), make(kinds[2], n, seed ^ 2, kind)
    gradient = gradient_of(name, kinds[1], n, seed ^ 1, share)
    check(values, gradient, decay, block, velocity, momentum, nesterov)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 64, 65, 4096, 10_001])
def test_a_sum_is_the_sum_of_numpy_bit_for_bit(n):
    generator = np.random.default_rng(n)
    values = generator.standard_normal(n, dtype=np.float32)
    gradient = generator.standard_normal(n, dtype=np.float32)
    expected = values.copy()
    expected += gradient
    fold(values, gradient, 1.0, 64)
    assert same_bits(values, expected)


@pytest.mark.parametrize("kind", [np.float16, np.uint16])
def test_every_half_number(kind):
    bits = np.arange(2**16, dtype=np.uint16)
    check(np.zeros(2**16, np.float32), bits.view(kind).copy(), 1.0, 64)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("place", [0, 31, 32, 4095, 4096, 9_999])
def test_one_overflow_keeps_the_old_value(kind, place):
    top = np.finfo(kind).max
    values = np.ones(10_000, kind)
    values[place] = top
    gradient = np.ones(10_000, kind)
    gradient[place] = top
    got, _ = fold(values, gradient, 1.0, 64)
    assert (got.num_nonfinite, got.first_nonfinite) == (1, place)
    assert values[place] == top
    assert (np.delete(values, place) == 2).all()


@given(n=st.integers(1, 3000), offset=st.integers(0, 15), seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_any_start_in_memory(n, offset, seed):
    values = make("gaussian", n + offset, seed)[offset:]
    gradient = make("gaussian", n + offset, seed ^ 1)[offset:]
    check(values, gradient, 1.0, 64)


def test_square_norm_beyond_what_float32_squares_hold():
    for size in (1e30, 1e-30):
        values = np.zeros(5000, np.float32)
        got, _ = fold(values, np.full(5000, size, np.float32), 1.0, 64)
        np.testing.assert_allclose(got.square_norm, 5000 * size**2, rtol=1e-6)
