"""Which memory the PyTorch front end keeps gradients in: the choice, replaced for a test."""

from typing import Any


def choose_memory(monkeypatch: Any, name: str) -> None:
    """Lets CPU tensors be served as the host's ("host"), or as if a GPU held them ("device")."""
    chosen = {"host": frozenset({"cpu"}), "device": frozenset()}[name]
    monkeypatch.setattr("horovod_sparse.tensors.gradients.HOST_DEVICES", chosen)
