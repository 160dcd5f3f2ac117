"""Selections as buffers, and back."""

from horovod_sparse.wire.format import HEADER_WORDS, WireFormat
from horovod_sparse.wire.gathered import Gathered, unpack_sum
from horovod_sparse.wire.message import Message, message_words, pack, unpack, unpack_one

__all__ = [
    "HEADER_WORDS",
    "Gathered",
    "Message",
    "WireFormat",
    "message_words",
    "pack",
    "unpack",
    "unpack_one",
    "unpack_sum",
]
