"""Adding, cutting and splitting sparse vectors, against the obvious way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.arrays import FoldReport
from horovod_sparse.errors import MessageError
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.sparsifiers.rounds.pairs import Mail
from horovod_sparse.sparsifiers.rounds.sparse_vectors import (
    SparseVector,
    added,
    cut,
    empty,
    joined,
    missing_in,
    shared_out,
    split_largest,
)
from horovod_sparse.wire import WireFormat
from support.sampling import rows_by

_N = 30


@st.composite
def vectors(draw: st.DrawFn, dtype: type) -> SparseVector:
    indices = sorted(draw(st.sets(st.integers(0, _N - 1), max_size=_N)))
    # few different magnitudes: many ties, and sums that cancel
    values = [draw(st.integers(-3, 3)) for _ in indices]
    return SparseVector(np.array(indices, np.int32), np.array(values, dtype))


def dense(vector: SparseVector) -> np.ndarray:
    out = np.zeros(_N)
    out[vector.indices] = vector.values
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(deadline=None)
@given(data=st.data())
def test_any_two_vectors(dtype: type, data: st.DataObject) -> None:
    first, second = data.draw(vectors(dtype)), data.draw(vectors(dtype))
    total = added(first, second)
    assert total.indices.tolist() == sorted({*first.indices.tolist(), *second.indices.tolist()})
    assert total.indices.dtype == np.int32 and total.values.dtype == dtype
    np.testing.assert_array_equal(dense(total), dense(first) + dense(second))
    assert added(second, first).values.tobytes() == total.values.tobytes()

    k = data.draw(st.integers(0, _N))
    kept, dropped = split_largest(total, k)
    order = np.argsort(-np.abs(total.values), kind="stable")[:k]
    assert kept.indices.tolist() == np.sort(total.indices[order]).tolist()
    np.testing.assert_array_equal(dense(kept) + dense(dropped), dense(total))
    assert len(kept) + len(dropped) == len(total)

    start, stop = sorted((data.draw(st.integers(0, _N)), data.draw(st.integers(0, _N))))
    parts = [cut(total, 0, start), cut(total, start, stop), cut(total, stop, _N)]
    assert parts[1].indices.tolist() == [i for i in total.indices.tolist() if start <= i < stop]
    assert joined(parts, np.dtype(dtype)).values.tolist() == total.values.tolist()

    expected = ~np.isin(first.indices, second.indices)
    assert missing_in(first.indices, second.indices).tolist() == expected.tolist()


@rows_by("num_parts,dtype", [1, 2, 3, 5, 7, 8, 14, 16], ["float32", "float64"])
def test_shares_add_up_exactly(num_parts: int, dtype: str) -> None:
    generator = np.random.default_rng(num_parts)
    values = (generator.standard_normal(5000) * 10.0 ** generator.integers(-20, 20, 5000)).astype(dtype)
    parts = [shared_out(values.copy(), num_parts, part) for part in range(num_parts)]
    total = np.sum(parts, axis=0, dtype=np.longdouble)
    assert (total == values).all()
    for part in parts:
        np.testing.assert_allclose(part, values / num_parts, rtol=0.01)


def test_notes_meet() -> None:
    nothing = empty(np.dtype(np.float32))
    mails = [
        Mail(
            FoldReport(first_nonfinite=rank - 1, carried_square_norm=4.0**rank),
            BucketInfo("b", 9, rank, 3),
            WireFormat(),
        )
        for rank in range(3)
    ]
    mails[0].read(mails[2].write(nothing, [2]), [2])
    assert mails[0].sum_of(nothing, 0).first_nonfinite == {2: 1}
    mails[0].read(mails[1].write(nothing, [1]), [1])
    sum_ = mails[0].sum_of(nothing, 0)
    assert sum_.first_nonfinite == {1: 0, 2: 1}
    assert sum_.norms is not None and sum_.norms.tolist() == [1.0, 2.0, 4.0]
    with pytest.raises(MessageError, match="notes of 2 ranks"):
        mails[0].read(np.zeros(3, np.int32), [0, 1])
