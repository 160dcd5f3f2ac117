"""A job of torchrun whose worker dies: all start again, and go on from the last checkpoint."""

import sys
from pathlib import Path

import torch

from support.jobs import ran

WORKER = Path(__file__).with_name("ddp_worker.py")
#: one host, and a rendezvous that takes workers in again after a restart
OPTIONS = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
#: a store of its own for every attempt: PyTorch 2.13 leaves addresses of the dead in the launcher's, which
#: init_process_group then tries to reach
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_a_restart_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    ran(torchrun, *OPTIONS, WORKER, tmp_path, **ENVIRONMENT)
    assert (tmp_path / "ended").exists()
    names = ("whole-0", "whole-1", "restarted-0", "restarted-1")
    ends = [torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in names]
    assert [first for first, _ in ends] == [0, 0, 10, 10]
    for states in zip(*(states for _, states in ends), strict=True):
        for weights in zip(*(state.values() for state in states), strict=True):
            assert all(torch.equal(weight, weights[0]) for weight in weights)
