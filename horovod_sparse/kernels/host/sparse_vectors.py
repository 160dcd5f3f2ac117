"""Sparse vectors, as ascending indices with a value each: merged, split and looked up."""

from horovod_sparse.kernels.compile import kernel
from horovod_sparse.kernels.lanes import magnitude


@kernel
def merge_add(first, first_values, second, second_values, indices, values):  # type: ignore[no-untyped-def]
    """Adds two sparse vectors by index.

    No branch depends on the data but the end: which side an index comes from is a coin toss.
    """
    a, b = first.size, second.size
    i, j, count = 0, 0, 0
    while i < a and j < b:
        left, right = first[i], second[j]
        from_first, from_second = left <= right, right <= left
        indices[count] = left if from_first else right
        one = first_values[i] if from_first else first_values.dtype.type(0)
        other = second_values[j] if from_second else second_values.dtype.type(0)
        # adding 0 to a lone value changes nothing, but -0.0, which is as good
        values[count] = one + other
        i += from_first
        j += from_second
        count += 1
    while i < a:
        indices[count], values[count] = first[i], first_values[i]
        i += 1
        count += 1
    while j < b:
        indices[count], values[count] = second[j], second_values[j]
        j += 1
        count += 1
    return count


@kernel
def keys_of(values, keys):  # type: ignore[no-untyped-def]
    """Magnitude bits of values, as integers that order like the magnitudes."""
    for i in range(values.size):
        keys[i] = magnitude(values[i])


@kernel
def split_at(indices, values, keys, smallest, ties, kept, kept_values, rest, rest_values):  # type: ignore[no-untyped-def]
    """Splits a sparse vector at a magnitude; of those equal to it the first `ties` are kept."""
    num_kept, num_rest = 0, 0
    for i in range(indices.size):
        key = keys[i]
        tie = key == smallest
        keep = (key > smallest) | (tie & (ties > 0))
        ties -= tie
        kept[num_kept], kept_values[num_kept] = indices[i], values[i]
        rest[num_rest], rest_values[num_rest] = indices[i], values[i]
        num_kept += keep
        num_rest += not keep


@kernel
def absent(indices, others, out):  # type: ignore[no-untyped-def]
    """out[i] = whether indices[i] is not among the others; both ascending."""
    j, m = 0, others.size
    for i in range(indices.size):
        index = indices[i]
        while j < m and others[j] < index:
            j += 1
        out[i] = j == m or others[j] != index
