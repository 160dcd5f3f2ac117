"""Names of collectives: from what is the same on all ranks, not from what else a process has made.

A rank may make optimizers, tapes and models for itself alone. Counting them where they are made would give
the next ones of this rank other names than the other ranks' have, and all would wait for ever. So a name
is taken where something is communicated first, which all ranks do; it tells shapes and types, and a number
where there are several of the same.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from horovod_sparse.collectives import Synchronization
from horovod_sparse.frontend.lines import shared_lines
from horovod_sparse.merging import ParameterFacts

__all__ = ["common_names", "next_label"]

_taken: Counter[tuple[str, str]] = Counter()


def next_label(prefix: str, model: Iterable[tuple[Sequence[int], str]]) -> str:
    """A name for collectives that no other one of this process has, and others of the same model do not get.

    Names of parameters are not in it: Keras counts layers, so a second model of a process has other ones.

    Args:
        prefix: of the name: what it is for, and for which process set.
        model: shape and dtype of every parameter, in any order.

    Example:
        >>> first, second = (next_label("example", [((3, 2), "float32")]) for _ in range(2))
        >>> second == f"{first}.1"
        True
    """
    described = repr(sorted((tuple(shape), dtype) for shape, dtype in model))
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    number = _taken[prefix, digest]
    _taken[prefix, digest] += 1
    return f"{prefix}.{digest}" + (f".{number}" if number else "")


def common_names(
    label: str, parameters: Sequence[ParameterFacts]
) -> Synchronization[tuple[str, dict[str, str]]]:
    """The first rank's label, and its names of parameters where they only differ by name.

    Names of buckets, and with them the random numbers of their sparsifiers, come from names of parameters.

    Args:
        label: from `next_label`.
        parameters: of this rank.

    Returns:
        The label, and by this rank's names those that all ranks use: the first rank's where elements and
        dtypes agree in their order, this rank's own otherwise.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> ranks = [common_names(f"{i}", [ParameterFacts(f"dense_{i}", 3)]) for i in (1, 0)]
        >>> run_lockstep(ranks)[1]
        ('1', {'dense_0': 'dense_1'})
    """
    own = [(item.name, item.num_elements, item.dtype) for item in parameters]
    everyone = yield from shared_lines([label, own])
    common_label, first = everyone[0]
    names = [name for name, *_ in own]
    theirs = [name for name, *_ in first]
    alike = [list(item[1:]) for item in own] == [item[1:] for item in first]
    chosen = theirs if alike and set(theirs) != set(names) else names
    return common_label, dict(zip(names, chosen, strict=True))
