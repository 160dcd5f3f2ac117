"""What the buckets of an optimizer hold back, by parameter: to be saved, and to survive other buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from horovod_sparse.feedback import Progress, progress_of
from horovod_sparse.pytorch.layout import shaped, unshaped
from horovod_sparse.torch.parts import DenseParameter, Part, SparseBucket

__all__ = ["assign", "held"]


def held(parts: Sequence[Part], num_companions: int) -> list[dict[str, torch.Tensor]]:
    """Residuals, then each companion of the feedback: copies by parameter, contiguous and in its shape.

    Args:
        parts: of an optimizer.
        num_companions: arrays that the feedback keeps beside the residual.

    Returns:
        1 + num_companions dicts from a parameter's name to its elements.
    """
    arrays: list[dict[str, torch.Tensor]] = [{} for _ in range(1 + num_companions)]
    for part in parts:
        gradient = part.gradient
        if isinstance(part, DenseParameter) and part.carried is not None:
            arrays[0][part.names[0]] = shaped(part.carried, gradient.layouts[0])
        elif isinstance(part, SparseBucket):
            for by_name, values in zip(arrays, part.held(), strict=True):
                for name, span, layout in zip(part.names, gradient.places, gradient.layouts, strict=True):
                    by_name[name] = shaped(values[slice(*span)], layout)
    return arrays


def assign(
    parts: Sequence[Part],
    arrays: Sequence[Mapping[str, torch.Tensor]],
    progress: Mapping[str, Progress],
) -> None:
    """Puts residuals and companions into the buckets, whose sparsifiers start anew.

    A parameter that stays dense takes its residual into its next gradient: nothing is lost.

    Args:
        parts: of an optimizer.
        arrays: as made by `held`; a parameter that is not named gets zeros.
        progress: of the training so far, by parameter.
    """
    for part in parts:
        gradient = part.gradient
        if isinstance(part, DenseParameter):
            values = arrays[0].get(part.names[0]) if arrays else None
            part.carried = None if values is None else unshaped(values, gradient.layouts[0])
        elif isinstance(part, SparseBucket):
            part.restart(progress_of(part.names, progress))
            filled = [np.array(values) for values in part.held()]
            for by_name, into in zip(arrays, filled, strict=False):
                for name, span, layout in zip(part.names, gradient.places, gradient.layouts, strict=True):
                    if name in by_name:
                        into[slice(*span)] = unshaped(by_name[name], layout)
            part.assign(filled)
