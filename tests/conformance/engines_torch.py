"""PyTorch over Horovod: our optimizer, and Horovod's own with our compressor."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as stock
import numpy as np
import torch

import horovod_sparse.torch as hvd
from conformance.engine import RATE, SHAPES, Engine
from horovod_sparse.feedback import Recipe
from support.linear import LinearModel
from support.optimizers import base_for

__all__ = ["ENGINES"]


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """A copy, as float64."""
    return tensor.detach().to(torch.float64, copy=True).numpy()


class OwnTraining:
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
        self.model = LinearModel(shapes, getattr(torch, dtype))
        self.compressor = (
            hvd.Compression.parse(compression)
            if isinstance(compression, str)
            else self.compressor_of(compression)
        )
        if members is not None:
            options["process_set"] = members
        self.optimizer = self.module.DistributedOptimizer(
            base_for(compression, self.model.parameters(), RATE),
            self.model.named_parameters(),
            compression=self.compressor,
            **self._options(options),
        )

    @staticmethod
    def _options(options: dict[str, Any]) -> dict[str, Any]:
        return options if {"plan", "merging"} & set(options) else {"bucket_bytes": 680, **options}

    @property
    def telemetry(self) -> Any:
        return self.optimizer.telemetry

    @property
    def parts(self) -> Any:
        return self.optimizer._synchronizer.sparse

    def steps(self) -> set[int]:
        return {part.bucket.state.step for part in self.parts}

    def step(self, gradients: Mapping[str, np.ndarray]) -> None:
        try:
            self.model.backward(gradients)
            self.optimizer.step()
        except BaseException:
            self.model.zero_grad()  # Horovod's own optimizer forbids its own after a step that was refused
            raise
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: numpy_of(parameter) for name, parameter in self.model.named_parameters()}

    def held(self) -> dict[str, np.ndarray]:
        return held_in(self._state()["horovod_sparse"])

    def change(self, name: str) -> None:
        with torch.no_grad():
            self.model.get_parameter(name).view(-1)[-1] += 1e-3

    def _state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def saved(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self._state()))

    def load(self, saved: Any) -> None:
        self.model.load_state_dict(saved[0])
        self.load_state(saved)

    def load_state(self, saved: Any) -> None:
        self.optimizer.load_state_dict(saved[1])


def held_in(entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What an entry of a checkpoint holds back."""
    return {name: numpy_of(torch.as_tensor(values)) for name, values in entry["residuals"].items()}


class StockTraining(OwnTraining):
    """`horovod.torch.DistributedOptimizer` with our compressor."""

    module, compressor_of = stock, hvd.SparseCompressor

    @staticmethod
    def _options(options: dict[str, Any]) -> dict[str, Any]:
        return options

    @property
    def telemetry(self) -> Any:
        return self.compressor.telemetry

    def held(self) -> dict[str, np.ndarray]:
        return held_in(self.compressor.state_dict())

    def _state(self) -> dict[str, Any]:
        return self.compressor.state_dict()

    def load_state(self, saved: Any) -> None:
        self.compressor.load_state_dict(saved[1])


def _engine(name: str, train: Any, *has: str) -> Engine:
    return Engine(name, train, frozenset(has), stock.rank(), stock.size(), stock.allgather_object)


COMMON = ("saved", "adopts", "absent", "members", "types", "device")
ENGINES = [
    _engine("own", OwnTraining, *COMMON, "levels", "nonfinite", "drift", "buckets", "models"),
    _engine("stock", StockTraining, *COMMON),
]
