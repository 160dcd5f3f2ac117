"""Selections as buffers, and back."""

from horovod_sparse.wire.message import HEADER_WORDS, Message, message_words, pack, unpack, unpack_one

__all__ = ["HEADER_WORDS", "Message", "message_words", "pack", "unpack", "unpack_one"]
