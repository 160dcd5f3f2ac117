"""Contiguous parts of a range."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Window", "equal_part"]

#: (start, stop), in elements
Window: TypeAlias = tuple[int, int]


def equal_part(num_elements: int, num_parts: int, part: int) -> Window:
    """Bounds of one of nearly equal parts; the remainder goes to the first parts, one each.

    Args:
        num_elements: n.
        num_parts: P.
        part: in [0, P).

    Returns:
        (start, stop).

    Example:
        >>> [equal_part(10, 4, part) for part in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    length, remainder = divmod(num_elements, num_parts)
    start = part * length + min(part, remainder)
    return start, start + length + (part < remainder)
