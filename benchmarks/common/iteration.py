"""One iteration of a training, and where its time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def iterate(
    optimizer: Any, loss: Callable[[], Any], clip: Callable[[], None] = lambda: None, *, alone: bool = False
) -> dict[str, float]:
    """Trains for one step; returns the seconds of its parts.

    Args:
        optimizer: of the front end for Horovod.
        loss: the forward pass.
        clip: called between synchronization and step.
        alone: the optimizer is one that synchronizes nothing itself.
    """
    clock = time.perf_counter
    started = clock()
    optimizer.zero_grad()
    value = loss()
    forward = clock()
    value.backward()
    backward = clock()
    if alone:
        clip()
        synchronized = clock()
        optimizer.step()
    else:
        optimizer.synchronize()
        clip()
        synchronized = clock()
        with optimizer.skip_synchronize():
            optimizer.step()
    return {
        "forward": forward - started,
        "backward": backward - forward,
        "exchange": synchronized - backward,
        "step": clock() - synchronized,
    }
