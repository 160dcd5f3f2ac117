"""Selections as buffers, and back."""

from horovod_sparse.wire.format import HEADER_WORDS, WireFormat
from horovod_sparse.wire.message import Gathered, carried_norm, norms_and_steps, pack, unpack_sum

__all__ = ["HEADER_WORDS", "Gathered", "WireFormat", "carried_norm", "norms_and_steps", "pack", "unpack_sum"]
