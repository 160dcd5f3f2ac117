"""What `scripts/bench sync` compares: Horovod's own ways, what one writes first, and the sparsifiers."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import horovod_sparse.torch as hvd
from benchmarks.common.gradients import GradientSource
from benchmarks.common.options import PAIRS_SUFFIX
from benchmarks.common.transports import ASKED, travel_by
from benchmarks.common.wire import Round, rounds_of
from benchmarks.sync.main import LEVELS_SUFFIX


class Synthetic:
    """Parameters whose gradients are made up.

    Args:
        layers: name and number of elements of every parameter.
        gradient_layers: sizes of the layers that gradients are drawn for.
        seed: of the gradients.
    """

    def __init__(
        self, layers: Sequence[tuple[str, int]], gradient_layers: Sequence[int], seed: int = 0
    ) -> None:
        self.layers = list(layers)
        self.source = GradientSource(gradient_layers, hvd.rank(), seed)
        #: the gradients of all parameters
        self.flat = torch.zeros(self.source.num_elements)

    def parameters(self) -> list[Any]:
        """Fresh parameters; their memory is never touched, so they cost none."""
        return [torch.nn.Parameter(torch.empty(size)) for _, size in self.layers]

    def views(self) -> list[Any]:
        """The gradient of every parameter."""
        sizes = [size for _, size in self.layers]
        return list(torch.split(self.flat, sizes))


class Method(abc.ABC):
    """One way of synchronizing.

    Args:
        name: in results.
        model: whose gradients are synchronized.
    """

    #: repetitions before those that count
    num_warmup = 1

    def __init__(self, name: str, model: Synthetic) -> None:
        self.name, self.model = name, model
        #: seconds of the last synchronization, by part
        self.parts: dict[str, float] = {}

    def prepare(self) -> None:
        """New gradients, not timed."""
        self.model.source.fill(self.model.flat.numpy())

    @abc.abstractmethod
    def run(self) -> None:
        """One synchronization."""

    @abc.abstractmethod
    def rounds(self) -> list[Round]:
        """The collectives of the last synchronization, with this rank's payload."""

    def facts(self) -> dict[str, float]:
        """Densities of the last synchronization."""
        return {}


class Dense(Method):
    """Horovod's allreduce, in place, all tensors at once, as its optimizer does it; perhaps in float16."""

    def __init__(self, name: str, model: Synthetic, compression: Any) -> None:
        super().__init__(name, model)
        self._compression = compression
        self._views = model.views()
        self._num_bytes = 0

    def run(self) -> None:
        clock = time.perf_counter
        started = clock()
        packed = [self._compression.compress(view) for view in self._views]
        self._num_bytes = sum(tensor.numel() * tensor.element_size() for tensor, _ in packed)
        compressed = clock()
        names = [f"{self.name}.{number}" for number in range(len(packed))]
        handles = [
            hvd.allreduce_async_(tensor, name=name, op=hvd.Average)
            for name, (tensor, _) in zip(names, packed, strict=True)
        ]
        totals = [hvd.synchronize(handle) for handle in handles]
        exchanged = clock()
        for total, view, (_, context) in zip(totals, self._views, packed, strict=True):
            if context is not None:
                view.copy_(self._compression.decompress(total, context))
        self.parts = {
            "select": compressed - started,
            "exchange": exchanged - compressed,
            "apply": clock() - exchanged,
        }

    def rounds(self) -> list[Round]:
        return [Round("AllReduce", self._num_bytes)]

    def facts(self) -> dict[str, float]:
        return {"density_selected": 1.0, "density_union": 1.0}


class Naive(Method):
    """The sparsifier that one writes first: `torch.topk` of magnitudes, and two allgathers.

    Indices travel as int32, which many programs do not bother to do.
    """

    def __init__(self, name: str, model: Synthetic, density: float) -> None:
        super().__init__(name, model)
        self._k = max(1, round(density * model.flat.numel()))
        self._residual = torch.zeros_like(model.flat)
        self._indices = torch.empty(0, dtype=torch.int32)

    def run(self) -> None:
        clock, flat, residual = time.perf_counter, self.model.flat, self._residual
        started = clock()
        residual.add_(flat)
        folded = clock()
        own = torch.topk(residual.abs(), self._k).indices
        values = residual[own]
        residual[own] = 0.0
        selected = clock()
        handles = [
            hvd.allgather_async(values, name=f"{self.name}.values"),
            hvd.allgather_async(own.to(torch.int32), name=f"{self.name}.indices"),
        ]
        values, self._indices = (hvd.synchronize(handle) for handle in handles)
        exchanged = clock()
        flat.zero_()
        flat.index_add_(0, self._indices, values.div_(hvd.size()))
        self.parts = {
            "fold": folded - started,
            "select": selected - folded,
            "exchange": exchanged - selected,
            "apply": clock() - exchanged,
        }

    def rounds(self) -> list[Round]:
        return [Round("AllGather", 4 * self._k), Round("AllGather", 4 * self._k)]

    def facts(self) -> dict[str, float]:
        n, union = self.model.flat.numel(), np.unique(self._indices.numpy()).size
        return {"density_selected": self._k / n, "density_union": union / n}


