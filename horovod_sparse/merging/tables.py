"""Layer tables of known networks: something to plan for before anything is measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import resources

from horovod_sparse.errors import UnknownNameError
from horovod_sparse.merging.plan import ParameterFacts
from horovod_sparse.merging.workload import Workload

__all__ = ["LAYER_TABLES", "LayerTable", "layer_table"]

LAYER_TABLES = ("bert_base", "inception_v4", "lstm_ptb", "resnet50", "vgg16_cifar", "xml_one_layer")


@dataclass(frozen=True)
class LayerTable:
    """A network's parameters, and times of its step on one device.

    Attributes:
        name: one of `LAYER_TABLES`.
        source: where shapes and times come from, and what is assumed.
        batch: samples for each rank.
        density: that the source trains it with.
        shapes: of the parameters.
        workload: parameters and times.
    """

    name: str
    source: str
    batch: int
    density: float
    shapes: tuple[tuple[int, ...], ...]
    workload: Workload


def layer_table(name: str) -> LayerTable:
    """Reads a table.

    Args:
        name: one of `LAYER_TABLES`.

    Raises:
        UnknownNameError: for another name, with those there are.

    Example:
        >>> sum(parameter.num_elements for parameter in layer_table("resnet50").workload.parameters)
        25557032
    """
    if name not in LAYER_TABLES:
        raise UnknownNameError("layer table", name, LAYER_TABLES)
    file = resources.files("horovod_sparse.merging") / "layer_tables" / f"{name}.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    rows = saved["parameters"]
    workload = Workload(
        tuple(ParameterFacts(parameter, math.prod(shape)) for parameter, shape, _ in rows),
        tuple(seconds for _, _, seconds in rows),
        saved["forward_seconds"],
    )
    shapes = tuple(tuple(shape) for _, shape, _ in rows)
    return LayerTable(name, saved["source"], saved["batch"], saved["density"], shapes, workload)
