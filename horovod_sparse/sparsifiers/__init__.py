"""One file per algorithm, loaded when somebody asks for it.

To add one: write its file, name it here, add a test row and a docs entry.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    WholeSum,
)

if TYPE_CHECKING:
    from horovod_sparse.sparsifiers.chunk_topk import ChunkTopK as ChunkTopK
    from horovod_sparse.sparsifiers.cltk import CLTK as CLTK
    from horovod_sparse.sparsifiers.dgc import DGC as DGC
    from horovod_sparse.sparsifiers.dragonn import DRAGONN as DRAGONN
    from horovod_sparse.sparsifiers.exdyna import ExDyna as ExDyna
    from horovod_sparse.sparsifiers.gtopk import GTopK as GTopK
    from horovod_sparse.sparsifiers.hard_threshold import HardThreshold as HardThreshold
    from horovod_sparse.sparsifiers.micro import MiCRO as MiCRO
    from horovod_sparse.sparsifiers.mstopk import MSTopK as MSTopK
    from horovod_sparse.sparsifiers.oktopk import OkTopk as OkTopk
    from horovod_sparse.sparsifiers.qsgd import QSGD as QSGD
    from horovod_sparse.sparsifiers.randomk import RandomK as RandomK
    from horovod_sparse.sparsifiers.sidco import SIDCo as SIDCo
    from horovod_sparse.sparsifiers.signsgd import SignSGD as SignSGD
    from horovod_sparse.sparsifiers.spardl import SparDL as SparDL
    from horovod_sparse.sparsifiers.topk import TopK as TopK
    from horovod_sparse.sparsifiers.topk_dsa import TopkDSA as TopkDSA

#: file, which is the name that `Compression` and the command lines know it under, and class
_CLASSES = {
    "topk": "TopK",
    "chunk_topk": "ChunkTopK",
    "cltk": "CLTK",
    "randomk": "RandomK",
    "hard_threshold": "HardThreshold",
    "dgc": "DGC",
    "sidco": "SIDCo",
    "mstopk": "MSTopK",
    "dragonn": "DRAGONN",
    "micro": "MiCRO",
    "exdyna": "ExDyna",
    "gtopk": "GTopK",
    "spardl": "SparDL",
    "oktopk": "OkTopk",
    "topk_dsa": "TopkDSA",
    "signsgd": "SignSGD",
    "qsgd": "QSGD",
}


class _Algorithms(Mapping[str, type[Sparsifier]]):
    """By name; a file is loaded when its class is asked for."""

    def __getitem__(self, name: str) -> type[Sparsifier]:
        made = _CLASSES[name]
        found: type[Sparsifier] = getattr(importlib.import_module(f"{__name__}.{name}"), made)
        return found

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


#: Every algorithm by its name.
ALGORITHMS: Mapping[str, type[Sparsifier]] = _Algorithms()


def __getattr__(name: str) -> Any:
    for file, made in _CLASSES.items():
        if made == name:
            return ALGORITHMS[file]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
