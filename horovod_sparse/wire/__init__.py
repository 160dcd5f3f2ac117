"""Writes selections as messages, and reads them back."""

from horovod_sparse.wire.format import HEADER_WORDS, WireFormat
from horovod_sparse.wire.message import Notes, SparseSum, note, pack, unpack_sum
