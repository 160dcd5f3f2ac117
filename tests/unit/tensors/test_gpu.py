"""Training on a real GPU: the bits of the same training on the CPU. Skipped where there is none."""

import horovod.torch as stock
import pytest
import torch

from support.dyadic import gradients_for
from support.linear import LinearModel
from support.optimizers import train_step, wrapped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")

TEXTS = [
    *(f"{name}:density=0.01" for name in ("topk", "exdyna", "cltk")),
    "signsgd",
    "qsgd:group=96",
    "qsgd:levels=127",
]
SHAPES = {"first": (400, 300), "bias": (7,), "second": (3, 50, 110)}


@pytest.mark.parametrize("front", ["own", "stock"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_cpus_bits(front, text, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    stock.init()
    found = []
    for device in ("cpu", "cuda"):
        net = LinearModel(SHAPES).to(device)
        optimizer = wrapped(front, net, text, {"bucket_bytes": 2**20} if front == "own" else {})
        steps = [train_step(net, optimizer, gradients_for(SHAPES)(0, step)) for step in range(6)]
        found.append([one.cpu() for given in [*steps, net.state_dict()] for one in given.values()])
    assert all(map(torch.equal, *found))
