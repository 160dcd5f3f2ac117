"""Writes selections as messages, and reads them back."""

from horovod_sparse.wire.format import HEADER_WORDS as HEADER_WORDS
from horovod_sparse.wire.format import WireFormat as WireFormat
from horovod_sparse.wire.message import Gathered as Gathered
from horovod_sparse.wire.message import Notes as Notes
from horovod_sparse.wire.message import note as note
from horovod_sparse.wire.message import pack as pack
from horovod_sparse.wire.message import unpack_sum as unpack_sum
