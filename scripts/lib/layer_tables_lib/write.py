"""Writes the tables, with times, to where the package reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from . import convolutional, sequential
from .layers import Table

FOLDER = Path(__file__).resolve().parents[3] / "horovod_sparse" / "planning" / "layer_tables"

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

#: samples that one GPU trains in a second, in half types (autocast), as it was published
_NVIDIA = "NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, training performance, 1 GPU, mixed precision"
_TIMM = "pytorch-image-models, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv"
_FOUNDRY = "MosaicML llm-foundry, scripts/train/benchmarking, tokens per second and GPU, 8 GPUs of one host"
PUBLISHED: dict[tuple[str, str], tuple[float, str]] = {
    ("resnet50", "v100"): (1200.0, _NVIDIA),
    ("resnet50", "a100"): (2470.0, _NVIDIA),
    ("resnet50", "rtx3090"): (826.06, _TIMM),
    ("resnet18", "rtx3090"): (2764.22, _TIMM),
    ("gpt2_small", "a100"): (156_468 / 1024, f"{_FOUNDRY} (125m, 1024 tokens: 156,468)"),
    ("gpt2_medium", "a100"): (64_813 / 1024, f"{_FOUNDRY} (350m, 1024 tokens: 64,813)"),
    ("vit_base", "a100"): (3583 / 8, "PaddlePaddle PLSC, ViT-B/16 at 224 x 224, 8 GPUs of one host: 3583/s"),
}
#: of a language model of 1.3 billion parameters, which is no table here: tokens per second and GPU
_1B = (1_315_950_592, 2048, 24, 2048)  # parameters, tokens of a sample, layers, width
_A100_1B, _H100_1B = 19_271.0, 45_455.0
#: whose multiply-adds per second others of its kind are taken to reach
KINDS = {
    "convolutional": ("resnet18", "resnet50", "vgg16_cifar", "inception_v4"),
    "transformer": ("bert_base", "gpt2_small", "gpt2_medium", "llama_1b", "vit_base"),
}
#: samples of a step there: a GPU's worth, where the paper's batch is that of an old one
BATCHES = {
    "bert_base": 64, "gpt2_medium": 16, "gpt2_small": 32, "inception_v4": 64, "llama_1b": 8, "resnet18": 256,
    "resnet50": 128, "vgg16_cifar": 512, "vit_base": 128,
}  # fmt: skip


def steps(name: str) -> dict[str, dict[str, object]]:
    """Forward and backward on today's GPUs: seconds, samples, and where the number is from."""
    work = sum(row[2] for row in MODELS[name][0].rows)
    found: dict[str, dict[str, object]] = {}
    for device in ("v100", "rtx3090", "a100", "h100"):
        if (name, device) in PUBLISHED:
            rate, source = PUBLISHED[name, device]
        elif name in KINDS["convolutional"] and ("resnet50", device) in PUBLISHED:
            rate, source = PUBLISHED["resnet50", device]
            rate *= sum(row[2] for row in MODELS["resnet50"][0].rows) / work
            source = f"scaled by multiply-adds from resnet50, an assumption: {source}"
        elif name == "llama_1b" and device == "a100":
            parameters, tokens, layers, width = _1B
            rate = _A100_1B * (parameters + layers * width * tokens) / work
            source = f"{_FOUNDRY} (1b, 2048 tokens, 40 GB: 19,271), scaled by multiply-adds, an assumption"
        elif name in KINDS["transformer"] and device == "a100":
            rate, source = PUBLISHED["gpt2_small", "a100"]
            rate *= sum(row[2] for row in MODELS["gpt2_small"][0].rows) / work
            source = f"scaled by multiply-adds from gpt2_small, an assumption: {source}"
        elif name in KINDS["transformer"] and device == "h100":
            before = found["a100"]
            rate = BATCHES[name] / float(str(before["seconds"])) * _H100_1B / _A100_1B
            source = (
                "2.36 times as fast as the A100, as a model of 1.3 billion parameters is, an assumption: "
            )
            source += f"{_FOUNDRY} (1b, 2048 tokens: 45,455 and 19,271)"
        else:
            continue
        batch = BATCHES[name]
        found[device] = {"seconds": float(f"{batch / rate:.4g}"), "batch": batch, "source": source}
    return found


# name: (table, batch for each rank, density, seconds of computing, source); seconds None are scaled from
# ResNet-50's in the paper, and those of a GPU are its step's
MODELS: dict[str, tuple[Table, int, float, float | str | None, str]] = {
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
    "resnet18": (
        convolutional.resnet18(), 256, 0.001, "rtx3090", "He et al. 2016; in no paper here."
    ),
    "gpt2_small": (
        sequential.gpt2_small(), 32, 0.001, "a100", "Radford et al. 2019; in no paper here."
    ),
    "gpt2_medium": (
        sequential.gpt2_medium(), 16, 0.001, "a100", "Radford et al. 2019; in no paper here."
    ),
    "llama_1b": (
        sequential.llama_1b(), 8, 0.001, "a100", "Zhang et al. 2024 (TinyLlama); in no paper here."
    ),
    "vit_base": (
        sequential.vit_base(), 128, 0.001, "a100", "Dosovitskiy et al. 2021 (ViT-B/16); in no paper here."
    ),
    "xml_one_layer": (
        sequential.xml_one_layer(), 256, 0.001, 0.025, "DRAGONN, section 5.1; 25 ms per step in 5.2."
    ),
}  # fmt: skip


def content(name: str) -> str:
    """The file of a model."""
    table, batch, density, seconds, source = MODELS[name]
    work = sum(row[2] for row in table.rows)
    known = steps(name)
    if isinstance(seconds, str):
        source = f"{source} Times: {seconds}, {known[seconds]['source']}. {_SPLIT}"
        seconds = float(str(known[seconds]["seconds"]))
    elif seconds is None:
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
    if known:
        lines.append(f' "steps": {json.dumps(known)},')
    lines.append(' "parameters": [')
    lines += [f"  {json.dumps(row)}," for row in rows[:-1]] + [f"  {json.dumps(rows[-1])}", " ]"]
    return "\n".join(["{", *lines, "}", ""])


def main() -> None:
    for name in MODELS:
        (FOLDER / f"{name}.json").write_text(content(name), encoding="utf-8")


if __name__ == "__main__":
    main()
