"""Training on a real GPU: the bits of the same training on the CPU. Skipped where there is none."""

from __future__ import annotations

import horovod.torch as stock
import numpy as np
import pytest
import torch

from horovod_sparse.feedback import parse_recipe
from horovod_sparse.pytorch.accumulator import TorchAccumulator
from horovod_sparse.torch import SparseCompressor
from support.linear import dyadic
from support.optimizers import make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")

SHAPES = {"first": (400, 300), "bias": (7,), "second": (3, 50, 110)}


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    stock.init()


def model(device):
    """Parameters on the device, whose gradients are chosen."""
    parameters = {
        name: torch.nn.Parameter(torch.ones(shape, device=device)) for name, shape in SHAPES.items()
    }
    return torch.nn.ParameterDict(parameters)


def backward(net, step, streams=(None,)):
    """Gradients that depend on the step alone; parameters take turns on the streams."""
    device, losses = net["first"].device, []
    for number, (name, parameter) in enumerate(net.items()):
        given = torch.from_numpy(dyadic(SHAPES[name], step, name)).float().to(device)
        stream = streams[number % len(streams)]
        if stream is None:
            losses.append((parameter * given).sum())
            continue
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses.append((parameter * given).sum())
        torch.cuda.current_stream().wait_stream(stream)
    sum(losses).backward()


def trained(device, text, wrap, num_streams=0, steps=6):
    net = model(device)
    optimizer = wrap(net, text)
    streams = [torch.cuda.Stream() for _ in range(num_streams)] or [None]
    found = []
    for step in range(steps):
        backward(net, step, streams)
        optimizer.synchronize()
        found += [parameter.grad.cpu().clone() for parameter in net.values()]
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    return found + [parameter.detach().cpu().clone() for parameter in net.values()]


def sparse(net, text):
    return make(net, text, bucket_bytes=2**20)


def behind_horovods(net, text):
    return stock.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5),
        named_parameters=net.named_parameters(),
        compression=SparseCompressor(parse_recipe(text)),
    )


@pytest.mark.parametrize("wrap", [sparse, behind_horovods])
@pytest.mark.parametrize("text", ["topk:density=0.01", "exdyna:density=0.01", "cltk:density=0.01"])
def test_the_cpus_bits(wrap, text):
    expected = trained("cpu", text, wrap)
    assert all(map(torch.equal, expected, trained("cuda", text, wrap)))


@pytest.mark.parametrize("wrap", [sparse, behind_horovods])
def test_the_cpus_bits_from_several_streams(wrap):
    expected = trained("cpu", "topk:density=0.01", wrap)
    for num_streams in (1, 2, 3):
        found = trained("cuda", "topk:density=0.01", wrap, num_streams)
        assert all(map(torch.equal, expected, found)), num_streams


def test_dense_parameters():
    text = "topk:density=0.01,dense_below=8"
    assert all(map(torch.equal, trained("cpu", text, sparse), trained("cuda", text, sparse)))


def test_a_checkpoint_moves_between_devices():
    ends = []
    for devices in (("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")):
        saved = None
        for part, device in enumerate(devices):
            net = model(device)
            optimizer = sparse(net, "topk:density=0.01")
            if saved is not None:
                # as torch.load(map_location=device) gives it
                entry = {**saved, "residuals": {k: v.to(device) for k, v in saved["residuals"].items()}}
                optimizer.load_state_dict({**optimizer.state_dict(), "horovod_sparse": entry})
            for step in range(3 * part, 3 * part + 3):
                backward(net, step)
                optimizer.step()
                optimizer.zero_grad()
            saved = optimizer.state_dict()["horovod_sparse"]
        ends.append(saved["residuals"])
    for other in ends[1:]:
        assert all(torch.equal(ends[0][name], other[name]) for name in SHAPES)


def test_what_is_kept_is_on_the_gpu():
    net = model("cuda")
    optimizer = sparse(net, "topk:density=0.01")
    for part in optimizer._synchronizer.sparse:
        assert isinstance(part.bucket.accumulator, TorchAccumulator)
        assert part.bucket.accumulator.device.type == "cuda"
    backward(net, 0)
    optimizer.synchronize()
    held = optimizer.state_dict()["horovod_sparse"]["residuals"]
    for name, parameter in net.items():
        total = parameter.grad.cpu() + held[name]
        np.testing.assert_array_equal(total.numpy(), dyadic(SHAPES[name], 0, name))
