"""Code blocks of README.md and docs/*.md, and what they take for granted.

A block of Python is run where a comment before it says with what, ``<!-- run: torch -->``, or is left out
with a reason, ``<!-- not run: ... -->``. Every block runs by itself, after its prelude; those of a framework
share a process, ``python -m support.documents torch``.
"""

import importlib.util
import json
import os
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>(?:not )?run): (?P<what>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A code block without its fence; `what` is with which prelude it runs, or why it does not."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    what: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text("utf-8")
        for found in _BLOCK.finditer(text):
            line = text[: found.start("text")].count("\n") + 1
            code = textwrap.dedent(found["text"])
            page = str(path.relative_to(ROOT))
            yield Block(page, line, found["language"], code, found["mark"] or "", found["what"] or "")


def _stand_ins() -> dict[str, Any]:
    """For services that are not installed here: they take what the real ones take, numbers by name."""

    def log(numbers: dict[str, float], *, step: int) -> None:
        if not numbers or not all(type(value) is float for value in numbers.values()) or step < 0:
            raise TypeError(f"numbers by name, and a step: {numbers}, {step}")

    return {"wandb": SimpleNamespace(log=log), "mlflow": SimpleNamespace(log_metrics=log)}


def _torch() -> dict[str, Any]:
    import torch

    import horovod_sparse.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    batches = [(torch.randn(8, 16), torch.randint(10, (8,))) for _ in range(14)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {**locals(), "cross_entropy": torch.nn.functional.cross_entropy, **_stand_ins()}


def _torch_trained() -> dict[str, Any]:
    given = _torch()
    hvd, named = given["hvd"], given["model"].named_parameters()
    compression = hvd.Compression.topk(density=0.1)
    return {**given, "optimizer": hvd.DistributedOptimizer(given["optimizer"], named, compression)}


def _ddp() -> dict[str, Any]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import horovod_sparse.ddp  # noqa: F401

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given, rank = _torch(), 0
    net = given["model"]
    model = DistributedDataParallel(net)
    return {**given, **locals()}


def _tensorflow() -> dict[str, Any]:
    import keras
    import tensorflow as tf

    import horovod_sparse.tensorflow as hvd

    hvd.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    images, labels = tf.random.normal((32, 16)), tf.random.uniform((32,), maxval=10, dtype=tf.int32)
    compression = hvd.Compression.topk(density=0.1)
    optimizer = keras.optimizers.SGD(0.1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
    return {**locals(), "cross_entropy": loss}


def _keras() -> dict[str, Any]:
    import horovod_sparse.tensorflow.keras as hvd

    given = _tensorflow()
    hvd.init()
    distributed = hvd.DistributedOptimizer(
        given["keras"].optimizers.SGD(0.1), compression=hvd.Compression.topk(density=0.1)
    )
    given["model"].compile(distributed, given["loss"])
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    return {**given, "hvd": hvd, "optimizer": distributed, "broadcast": broadcast}


#: what a mark may name -> the process that runs it, and what there is before
PRELUDES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "sparsifier": ("torch", dict),
    "torch": ("torch", _torch),
    "torch trained": ("torch", _torch_trained),
    "ddp": ("torch", _ddp),
    "torchrun": ("launch", dict),  # by a test of its own
    "horovodrun": ("torch", dict),
    "horovodrun keras": ("tensorflow", dict),
    "tensorflow": ("tensorflow", _tensorflow),
    "keras": ("tensorflow", _keras),
}


def run(process: str) -> dict[str, str]:
    """Runs the blocks of a process.

    Returns:
        The end of the traceback of each that failed, empty for those that ran, by its place; "skipped" for
        those that need TensorBoard where there is none.
    """
    outcome = {}
    if process == "torch":
        sys.modules["tensorflow"] = None  # type: ignore[assignment]  # TensorBoard takes seconds to import it
    for block in blocks():
        if block.language != "python" or block.mark != "run" or PRELUDES[block.what][0] != process:
            continue
        if "tensorboard" in block.text.lower() and importlib.util.find_spec("tensorboard") is None:
            outcome[block.place] = "skipped"
            continue
        try:
            exec(compile(block.text, block.place, "exec"), PRELUDES[block.what][1]())
            outcome[block.place] = ""
        except Exception:
            outcome[block.place] = traceback.format_exc(limit=-4)
    return outcome


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = run(sys.argv[1])
    print("\n" + json.dumps(found))
