"""A synchronization under way, as its driver and those who wait for it see it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Task:
    """A coroutine under way.

    Attributes:
        name: stable over ranks and steps; round r communicates as ``{name}.{r}``.
        done: whether it has ended, in a result or in an error.
        result: what the coroutine returned.
        error: what it raised, kept here so that other tasks go on.
        num_rounds: collectives started so far.
        started: when, in seconds of `time.perf_counter`.
        finished: when it ended, NaN before.
        waited_seconds: time this process sat in `Driver.wait` for this task and had nothing else to
            do: the part of its communication that computation did not hide. Tasks waited for together
            each count the same seconds; `Driver.idle_seconds` counts them once.
    """

    name: str
    done: bool = False
    result: Any = None
    error: BaseException | None = None
    num_rounds: int = 0
    started: float = field(default_factory=time.perf_counter)
    finished: float = float("nan")
    waited_seconds: float = 0.0

    def value(self) -> Any:
        """The result; raises the coroutine's error if it has one."""
        if self.error is not None:
            raise self.error
        return self.result
