"""Writes selections as messages, and reads them back."""

from horovod_sparse.wire.message import HEADER_WORDS, Notes, SparseSum, WireFormat, note_of, pack, unpack_sum
