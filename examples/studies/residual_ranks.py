"""The first steps of the residual study on six processes: `compared` launches them, and checks the simulator.

Every process makes its own gradients and has its own model and optimizer; the messages go through Horovod.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from studies import residuals
from studies.training import train

__all__ = ["compared", "main"]

#: of the first rate and seed; the learning rate is that of so many steps of the study
NUM_STEPS, SEED = 40, 0
_TIMEOUT_SECONDS = 300


def compared() -> dict[str, Any]:
    """Losses of every mode on six processes with horovodrun --gloo, and in one process.

    Returns:
        By task and mode: steps whose mean loss is equal bit for bit, and the largest difference.

    Raises:
        RuntimeError: if the launch fails, with the end of its output.
    """
    size = residuals.SETTINGS["digits"]["size"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        command = ["timeout", "--kill-after=15", str(_TIMEOUT_SECONDS), "horovodrun", "--gloo"]
        command += [
            "--log-level",
            "ERROR",
            "-np",
            str(size),
            "python",
            "-m",
            "studies.residual_ranks",
            str(file),
        ]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise RuntimeError(
                f"horovodrun ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            )
        real = json.loads(file.read_text())
    found = {}
    for name, losses in real.items():
        task, mode = name.split("/")
        setting = residuals.SETTINGS[task]
        trace = train(
            residuals.task_of(task),
            residuals.recipe_of(setting, mode),
            size=size,
            num_steps=NUM_STEPS,
            learning_rate_at=residuals.rate_at(setting["rates"][0], setting),
            seed=SEED,
        )
        difference = np.abs(np.array(losses) - np.array(trace.losses))
        found[name] = {
            "steps": NUM_STEPS,
            "equal_bit_for_bit": int((difference == 0.0).sum()),
            "largest_difference": float(difference.max()),
        }
    return found


def losses_of(hvd: Any, task_name: str, mode: str) -> list[float]:
    """One training on this process's rank; the mean losses of all ranks."""
    setting, task = residuals.SETTINGS[task_name], residuals.task_of(task_name)
    torch.manual_seed(SEED)
    model = task.make_model()
    compression = hvd.Compression.spardl(density=setting["density"], residuals=mode)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=task.momentum),
        named_parameters=[(f"{task_name}.{mode}.{name}", p) for name, p in model.named_parameters()],
        compression=compression,
        tensor_selection="all",
    )
    rate_at = residuals.rate_at(setting["rates"][0], setting)
    stream, losses = task.batches(hvd.rank(), hvd.size(), NUM_STEPS, SEED), []
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = rate_at(step)
        optimizer.zero_grad()
        loss = task.loss(model, *(torch.from_numpy(array) for array in next(stream)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [float(mean) for mean in np.mean(hvd.allgather_object(losses), axis=0)]


def main(arguments: Sequence[str]) -> int:
    """One rank; rank 0 writes the losses of all trainings to the file that is named."""
    import horovod_sparse.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    losses = {
        f"{task}/{mode}": losses_of(hvd, task, mode)
        for task in residuals.SETTINGS
        for mode in residuals.MODES
    }
    if hvd.rank() == 0:
        Path(arguments[0]).write_text(json.dumps(losses))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
