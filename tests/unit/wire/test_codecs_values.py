"""Value codecs: nearest, finite, the same at both ends, with what is lost known exactly."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from horovod_sparse.wire import WireFormat
from horovod_sparse.wire.codecs import VALUE_CODECS

quick = settings(max_examples=50, deadline=None, derandomize=True, database=None)
LOSSY = ["float32", "float16", "bfloat16", "int8"]
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


@pytest.mark.parametrize("name", LOSSY)
@quick
@given(data=st.data())
def test_nothing_is_lost(name, data):
    """rounded + (values - rounded) is values, exactly: the residual gets all of the difference."""
    values = data.draw(arrays("float32", min_value=-65504, max_value=65504))
    rounded = WireFormat(name).round(values)
    back = values - rounded
    for value, sent, kept in zip(values.tolist(), rounded.tolist(), back.tolist(), strict=True):
        assert Fraction(sent) + Fraction(kept) == Fraction(value)


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


def test_int8_by_hand():
    # the largest is 127 / 4, so the scale is 1 / 4; 2.5 and 3.5 steps go to the even neighbours 2 and 4
    values = np.array([31.75, -31.75, 0.625, 0.875, -0.625, 0.1], np.float32)
    words = np.zeros(VALUE_CODECS["int8"].num_words(6), np.uint32)
    VALUE_CODECS["int8"].encode(values, words)
    assert words.size == 1 + 2
    assert words[:1].view(np.float32)[0] == 0.25
    assert words[1:].view(np.int8).tolist() == [127, -127, 2, 4, -2, 0, 0, 0]
    assert WireFormat("int8").round(values).tolist() == [31.75, -31.75, 0.5, 1.0, -0.5, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("float16", 65504.0),
        ("bfloat16", (2 - 2.0**-7) * 2.0**127),
        ("int8", None),
        ("2bit", (2 - 2.0**-7) * 2.0**127),
        ("float32", float(FLOAT32.max)),
    ],
)
def test_huge_values_saturate(name, largest, dtype):
    huge = float(np.finfo(dtype).max)
    rounded = WireFormat(name).round(np.array([huge, -huge, 1.0], dtype))
    assert rounded[0] == -rounded[1]
    if largest is not None:
        assert rounded[0] == min(largest, huge)
        assert rounded[2] == 1.0
    else:
        assert float(FLOAT32.max) * 0.999 < rounded[0] <= float(FLOAT32.max)


def test_2bit_by_hand():
    # block one: 32 times 1, 31 times -3, and -9; mean (32 + 93 + 9) / 64 = 2.09; 1 and 102 / 32 = 3.1875
    # block two: 5 and -0.5, mean 2.75; and 0, which counts as positive: mean 1.8333; small 0.25, large 5
    values = np.array([1.0] * 32 + [-3.0] * 31 + [-9.0] + [5.0, -0.5, 0.0], np.float32)
    words = np.zeros(VALUE_CODECS["2bit"].num_words(67), np.uint32)
    VALUE_CODECS["2bit"].encode(values, words)
    assert words.size == 2 + 3 + 3
    small, large = np.array([1.0, 3.1875], np.float32).view(np.uint32) >> 16
    assert [hex(word) for word in words] == [
        hex(small | large << 16),
        hex(0x3E80 | 0x40A0 << 16),  # 0.25 and 5
        *("0x0", "0xffffffff", "0x2"),
        *("0x0", "0xffffffff", "0x1"),
    ]
    assert WireFormat("2bit").round(values).tolist() == [1.0] * 32 + [-3.1875] * 32 + [5.0, -0.25, 0.25]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
def test_what_is_not_finite_never_leaves(name, dtype):
    """The fold takes such elements out; should one come here, the message stays finite."""
    rounded = WireFormat(name).round(np.array([np.nan, np.inf, -np.inf, -np.nan, 2.0], dtype))
    assert np.isfinite(rounded).all()
    assert rounded[0] == rounded[3] == 0
    assert rounded[1] == -rounded[2] > 1e4
