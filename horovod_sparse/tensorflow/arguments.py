"""What tapes and optimizers refuse alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError, UnsupportedError
from horovod_sparse.tensorflow._horovod import hvd

__all__ = ["checked_groups", "checked_layers", "refuse_sparse_arguments"]


def checked_groups(op: Any, gradient_predivide_factor: float, num_groups: int, groups: Any) -> Any:
    """Refuses what tapes and optimizers refuse alike; gives `groups`, by whichever name it came.

    Raises:
        ArgumentError: for an argument that is not allowed.
        UnsupportedError: for Adasum.
    """
    if op == hvd.Adasum:
        raise UnsupportedError(
            "op=Adasum cannot be combined with a sparsifier: it combines whole updates, and a residual has "
            "no place in that. Use op=Average or op=Sum, or compression=Compression.none"
        )
    if op not in (hvd.Average, hvd.Sum):
        raise ArgumentError("op", op, "Average or Sum")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ArgumentError("gradient_predivide_factor", gradient_predivide_factor, "1.0, or op=Average")
    if groups is None and num_groups:
        groups = num_groups
    if groups is not None and not isinstance(groups, list):
        check_count("groups", groups, "a number of 1 or more, or lists of variables")
    return groups


def refuse_sparse_arguments(compression: Any, **arguments: Any) -> None:
    """Refuses arguments that a dense reduction has no use for.

    Args:
        compression: that is no sparsifier.
        **arguments: those that go with a sparsifier only; None where they were left out.

    Raises:
        ArgumentError: if one was given.
    """
    if given := [name for name, value in arguments.items() if value is not None]:
        raise ArgumentError("compression", compression, f"a sparsifier, which {' and '.join(given)} is for")


def checked_layers(local_layers: Any) -> list[Any]:
    """The layers in an argument `local_layers`.

    Args:
        local_layers: a layer, several, or None.

    Raises:
        ArgumentError: if something is no layer.
    """
    several: Iterable[Any] = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    layers = [layer for layer in several if layer is not None]
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise ArgumentError("local_layers", local_layers, "layers")
    return layers
