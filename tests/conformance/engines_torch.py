"""PyTorch over Horovod: our optimizer, and Horovod's own with our compressor."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as stock
import torch

import horovod_sparse.torch as hvd
from conformance.engine import RATE, SHAPES, ZEROS, Engine
from conformance.pytorch import TorchTraining
from horovod_sparse.feedback import Recipe
from support.linear import LinearModel
from support.optimizers import base_for

__all__ = ["ENGINES"]


class OwnTraining(TorchTraining):
    """`horovod_sparse.torch.DistributedOptimizer`, in three buckets if nothing else is asked for."""

    module: Any = hvd
    #: one compressor for all trainings of a recipe: ours keep nothing in it
    compressor_of: Callable[[Recipe], Any] = staticmethod(functools.cache(hvd.SparseCompressor))

    def __init__(
        self,
        compression: str | Recipe,
        shapes: Mapping[str, Any] = SHAPES,
        *,
        dtype: str = "float32",
        members: Any = None,
        absent: bool = False,
        **options: Any,
    ) -> None:
        self.net = LinearModel(shapes, getattr(torch, dtype))
        self.loss = self.net.loss
        is_text = isinstance(compression, str)
        made = hvd.Compression.parse(compression) if is_text else self.compressor_of(compression)
        if members is not None:
            options["process_set"] = members
        self.optimizer = self.module.DistributedOptimizer(
            base_for(compression, self.net.parameters(), RATE),
            self.net.named_parameters(),
            compression=made,
            **self._options(options),
        )
        self.keeper = self.optimizer

    @staticmethod
    def _options(options: dict[str, Any]) -> dict[str, Any]:
        has_plans = {"plan", "merging", "groups"} & set(options)
        return options if has_plans else {"bucket_bytes": 680, **options}

    @property
    def parts(self) -> Any:
        return self.optimizer._synchronizer.sparse


class StockTraining(OwnTraining):
    """`horovod.torch.DistributedOptimizer` with our compressor."""

    module, compressor_of = stock, hvd.SparseCompressor

    @staticmethod
    def _options(options: dict[str, Any]) -> dict[str, Any]:
        return options


def measured(text: str) -> Any:
    net = LinearModel(SHAPES)
    return hvd.measured_profile(lambda: net.loss(ZEROS), net.named_parameters(), text)


def _engine(name: str, train: Any, *has: str, share: float = 1.0) -> Engine:
    features = {"saved", "adopts", "absent", "members", "types", "device", "scaler", "horovod"}
    of_horovod = stock.rank(), stock.size(), stock.allgather_object
    return Engine(name, train, frozenset({*features, *has}), *of_horovod, share, measured=measured)


#: ours shows nearly all of it as well: both have one synchronizer
OWN = ("levels", "nonfinite", "drift", "buckets", "models", "plans", "merging", "clips")
ENGINES = [_engine("own", OwnTraining, *OWN), _engine("stock", StockTraining, share=0.4)]
