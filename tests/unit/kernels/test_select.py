"""Thresholds, exact ranks and exact top-k against their reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.errors import ArgumentError
from horovod_sparse.kernels.host import select
from horovod_sparse.kernels.host.kth import kth_of, sample
from horovod_sparse.kernels.layout import Layout, bits_dtype
from support import kernels_reference as reference
from unit.kernels.drawing import FLOATS, KINDS, SEEDS, arrays, make, windows

BLOCKS = st.sampled_from([32, 64, 256])


def maxima_of(values, block):
    return reference.block_maxima(values, block).view(bits_dtype(values.dtype))


@pytest.fixture(params=["blocks", "sample", "digits"], scope="module")
def way(request):
    """Each of the three ways to an exact rank, for all sizes and ranks."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "blocks":
            patch.setattr(select, "_fits_buffer", lambda *_: False)
        if request.param == "digits":
            patch.setattr(select, "between", lambda *_: (0, -1))
        yield request.param


def ranks(n, data):
    return data.draw(
        st.sampled_from(sorted({0, 1, 2, n // 1000 + 1, n // 60, n // 3, n - 1, n, n + 3} - {-1}))
    )


@given(values=arrays(), block=BLOCKS, data=st.data())
@settings(max_examples=120, deadline=None)
def test_largest(way, values, block, data):
    start, stop = data.draw(windows(values.size))
    k = ranks(stop - start, data)
    got = select.largest(values, maxima_of(values, block), Layout(values.size, block), k, start, stop)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, reference.largest(values, k, start, stop))


@given(values=arrays(), block=BLOCKS, data=st.data())
@settings(max_examples=120, deadline=None)
def test_kth_magnitude(way, values, block, data):
    start, stop = data.draw(windows(values.size))
    k = ranks(stop - start, data)
    layout, maxima = Layout(values.size, block), maxima_of(values, block)
    if not 1 <= k <= stop - start:
        with pytest.raises(ArgumentError, match="k="):
            select.kth_magnitude(values, maxima, layout, k, start, stop)
        return
    got = select.kth_magnitude(values, maxima, layout, k, start, stop)
    assert got == reference.kth_magnitude(values, k, start, stop)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_many_ranks(way, kind):
    n = 3001
    for dtype, block, (start, stop) in [
        (np.float32, 64, (0, n)),
        (np.float32, 32, (17, n - 33)),
        (np.float64, 64, (0, n)),
    ]:
        values = make(kind, n, 1, dtype)
        layout, maxima = Layout(n, block), maxima_of(values, block)
        order = np.argsort(-np.abs(values[start:stop]), kind="stable") + start
        for k in range(1, stop - start, 37):
            got = select.largest(values, maxima, layout, k, start, stop)
            np.testing.assert_array_equal(got, np.sort(order[:k]))
            assert select.kth_magnitude(values, maxima, layout, k, start, stop) == abs(values[order[k - 1]])


@given(values=arrays(), block=BLOCKS, data=st.data(), slack=st.booleans())
@settings(max_examples=150, deadline=None)
def test_at_least(values, block, data, slack):
    start, stop = data.draw(windows(values.size))
    sizes = np.abs(values).astype(np.float64)
    threshold = data.draw(
        st.sampled_from(
            [
                0.0,
                -1.0,
                1e-50,
                0.1,
                0.5,
                1.5,
                3.0,
                float("inf"),
                *sizes[:3],
                *(sizes[:3] * (1 + 1e-9)),
                *(sizes[:3] * (1 - 1e-9)),
            ]
        )
    )
    maxima = maxima_of(values, block)
    if slack:  # upper bounds are enough
        maxima = maxima + maxima.dtype.type(1000)
    got = select.at_least(values, maxima, Layout(values.size, block), threshold, start, stop)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, reference.at_least(values, threshold, start, stop))


@pytest.mark.parametrize("block", [32, 64, 256])
def test_many_hits_fill_many_buffers(block):
    values = make("gaussian", 100_003, 5)
    got = select.at_least(values, maxima_of(values, block), Layout(values.size, block), 0.01)
    np.testing.assert_array_equal(got, reference.at_least(values, 0.01, 0, values.size))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 300, 3000, 20_000, 100_000])
def test_top_k_of_torch(kind, k, dtype):
    torch = pytest.importorskip("torch")
    values = make(kind, 200_003, 11, dtype)
    got = select.largest(values, maxima_of(values, 64), Layout(values.size, 64), k)
    expected = torch.topk(torch.from_numpy(values).abs(), k, sorted=True).values.numpy()
    assert np.unique(got).size == k
    assert (np.diff(got) > 0).all()
    np.testing.assert_array_equal(np.sort(np.abs(values[got]))[::-1], expected)


@given(bits=st.sampled_from([31, 63]), n=st.integers(1, 3000), seed=SEEDS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_kth_of_integers(bits, n, seed, data):
    generator = np.random.default_rng(seed)
    high = 2 ** data.draw(st.integers(1, bits)) - 1
    keys = generator.integers(0, high, n, dtype=np.uint64, endpoint=True).astype(
        np.uint32 if bits == 31 else np.uint64
    )
    before = keys.copy()
    k = data.draw(st.integers(1, n))
    kth, larger = kth_of(keys, k, bits)
    assert kth == np.sort(keys)[-k]
    assert larger == (keys > kth).sum()
    np.testing.assert_array_equal(keys, before)


@given(values=arrays(kinds=("gaussian", "layers", "ties", "wide")), m=st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_a_sample_takes_one_of_each_stretch(values, m):
    if values.size < m:
        return
    keys = np.zeros(m, bits_dtype(values.dtype))
    sample(values, 0, values.size, keys)
    stretch = values.size // m
    sizes = np.abs(values[: stretch * m]).reshape(m, stretch)
    assert (sizes == keys.view(values.dtype)[:, None]).any(axis=1).all()


def test_a_threshold_between_two_float32():
    values, layout = np.array([1.0, 2.0, 2.0000002], np.float32), Layout(3)
    for threshold, expected in ((2.0, [1, 2]), (2.0 + 1e-9, [2]), (2.0000003, []), (1.0 - 1e-12, [0, 1, 2])):
        assert select.at_least(values, maxima_of(values, 64), layout, threshold).tolist() == expected


def test_windows_and_arguments_are_checked():
    values, layout = np.ones(100, np.float32), Layout(100)
    maxima = maxima_of(values, 64)
    for start, stop in [(-1, 5), (5, 4), (0, 101)]:
        with pytest.raises(ArgumentError, match="start, stop"):
            select.largest(values, maxima, layout, 1, start, stop)
    with pytest.raises(ArgumentError, match="num_selected"):
        select.largest(values, maxima, layout, -1)
    with pytest.raises(ArgumentError, match="threshold"):
        select.at_least(values, maxima, layout, float("nan"))
    with pytest.raises(ArgumentError, match="block"):
        Layout(100, 48)
    with pytest.raises(ArgumentError, match="num_elements"):
        Layout(2**31)
