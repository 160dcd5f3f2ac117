"""What the buckets of a synchronizer hold back, by variable: to be saved, and to survive other buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from horovod_sparse.feedback import Progress, progress_of
from horovod_sparse.tensorflow.parts import DenseVariable, Part, SparseBucket

__all__ = ["assign", "held", "progress"]


def held(parts: Sequence[Part], num_companions: int) -> list[dict[str, np.ndarray]]:
    """Residuals, then each companion of the feedback: copies by variable, in its shape.

    Args:
        parts: of a synchronizer.
        num_companions: arrays that the feedback keeps beside the residual.

    Returns:
        1 + num_companions dicts from a variable's name to its values.
    """
    arrays: list[dict[str, np.ndarray]] = [{} for _ in range(1 + num_companions)]
    for part in parts:
        if isinstance(part, DenseVariable) and part.carried is not None:
            arrays[0][part.names[0]] = np.array(part.carried).reshape(part.shapes[0])
        elif isinstance(part, SparseBucket):
            for by_name, values in zip(arrays, part.held(), strict=True):
                for name, shape, (start, stop) in zip(part.names, part.shapes, part.places, strict=True):
                    by_name[name] = np.array(values[start:stop]).reshape(shape)
    return arrays


def progress(parts: Sequence[Part]) -> dict[str, Progress]:
    """Of the training so far, by variable."""
    return {
        name: part.bucket.progress for part in parts if isinstance(part, SparseBucket) for name in part.names
    }


def assign(
    parts: Sequence[Part],
    arrays: Sequence[Mapping[str, np.ndarray]],
    known: Mapping[str, Progress],
) -> None:
    """Puts residuals and companions into the buckets, whose sparsifiers start anew.

    A variable that stays dense takes its residual into its next gradient: nothing is lost.

    Args:
        parts: of a synchronizer.
        arrays: as made by `held`; a variable that is not named gets zeros.
        known: as made by `progress`.
    """
    for part in parts:
        if isinstance(part, DenseVariable):
            own = arrays[0].get(part.names[0]) if arrays else None
            part.carried = None if own is None else np.array(own).reshape(-1)
        elif isinstance(part, SparseBucket):
            part.restart(progress_of(part.names, known))
            filled = [np.array(values) for values in part.held()]
            for by_name, values in zip(arrays, filled, strict=False):
                for name, (start, stop) in zip(part.names, part.places, strict=True):
                    if name in by_name:
                        values[start:stop] = np.asarray(by_name[name]).reshape(-1)
            part.assign(filled)
