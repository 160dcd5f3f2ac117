"""One file per algorithm. To add one: write its file, export it here, add a test row and a docs entry."""

from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    WholeSum,
)
from horovod_sparse.sparsifiers.cltk import CLTK
from horovod_sparse.sparsifiers.dgc import DGC
from horovod_sparse.sparsifiers.dragonn import DRAGONN
from horovod_sparse.sparsifiers.exdyna import ExDyna
from horovod_sparse.sparsifiers.gtopk import GTopK
from horovod_sparse.sparsifiers.hard_threshold import HardThreshold
from horovod_sparse.sparsifiers.micro import MiCRO
from horovod_sparse.sparsifiers.mstopk import MSTopK
from horovod_sparse.sparsifiers.oktopk import OkTopk
from horovod_sparse.sparsifiers.qsgd import QSGD
from horovod_sparse.sparsifiers.randomk import RandomK
from horovod_sparse.sparsifiers.sidco import SIDCo
from horovod_sparse.sparsifiers.signsgd import SignSGD
from horovod_sparse.sparsifiers.spardl import SparDL
from horovod_sparse.sparsifiers.topk import TopK
from horovod_sparse.sparsifiers.topk_dsa import TopkDSA

__all__ = [
    "ALGORITHMS",
    "CLTK",
    "DGC",
    "DRAGONN",
    "QSGD",
    "BucketInfo",
    "ExDyna",
    "GTopK",
    "HardThreshold",
    "MSTopK",
    "MiCRO",
    "OkTopk",
    "RandomK",
    "SIDCo",
    "SignSGD",
    "SparDL",
    "SparseSum",
    "Sparsifier",
    "SparsifierState",
    "TopK",
    "TopkDSA",
    "Traffic",
    "WholeSum",
]

#: Every algorithm by the name that `Compression` and the command lines know it under.
ALGORITHMS: dict[str, type[Sparsifier]] = {
    algorithm.name: algorithm
    for algorithm in (
        TopK,
        CLTK,
        RandomK,
        HardThreshold,
        DGC,
        SIDCo,
        MSTopK,
        DRAGONN,
        MiCRO,
        ExDyna,
        GTopK,
        SparDL,
        OkTopk,
        TopkDSA,
        SignSGD,
        QSGD,
    )
}
