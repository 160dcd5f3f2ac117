"""Writes the tables, with times, to where the package reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from . import convolutional, sequential
from .layers import Table

FOLDER = Path(__file__).resolve().parents[2] / "horovod_sparse" / "merging" / "layer_tables"

# OMGS-SGD, section I: "the computing time is 0.18s" for ResNet-50 at 16 samples for each GPU (P102-100).
RESNET50_SECONDS, RESNET50_BATCH = 0.18, 16
# Forward once, backward for inputs and for weights.
FORWARD_SHARE = 1 / 3

_SCALED = (
    "Times: the paper gives 0.18 s of computing for ResNet-50 alone (section I); this model's are scaled "
    "from it by multiply-adds, which is an assumption. "
)
_SPLIT = (
    "A third is taken for forward; the rest is split over the parameters by multiply-adds, which is an "
    "assumption too."
)
_OMGS = "OMGS-SGD, Tables IV and V; shapes from the architecture"

# name: (table, batch for each rank, density, seconds of computing or None to scale, source)
MODELS: dict[str, tuple[Table, int, float, float | None, str]] = {
    "vgg16_cifar": (
        convolutional.vgg16_cifar(), 128, 0.001, None, f"{_OMGS} (with batch normalization: 54 tensors)."
    ),
    "resnet50": (
        convolutional.resnet50(), RESNET50_BATCH, 0.001, RESNET50_SECONDS, f"{_OMGS} (He et al. 2016)."
    ),
    "inception_v4": (
        convolutional.inception_v4(), 32, 0.001, None, f"{_OMGS} (Szegedy et al. 2017, Figs. 3 to 9)."
    ),
    "lstm_ptb": (
        sequential.lstm_ptb(), 100, 0.005, None, f"{_OMGS} (Zaremba et al. 2014, large: 2 layers of 1500)."
    ),
    "bert_base": (
        sequential.bert_base(), 8, 0.001, None, "Devlin et al. 2019 (uncased, with pooler), in no paper here."
    ),
    "xml_one_layer": (
        sequential.xml_one_layer(), 256, 0.001, 0.025, "DRAGONN, section 5.1; 25 ms per step in 5.3."
    ),
}  # fmt: skip


def content(name: str) -> str:
    """The file of a model."""
    table, batch, density, seconds, source = MODELS[name]
    work = sum(row[2] for row in table.rows)
    if seconds is None:
        resnet = sum(row[2] for row in MODELS["resnet50"][0].rows)
        seconds = RESNET50_SECONDS * work * batch / (resnet * RESNET50_BATCH)
        source = f"{source} {_SCALED}{_SPLIT}"
    else:
        source = f"{source} {_SPLIT}"
    backward = seconds * (1 - FORWARD_SHARE)
    head = {
        "source": source,
        "batch": batch,
        "density": density,
        "num_parameters": sum(math.prod(row[1]) for row in table.rows),
        "forward_seconds": float(f"{seconds * FORWARD_SHARE:.5g}"),
    }
    rows = [[row, list(shape), float(f"{backward * part / work:.5g}")] for row, shape, part in table.rows]
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines.append(' "parameters": [')
    lines += [f"  {json.dumps(row)}," for row in rows[:-1]] + [f"  {json.dumps(rows[-1])}", " ]"]
    return "\n".join(["{", *lines, "}", ""])


def main() -> None:
    for name in MODELS:
        (FOLDER / f"{name}.json").write_text(content(name), encoding="utf-8")
