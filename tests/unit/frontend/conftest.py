"""What tests of messages between ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def connected() -> Iterator[Callable[[int], list[Any]]]:
    """Makes so many ranks that are connected over ZeroMQ."""
    pytest.importorskip("zmq")
    from support.zmq_ranks import making

    with making() as make:
        yield make
