"""Columns of text for the terminal."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Align columns: numbers to the right, words to the left.

    >>> print(table(["host", "bytes"], [["a", 10], ["bc", 7]]))
    host  bytes
    a        10
    bc        7
    """
    cells = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row] for row in rows]
    numeric = [bool(rows) and isinstance(rows[0][column], (int, float)) for column in range(len(header))]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join(line(row) for row in [list(header), *cells])
