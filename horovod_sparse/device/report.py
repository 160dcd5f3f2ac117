"""A fold's report that is read from the device when somebody asks for it."""

from __future__ import annotations

from horovod_sparse.arrays.protocol import FoldReport
from horovod_sparse.device.transfer import PendingCopy

__all__ = ["PendingReport"]


class PendingReport(FoldReport):
    """What `FoldReport` says, without waiting for the device until it is read.

    The next step of every sparsifier reads something from the device anyway, so that the fold need
    not make the host wait for it.

    Args:
        copy: of what the fold kernel returns (see `plain.fold`).
    """

    def __init__(self, copy: PendingCopy) -> None:
        object.__setattr__(self, "_copy", copy)

    def _ready(self) -> FoldReport:
        copy = self.__dict__["_copy"]
        if isinstance(copy, PendingCopy):
            count, first, square, carried = (float(number) for number in copy.arrays()[0])
            copy = FoldReport(int(count), int(first) if count else -1, square, carried)
            self.__dict__["_copy"] = copy
        report: FoldReport = copy
        return report

    @property
    def num_nonfinite(self) -> int:
        """See `FoldReport`."""
        return self._ready().num_nonfinite

    @property
    def first_nonfinite(self) -> int:
        """See `FoldReport`."""
        return self._ready().first_nonfinite

    @property
    def square_norm(self) -> float:
        """See `FoldReport`."""
        return self._ready().square_norm

    @property
    def carried_square_norm(self) -> float:
        """See `FoldReport`."""
        return self._ready().carried_square_norm

    def __eq__(self, other: object) -> bool:
        return self._ready() == (other._ready() if isinstance(other, PendingReport) else other)

    def __hash__(self) -> int:
        return hash(self._ready())

    def __repr__(self) -> str:
        return repr(self._ready())

    def __reduce__(self) -> tuple[type[FoldReport], tuple[int, int, float, float]]:
        report = self._ready()
        return FoldReport, (
            report.num_nonfinite,
            report.first_nonfinite,
            report.square_norm,
            report.carried_square_norm,
        )
