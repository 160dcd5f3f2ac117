"""Training on a real GPU: the bits of the same training on the CPU. Skipped where there is none."""

import horovod.torch as stock
import pytest
import torch

from horovod_sparse.feedback import parse_recipe
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
