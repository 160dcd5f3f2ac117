"""What unit tests of several folders share."""

import pytest

from support.memories import choose_memory


@pytest.fixture(params=["host", "device"])
def memory(request, monkeypatch):
    """Runs a test with CPU tensors twice: once served as the host's, once as if a GPU held them."""
    choose_memory(monkeypatch, request.param)
    return request.param
