"""Messages in every format: P of them one behind the other, and what is not one of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.arrays import FoldReport
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.wire import WireFormat, pack, unpack_sum
from support.sampling import rows_by

quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)
VALUES = ["exact", "float64", "float32", "float16", "bfloat16", "2bit"]
INDICES = ["int32", "gaps"]
FORMATS = [WireFormat(values, indices) for values, indices in itertools.product(VALUES, INDICES)]
NAMES = [f"{item.values}-{item.indices}" for item in FORMATS]
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS, ids=NAMES)
DTYPES = [None, np.float32, np.float64]


def selection(rng, n, count, dtype):
    indices = np.sort(rng.choice(n, count, replace=False)).astype(np.int32)
    values = (
        None if dtype is None else (rng.standard_normal(count) * 10.0 ** rng.integers(-6, 4)).astype(dtype)
    )
    return indices, values


def packed(format, n, dtype, counts, seed=0):
    rng = np.random.default_rng(seed)
    selections = [selection(rng, n, count, dtype) for count in counts]
    messages = []
    for rank, (indices, values) in enumerate(selections):
        report = FoldReport(
            first_nonfinite=min(rank, n) - 1, carried_square_norm=rank**2.0, step=5 + rank, projection=-rank
        )
        messages.append(pack(indices, values, report, format=format, num_elements=n))
    return messages, selections


@EVERY_FORMAT
@quick
@given(
    n=st.sampled_from([1, 9, 1000, 65_537, 300_000]),
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=9),
    capacity=st.sampled_from([0, 7, 64, 1000]),
    dtype=st.sampled_from(DTYPES),
)
def test_messages_are_unpacked_as_they_were_packed(format, n, counts, capacity, dtype):
    format = WireFormat(format.values, format.indices, capacity)
    counts = [min(count, n) for count in counts]
    messages, selections = packed(format, n, dtype, counts)
    for message, count in zip(messages, counts, strict=True):
        assert message.dtype == np.int32
        assert message.nbytes == format.message_bytes(count, n, dtype)
        assert message.size == format.message_words(max(count, capacity), n, dtype)

    gathered = unpack_sum(np.concatenate(messages), len(counts), format, n, dtype)
    np.testing.assert_array_equal(gathered.indices, np.concatenate([indices for indices, _ in selections]))
    assert gathered.indices.dtype == np.int32
    if dtype is None:
        assert gathered.values is None
    else:
        rounded = np.concatenate([format.round(values) for _, values in selections])
        assert gathered.values.dtype == dtype
        assert gathered.values.tobytes() == rounded.tobytes()
    assert gathered.counts.tolist() == counts
    notes, ranks = gathered.notes, range(len(counts))
    assert notes.first_nonfinite == {rank: min(rank, n) - 1 for rank in ranks if rank}
    assert notes.norms is not None and notes.norms.tolist() == list(ranks)
    assert notes.steps.tolist() == [5 + rank for rank in ranks]
    assert notes.projections.tolist() == [-rank for rank in ranks]


def test_the_words_of_a_message_are_those_worked_out_by_hand():
    # float16 and gaps, n = 16: minus the length, count, health 0, norm 2, step 35, projection -1.5, tag, then
    # two words of 5, 6 and 13, then 1.0 = 0x3C00 and -2.0 = 0xC000 in a word, 0.5 = 0x3800.
    # Gaps: (16 - 1) // 7 = 2 needs two bits, so l = 2: lower bits 01, 10, 01 from the lowest on, then upper
    # parts 1, 1, 3 as bits 1 + 0, 1 + 1, 3 + 2.
    # The tag: 1 + 3 for float16 + 8 for gaps = 12, and n = 16 above the lowest byte.
    message = pack(
        np.array([5, 6, 13], np.int32),
        np.array([1.0, -2.0, 0.5], np.float32),
        FoldReport(carried_square_norm=4.0, step=35, projection=-1.5),
        format=WireFormat("float16", "gaps"),
        num_elements=16,
    )
    assert message.view(np.uint32).tolist() == [
        2**32 - 11, 3, 0, 0x40000000, 35, 0xBFC00000, 16 << 8 | 12, 0b011001, 0b100110, 0xC0003C00, 0x3800,
    ]  # fmt: skip
    # 2bit, l = 1: lower bits 1, 0, 1, 1, upper parts 2, 3, 6, 7; magnitudes 2 (0x4000) and 10 (0x4120) as
    # bfloat16, signs, and which of the two: 10 alone is above the mean
    indices, values = np.array([5, 6, 13, 15], np.int32), np.array([1, -2, 3, -10], np.float32)
    message = pack(indices, values, FoldReport(), WireFormat("2bit", "gaps"), 16)
    assert message.view(np.uint32)[7:].tolist() == [0b1101, 0b10100010100, 0x41204000, 0b1010, 0b1000]


@rows_by("format,dtype", FORMATS, DTYPES, ids=lambda item: f"{item.values}-{item.indices}")
def test_another_format_is_refused(format, dtype):
    n = 5000
    [message], _ = packed(format, n, dtype, [40])

    def written(item):
        codec = None if dtype is None else item.value_codec(dtype)
        return item.indices, None if codec is None else codec.code

    for other in FORMATS:
        if written(other) == written(format):
            assert unpack_sum(message, 1, other, n, dtype).counts.tolist() == [40]
        else:
            with pytest.raises(MessageError):
                unpack_sum(message, 1, other, n, dtype)


@EVERY_FORMAT
@quick
@given(data=st.data())
def test_a_damaged_header_is_refused(format, data):
    n, dtype = 4000, np.float32
    messages, _ = packed(format, n, dtype, [30, 0, 500])
    rank = data.draw(st.integers(0, 2))
    field = data.draw(st.sampled_from([0, 1] + ([] if format.is_plain(dtype) else [6])))
    extremes = [0, 1, -1, 2**31 - 1, -(2**31)]
    wrong = data.draw(st.sampled_from(extremes) | st.integers(-(2**31), 2**31 - 1) | st.integers(-600, 600))
    buffer = np.concatenate(messages)
    at = sum(message.size for message in messages[:rank]) + field
    if wrong == buffer[at]:
        return
    buffer[at] = wrong
    with pytest.raises(MessageError):
        unpack_sum(buffer, 3, format, n, dtype)


@EVERY_FORMAT
def test_a_health_mark_outside_the_bucket_is_refused(format):
    [message], _ = packed(format, 400, np.float32, [30])
    for mark in (-1, 402):  # 401: the rank refuses the step
        message[2] = mark
        with pytest.raises(MessageError, match="claims"):
            unpack_sum(message, 1, format, 400, np.float32)


def test_selections_that_cannot_be_packed_are_refused():
    indices, values, report = np.array([5, 2], np.int32), np.ones(2, np.float32), FoldReport()
    with pytest.raises(ArgumentError, match="ascending"):
        pack(indices, values, report, format=WireFormat(indices="gaps"), num_elements=9)
    with pytest.raises(ArgumentError, match="as many values as indices"):
        pack(indices, np.ones(3, np.float32), report, WireFormat(), 9)
    with pytest.raises(ArgumentError, match="float32 or float64"):
        pack(indices, np.ones(2, np.float16), report, WireFormat(), 9)
    unsorted = pack(indices, values, report, format=WireFormat(values="2bit"), num_elements=9)
    assert unpack_sum(unsorted, 1, WireFormat(values="2bit"), 9, np.float32).indices.tolist() == [5, 2]
