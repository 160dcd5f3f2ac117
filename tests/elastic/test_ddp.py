"""A job of torchrun whose worker dies: all start again, and go on from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

WORKER = Path(__file__).with_name("ddp_worker.py")
#: one host, and a rendezvous that takes workers in again after a restart
OPTIONS = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
#: a store of its own for every attempt: PyTorch 2.13 leaves addresses of the dead in the launcher's, which
#: init_process_group then tries to reach
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run(folder: Path, last: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
    folder.mkdir()
    launcher = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [str(launcher), *OPTIONS, str(WORKER), str(folder), str(last)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=200,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [torch.load(folder / f"end-{rank}.pt", weights_only=True) for rank in range(2)]


def test_a_restart_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, restarted = run(tmp_path / "whole", -1), run(tmp_path / "restarted", 11)
    assert (tmp_path / "restarted" / "ended").exists()
    assert [first for first, _ in whole] == [0, 0]
    assert [first for first, _ in restarted] == [10, 10]
    for weights in zip(*(state.values() for _, state in (*whole, *restarted)), strict=True):
        assert all(torch.equal(weight, weights[0]) for weight in weights)
