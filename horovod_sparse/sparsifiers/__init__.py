"""The algorithms, one a file: coroutines that yield collectives. A file is loaded by its name.

To add one: write its file, name it here, add a test row and a docs entry.
"""

import importlib
from collections.abc import Iterator, Mapping

from horovod_sparse.sparsifiers.base import (
    BucketInfo,
    SparseSum,
    Sparsifier,
    SparsifierState,
    Traffic,
    WholeSum,
)

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
    """Maps names to classes, and loads a class' file at its first use."""

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
