"""Training on a real GPU: the bits of the same training on the CPU. Skipped where there is none."""

import horovod.torch as stock
import pytest
import torch

from horovod_sparse.feedback import parse_recipe
from horovod_sparse.torch import SparseCompressor
from support.linear import dyadic
from support.optimizers import make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here")

TEXTS = [
    *(f"{name}:density=0.01" for name in ("topk", "exdyna", "cltk")),
    "signsgd",
    "signsgd:vote=majority,feedback=none",
    "qsgd:group=96",
    "qsgd:norm=l2,levels=127",
]
SHAPES = {"first": (400, 300), "bias": (7,), "second": (3, 50, 110)}


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    stock.init()


def model(device):
    parameters = {
        name: torch.nn.Parameter(torch.ones(shape, device=device)) for name, shape in SHAPES.items()
    }
    return torch.nn.ParameterDict(parameters)


def backward(net, step):
    device = net["first"].device
    given = {name: torch.from_numpy(dyadic(shape, step, name)).float() for name, shape in SHAPES.items()}
    sum((parameter * given[name].to(device)).sum() for name, parameter in net.items()).backward()


def trained(device, text, wrap, steps=6):
    net = model(device)
    optimizer = wrap(net, text)
    found = []
    for step in range(steps):
        backward(net, step)
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
@pytest.mark.parametrize("text", TEXTS)
def test_the_cpus_bits(wrap, text):
    expected = trained("cpu", text, wrap)
    assert all(map(torch.equal, expected, trained("cuda", text, wrap)))
