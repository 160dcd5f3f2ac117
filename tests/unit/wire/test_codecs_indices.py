"""Codecs of indices and values: words worked out by hand, round trips, lengths, and words nobody encoded."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_sparse.errors import ArgumentError
from horovod_sparse.wire import WireFormat
from horovod_sparse.wire.codecs import INDEX_CODECS, VALUE_CODECS, low_bits

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
LARGEST = 2**31 - 1
ALL = sorted(INDEX_CODECS)


@st.composite
def selections(draw, most=LARGEST):
    n = draw(
        st.one_of(st.integers(1, 300), st.integers(1, most), st.sampled_from([65536, 65537, 2**17, most]))
    )
    kind = draw(st.sampled_from(["few", "low", "high", "run", "all"]))
    if kind == "all":
        assume(n <= 70_000)
        return n, np.arange(n, dtype=np.int32)
    width = min(n, 5000)
    if kind == "run":
        start = draw(st.integers(0, n - width))
        return n, np.arange(start, start + draw(st.integers(0, width)), dtype=np.int32)
    low = {"few": 0, "low": 0, "high": n - width}[kind]
    high = {"few": n, "low": width, "high": n}[kind]
    chosen = draw(st.sets(st.integers(low, high - 1), max_size=150))
    return n, np.array(sorted(chosen), np.int32)


def encode(name, indices, n):
    words = np.full(INDEX_CODECS[name].num_words(indices.size, n), 0xDEADBEEF, np.uint32)
    INDEX_CODECS[name].encode(indices, n, words)
    return words


def decode(name, words, count, n):
    """(whether it is valid, indices), in the middle of other memory, which must not be touched or matter."""
    answers = []
    for filler in (0, 0xFFFFFFFF):
        memory = np.full(words.size + 8, filler, np.uint32)
        memory[4 : 4 + words.size] = words
        out = np.full(count + 8, 77, np.int32)
        valid = INDEX_CODECS[name].decode(memory[4 : 4 + words.size], n, out[4 : 4 + count])
        assert (out[:4] == 77).all()
        assert (out[4 + count :] == 77).all()
        answers.append((valid, out[4 : 4 + count]))
    (valid, out), (again, same) = answers
    assert valid == again
    if valid:
        np.testing.assert_array_equal(out, same)
    return valid, out


@pytest.mark.parametrize("name", ALL)
@quick
@given(selection=selections())
def test_indices_are_decoded_as_they_were_encoded(name, selection):
    n, indices = selection
    valid, out = decode(name, encode(name, indices, n), indices.size, n)
    assert valid
    np.testing.assert_array_equal(out, indices)


@pytest.mark.parametrize("name", ALL)
@quick
@given(n=st.integers(1, LARGEST), count=st.integers(0, LARGEST), step=st.integers(1, 100_000))
def test_lengths_never_fall(name, n, count, step):
    num_words = INDEX_CODECS[name].num_words
    assert num_words(count, n) <= num_words(count + step, n)


@pytest.mark.parametrize(
    ("indices", "position"),
    [([3, 3], 1), ([1, 5, 4, 8], 2), ([-1, 2], 0), ([2, 10], 1), ([0, 1, LARGEST], 2), ([7, -(2**31)], 1)],
)
def test_indices_that_do_not_ascend_within_the_bucket_are_named(indices, position):
    with pytest.raises(ArgumentError, match=rf"{indices[position]}\b.*position {position}\).*gaps.*int32"):
        encode("gaps", np.array(indices, np.int32), 10)


@pytest.mark.parametrize("name", ALL)
@quick
@given(data=st.data(), n=st.one_of(st.integers(1, 200), st.integers(1, 2**22)), count=st.integers(0, 60))
def test_arbitrary_words_are_refused_or_valid(name, data, n, count):
    size = INDEX_CODECS[name].num_words(count, n)
    some = st.sampled_from([0, 1, 3, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE])
    drawn = data.draw(st.lists(some | st.integers(0, 2**32 - 1), min_size=size, max_size=size))
    valid, out = decode(name, np.array(drawn, np.uint32), count, n)
    if valid and count:
        assert 0 <= out.min() <= out.max() < n
        assert name == "int32" or (np.diff(out.astype(np.int64)) > 0).all()


@pytest.mark.parametrize("name", ALL)
def test_an_index_at_n_is_refused(name):
    """Written for n + 1 elements, read for n, where both have the same length and layout."""
    words = encode(name, np.array([1, 43], np.int32), 44)
    assert words.size == INDEX_CODECS[name].num_words(2, 43)
    assert low_bits(2, 44) == low_bits(2, 43)
    assert decode(name, words, 2, 44)[0]
    assert not decode(name, words, 2, 43)[0]


DTYPES = ["float32", "float64"]
FLOAT32 = np.finfo(np.float32)
SPECIAL = [0.0, 1.0, 1e-45, 1e-40, 2.9e-8, 2.0**-25, 3 * 2.0**-25, 6e-8, 6.1e-5, 65504.0, 65519.99, 65520.0]
SPECIAL += [1e30, float(FLOAT32.max), float(FLOAT32.tiny)]
SPECIAL += [-value for value in SPECIAL]


def arrays(dtype, **limits):
    width = np.dtype(dtype).itemsize * 8
    special = [value for value in SPECIAL if abs(value) <= limits.get("max_value", math.inf)]
    numbers = st.floats(width=width, allow_nan=False, allow_infinity=False, **limits)
    return hnp.arrays(dtype, st.integers(0, 200), elements=numbers | st.sampled_from(special))


@pytest.mark.parametrize("name", sorted(VALUE_CODECS))
@pytest.mark.parametrize("dtype", DTYPES)
@quick
@given(data=st.data())
def test_what_is_decoded_is_finite_and_as_promised(name, dtype, data):
    values = data.draw(arrays(dtype))
    rounded = WireFormat(name).round(values)
    assert rounded.dtype == values.dtype
    assert np.isfinite(rounded).all()
    codec = VALUE_CODECS[name]
    words = np.full(codec.num_words(values.size) + 1, 0xDEADBEEF, np.uint32)
    codec.encode(values, words[1:])  # at an odd word: eight bytes are not aligned there
    out = np.empty_like(values)
    codec.decode(words[1:], out)
    assert words[0] == 0xDEADBEEF
    assert out.tobytes() == rounded.tobytes()


def test_float16_of_every_float32_near_every_float16():
    """All 63 488 finite ones: themselves, halfway to the next, and one float32 to each side of that."""
    bits = np.arange(0x10000, dtype=np.uint16).view(np.float16)
    finite = np.sort(bits[np.isfinite(bits)].astype(np.float32))
    halfway = (finite[:-1] + finite[1:]) / 2
    near = [finite, halfway, np.nextafter(halfway, np.inf), np.nextafter(halfway, -np.inf)]
    values = np.concatenate(near).astype(np.float32)
    expected = values.astype(np.float16).astype(np.float32)
    assert WireFormat("float16").round(values).tobytes() == expected.tobytes()


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_bfloat16_of_every_float32_near_every_bfloat16(sign):
    """Below the halfway point the lower one, above it the upper one, upon it the even one."""
    lower = np.arange(0x7F7F, dtype=np.uint32)
    for offset, expected in ((0x7FFF, lower), (0x8000, lower + lower % 2), (0x8001, lower + 1)):
        values = ((lower | sign) << 16 | offset).view(np.float32)
        np.testing.assert_array_equal(
            WireFormat("bfloat16").round(values).view(np.uint32) >> 16, expected | sign
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("float16", 65504.0),
        ("bfloat16", (2 - 2.0**-7) * 2.0**127),
        ("2bit", (2 - 2.0**-7) * 2.0**127),
        ("float32", float(FLOAT32.max)),
    ],
)
def test_huge_values_saturate(name, largest, dtype):
    huge = float(np.finfo(dtype).max)
    rounded = WireFormat(name).round(np.array([huge, -huge, 1.0], dtype))
    assert rounded[0] == -rounded[1]
    assert rounded[0] == min(largest, huge)
    assert rounded[2] == 1.0
    if name not in ("float32", "2bit"):
        # the fold takes out what is not finite; should it come here, the message stays finite
        rounded = WireFormat(name).round(np.array([np.nan, np.inf, -np.inf, -np.nan, 2.0], dtype))
        assert np.isfinite(rounded).all() and rounded[0] == rounded[3] == 0
        assert rounded[1] == -rounded[2] > 1e4


def four_bins(values):
    """As the program of SparseLoCo rounds: to the means of four bins, 1.5 standard deviations wide each."""
    centred = values - values.mean()
    bins = np.clip(np.rint(centred / (1.5 * centred.std(ddof=1)) + 2), 0, 3)
    means = [centred[bins == one].mean() if (bins == one).any() else 0.0 for one in range(4)]
    return np.choose(bins.astype(int), means) + values.mean()


def test_2bit_loses_less_than_four_bins_for_a_whole_tensor():
    random, told = np.random.default_rng(0), {}
    drawn = {"normal": random.standard_normal((100, 4096)), "t": random.standard_t(3, (100, 4096))}
    for name, numbers in drawn.items():
        where = np.sort(np.argpartition(np.abs(numbers), -64)[:, -64:])
        kept = np.take_along_axis(numbers, where, 1).astype(np.float32).reshape(-1)
        rounded = {"2bit": WireFormat("2bit").round(kept), "four bins": four_bins(kept)}
        lost = {way: np.square(kept - one).sum() / np.square(kept).sum() for way, one in rounded.items()}
        told[name] = {way: round(float(share), 4) for way, share in lost.items()}
    committed = Path(__file__).parents[3] / "docs" / "measurements" / "two_bits.json"
    assert told == json.loads(committed.read_text())["lost"]


@pytest.mark.parametrize("dtype", DTYPES)
@quick
@given(data=st.data())
def test_2bit_loses_less_than_there_is_and_nothing_the_second_time(dtype, data):
    """So error feedback contracts; and a rank that writes what it has rounded sends what it keeps."""
    values = data.draw(arrays(dtype, min_value=-1e9, max_value=1e9))
    rounded = WireFormat("2bit").round(values)
    assert WireFormat("2bit").round(rounded).tobytes() == rounded.tobytes()
    for start in range(0, values.size, 64):
        block, seen = (one[start : start + 64].astype(np.float64) for one in (values, rounded))
        squares = np.square(block).sum()
        assert np.square(block - seen).sum() <= squares * (1 - 1 / 64 + 2.0**-16) + 1e-70
        assert np.unique(np.abs(seen)).size <= 2
