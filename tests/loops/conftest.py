"""Loops of users on two ranks of Horovod, which are ranks of torch.distributed, too.

horovodrun --gloo -np 2 python -m pytest tests/loops
"""

from __future__ import annotations

from support import launched_torch
from support.launched_torch import (
    process_group,
    process_set,
    pytest_runtest_call,
    pytest_sessionstart,
    rank,
    size,
)

__all__ = ["process_group", "process_set", "pytest_runtest_call", "pytest_sessionstart", "rank", "size"]
pytest_itemcollected = launched_torch.pytest_itemcollected
