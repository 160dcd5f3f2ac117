"""Layer tables: parameters of four networks, and times of their steps, as OMGS-SGD has them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from horovod_sparse.merging import ParameterFacts, Workload

LAYER_TABLES = ("inception_v4", "lstm_ptb", "resnet50", "vgg16_cifar")
_FOLDER = Path(__file__).parents[1] / "layer_tables"


@dataclass(frozen=True)
class LayerTable:
    """A network's parameters, and times of its step on one device; its file names their source.

    Attributes:
        density: that the source trains it with.
        workload: parameters and times.
    """

    density: float
    workload: Workload


def layer_table(name: str) -> LayerTable:
    """Reads one of `LAYER_TABLES`.

    Example:
        >>> sum(parameter.num_elements for parameter in layer_table("resnet50").workload.parameters)
        25557032
    """
    saved = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    names, shapes, seconds = zip(*saved["parameters"], strict=True)
    facts = tuple(ParameterFacts(*pair) for pair in zip(names, map(math.prod, shapes), strict=True))
    return LayerTable(saved["density"], Workload(facts, seconds, saved["forward_seconds"]))
