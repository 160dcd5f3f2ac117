"""A rank of a job whose last rank cannot make its optimizer: ``building_worker.py FRAMEWORK WAY FOLDER``.

WAY: whether the error is caught, and "variable" for one that an environment variable makes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.startup import without_dynamo


def torch_step(text: str) -> Any:
    import torch

    import horovod_sparse.torch as hvd

    model = torch.nn.Linear(30, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=text
    )
    model(torch.ones(4, 30)).sum().backward()
    optimizer.step()


def tape_step(text: str) -> Any:
    import tensorflow as tf

    import horovod_sparse.tensorflow as hvd

    variable, compression = tf.Variable(tf.ones([30, 20])), hvd.Compression.parse(text)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * variable)
    hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])


def keras_step(text: str) -> Any:
    import keras
    import numpy as np

    import horovod_sparse.tensorflow.keras as hvd

    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(50)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=text)
    model.compile(loss="mse", optimizer=optimizer, jit_compile=False)
    model.fit(np.ones((8, 6)), np.ones((8, 50)), verbose=0)


def main() -> None:
    framework, way, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if framework == "torch":
        without_dynamo()
        import horovod_sparse.torch as hvd
    else:
        import horovod_sparse.tensorflow as hvd
    hvd.init()
    rank, last = hvd.rank(), hvd.size() - 1
    step = {"torch": torch_step, "tape": tape_step, "keras": keras_step}[framework]
    begun = time.monotonic()
    try:
        if way == "variable" and rank == last:
            os.environ["HOROVOD_SPARSE_TRANSPORT"] = "mpi"
        step("topk:densty=0.1" if rank == last and way != "variable" else "topk:density=0.1")
    except Exception as error:
        told = {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
        (folder / f"rank-{rank}.json").write_text(json.dumps(told))
        if way == "raised":
            raise
    until = time.monotonic() + 30
    while not (folder / "rank-0.json").exists() and time.monotonic() < until:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
