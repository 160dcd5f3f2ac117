"""Which way rounds of sparsifiers take, where a launch measures several."""

from __future__ import annotations

import os

from horovod_sparse.carriers.exchanges import TRANSPORT_VARIABLE, transport_asked

#: how rounds travel, as the user has said
ASKED = transport_asked()


def travel_by(transport: str) -> None:
    """Sets the way that optimizers take whose ranks agree from now on.

    Args:
        transport: see `horovod_sparse.carriers.exchanges`.
    """
    os.environ[TRANSPORT_VARIABLE] = transport