class Sparse(Method):
    """A sparsifier, synchronized by the optimizer of `horovod_sparse.torch`.

    Args:
        name: in results.
        model: whose gradients are synchronized.
        compression: as `Compression.parse` reads it.
        options: of `DistributedOptimizer`: bucket_bytes, groups.
        transport: what carries its rounds; see `horovod_sparse.carriers.exchanges`.
    """

    num_warmup = 6

    def __init__(
        self,
        name: str,
        model: Synthetic,
        compression: str,
        options: Mapping[str, Any],
        transport: str | None = None,
    ) -> None:
        super().__init__(name, model)
        self._transport = transport or ASKED
        travel_by(self._transport)
        parameters = model.parameters()
        # messages have names of their own, as if there were no other method: Horovod caches by name
        named = [(f"{name}.{layer}", p) for (layer, _), p in zip(model.layers, parameters, strict=True)]
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            named_parameters=named,
            compression=hvd.Compression.parse(compression),
            **options,
        )
        self._synchronizer = self._optimizer._synchronizer
        if self._synchronizer is None:
            raise RuntimeError("one rank alone synchronizes nothing: use two hosts or more")
        self._parameters = parameters

    def prepare(self) -> None:
        super().prepare()
        travel_by(self._transport)
        for part in self._synchronizer.parts:
            part.gradient.reset()
        for parameter, gradient in zip(self._parameters, self.model.views(), strict=True):
            parameter.grad.copy_(gradient)

    def run(self) -> None:
        self._optimizer.synchronize()
        last = self._optimizer.telemetry.last
        self.parts = {
            "fold": last.fold_seconds,
            "select": last.select_seconds,
            "exchange": last.wait_seconds,
            "apply": last.apply_seconds,
        }

    def rounds(self) -> list[Round]:
        return [item for part in self._synchronizer.parts for item in rounds_of(part)]

    def facts(self) -> dict[str, float]:
        last = self._optimizer.telemetry.last
        held = sum(part.bucket.accumulator.values().nbytes for part in self._synchronizer.sparse)
        return {
            "density_selected": last.density_selected,
            "density_union": last.density_union,
            "bytes_sent": last.bytes_sent,
            "bytes_inside": last.bytes_inside,
            "residual_bytes": held,
        }


def make_method(
    name: str, model: Synthetic, density: float, options: Mapping[str, Any], settings: Mapping[str, str]
) -> Method:
    """A method by its name.

    Args:
        name: of a baseline, or of a sparsifier.
        model: whose gradients are synchronized.
        density: for the naive sparsifier.
        options: of `DistributedOptimizer`.
        settings: the sparsifiers as `Compression.parse` reads them, by name.
    """
    if name == "dense":
        return Dense(name, model, hvd.Compression.none)
    if name == "dense float16":
        return Dense(name, model, hvd.Compression.fp16)
    if name == "naive":
        return Naive(name, model, density)
    transport = "pairs" if name.endswith(PAIRS_SUFFIX) else None
    name_of = name.removesuffix(PAIRS_SUFFIX)
    if name_of.endswith(LEVELS_SUFFIX):
        text = settings[name_of.removesuffix(LEVELS_SUFFIX)]
        return Sparse(name, model, text, {**options, "levels": "host"}, transport)
    text = settings[name_of]
    if name_of == "hard_threshold":
        text += f",threshold={_reached_by(model, density)}"
    return Sparse(name, model, text, options, transport)


def _reached_by(model: Synthetic, density: float) -> float:
    """A threshold that about so many elements reach: of what gathers until the middle of a measurement.

    What hard threshold guesses from its first gradient is too low for the steps that follow, in which the
    residual grows; nothing steers it.
    """
    gathered = np.zeros_like(model.flat.numpy())
    for _ in range(Sparse.num_warmup + 4):
        model.source.fill(model.flat.numpy())
        gathered += model.flat.numpy()
    position = round((1 - density) * gathered.size)
    threshold = float(np.partition(np.abs(gathered, out=gathered), position)[position])
    return float(hvd.broadcast_object(threshold, root_rank=0))
