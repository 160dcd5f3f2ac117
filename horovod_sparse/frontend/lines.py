"""Plain values from every rank to every rank, as lines of JSON in one allgather."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from horovod_sparse.collectives import AllGather, Synchronization

__all__ = ["shared_lines"]


def shared_lines(value: Any) -> Synchronization[list[Any]]:
    """What every rank gave, in rank order.

    Args:
        value: of this rank: numbers, strings, None, and lists and dicts of them.

    Example:
        >>> from horovod_sparse.simulation import run_lockstep
        >>> run_lockstep([shared_lines({"rank": rank}) for rank in range(2)])[0]
        [{'rank': 0}, {'rank': 1}]
    """
    line = json.dumps(value).encode()
    line += b" " * (-(len(line) + 1) % 4) + b"\n"
    gathered = yield AllGather(np.frombuffer(line, np.int32))
    return [json.loads(item) for item in np.array(gathered).tobytes().splitlines()]
