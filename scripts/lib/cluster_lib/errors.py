"""The one error that scripts/cluster shows to its user."""


class ClusterError(Exception):
    """What went wrong, in one line, and what to do about it, a line each."""

    def __init__(self, message: str, *advice: str, status: int = 1) -> None:
        super().__init__(message)
        self.advice = advice
        self.status = status
