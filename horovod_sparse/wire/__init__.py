"""Selections as buffers, and back."""

from horovod_sparse.wire.format import HEADER_WORDS as HEADER_WORDS
from horovod_sparse.wire.format import WireFormat as WireFormat
from horovod_sparse.wire.message import Gathered as Gathered
from horovod_sparse.wire.message import carried_norm as carried_norm
from horovod_sparse.wire.message import pack as pack
from horovod_sparse.wire.message import told_by_norms as told_by_norms
from horovod_sparse.wire.message import unpack_sum as unpack_sum
