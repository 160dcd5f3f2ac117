"""Index codecs: golden words worked out by hand, round trips, lengths, and words nobody encoded."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from horovod_sparse.errors import ArgumentError
from horovod_sparse.wire.codecs import INDEX_CODECS, low_bits

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
LARGEST = 2**31 - 1
PACKED = ["block16", "gaps"]
ALL = sorted(INDEX_CODECS)


@st.composite
def selections(draw, most=LARGEST):
    """(n, ascending indices) with n from 1 to 2**31 - 1, from nothing to everything selected."""
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
def test_round_trip(name, selection):
    n, indices = selection
    valid, out = decode(name, encode(name, indices, n), indices.size, n)
    assert valid
    np.testing.assert_array_equal(out, indices)


def test_gaps_by_hand():
    # n = 16, three indices: (16 - 1) // 7 = 2 needs two bits, so l = 2.
    # lower two bits of 5, 6, 13: 01, 10, 01, from the lowest bit on: 01 10 01 -> 0b01_10_01
    # upper parts 1, 1, 3: bits 1 + 0, 1 + 1, 3 + 2 -> 0b100110
    # 3 * 2 + 3 + (15 >> 2) = 12 bits are one word; one more, because both parts begin with a word
    assert low_bits(3, 16) == 2
    words = encode("gaps", np.array([5, 6, 13], np.int32), 16)
    assert words.tolist() == [0b011001, 0b100110]


def test_gaps_across_a_word_by_hand():
    # n = 2**31 - 1, two indices: (2**31 - 2) // 5 = 429496729 needs 29 bits, so l = 29
    # 2**29 + 1 and 2**30 + 2**29 + 7: lower parts 1 and 7, the second from bit 29 on: 7 << 29 fills it
    # upper parts 1 and 3: bits 1 + 0 and 3 + 1
    indices = np.array([2**29 + 1, 2**30 + 2**29 + 15], np.int32)
    # 15 instead of 7 has a fourth bit, which is the lowest of the next word
    words = encode("gaps", indices, LARGEST)
    assert words.tolist() == [7 << 29 | 1, 1, 0b10010]


def test_block16_by_hand():
    # n = 70 000 is two blocks; 3 and 65 535 lie in the first, 65 536 + 9 in the second
    words = encode("block16", np.array([3, 65_535, 65_545], np.int32), 70_000)
    assert words.tolist() == [2, 1, 65_535 << 16 | 3, 9]


@quick
@given(n=st.integers(1, LARGEST), count=st.integers(1, LARGEST))
def test_low_bits_are_the_best(n, count):
    count = min(count, n)
    bits = [count * low + ((n - 1) >> low) for low in range(32)]
    assert bits[low_bits(count, n)] == min(bits)


@pytest.mark.parametrize("name", ALL)
@quick
@given(n=st.integers(1, LARGEST), count=st.integers(0, LARGEST), step=st.integers(1, 100_000))
def test_lengths_never_fall(name, n, count, step):
    """So a payload that is rounded up to a quantum has room for every count below it."""
    num_words = INDEX_CODECS[name].num_words
    assert num_words(count, n) <= num_words(count + step, n)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("indices", "position"),
    [([3, 3], 1), ([1, 5, 4, 8], 2), ([-1, 2], 0), ([2, 10], 1), ([0, 1, LARGEST], 2), ([7, -(2**31)], 1)],
)
def test_what_cannot_be_packed_is_named(name, indices, position):
    with pytest.raises(ArgumentError, match=rf"{indices[position]}\b.*position {position}\).*{name}.*int32"):
        encode(name, np.array(indices, np.int32), 10)


@pytest.mark.parametrize("name", ALL)
@quick
@given(data=st.data(), n=st.one_of(st.integers(1, 200), st.integers(1, 2**22)), count=st.integers(0, 60))
def test_arbitrary_words_are_refused_or_valid(name, data, n, count):
    """Never out of bounds, never outside [0, n)."""
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
