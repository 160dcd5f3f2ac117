"""A small net, batches of each rank, and the plainest loop."""

import torch
from torch.nn.functional import mse_loss

STEPS = 16


def net_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))


def batches(rank: int, count: int = STEPS):
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(count):
        inputs = torch.randn(8, 12, generator=generator)
        yield inputs, torch.sin(3 * inputs[:, :3])


def backward(net, batch) -> torch.Tensor:
    net.zero_grad()
    loss = mse_loss(net(batch[0]), batch[1])
    loss.backward()
    return loss


def train(net, optimizer, rank, count: int = STEPS, *, before=None, between=None, each=None) -> None:
    """Of a step, what is changed in its batch, in its gradients, and what is looked at behind it."""
    for step, batch in enumerate(batches(rank, count)):
        backward(net, batch if before is None else before(step, batch))
        if between is not None:
            between(step)
        optimizer.step()
        if each is not None:
            each(step)


def sick(at: int, rank: int):
    """Spoils rank 1's batch of one step."""
    return lambda step, batch: (batch[0] * (float("nan") if (step, rank) == (at, 1) else 1.0), batch[1])


def flat(net) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in net.parameters()])


def adamw(net, **more):
    return torch.optim.AdamW(net.parameters(), **{"lr": 1e-2, "betas": (0.9, 0.99), **more})


def momentum(net, **more):
    """SGD, whose ranks step ahead where they move alone."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, **more)


def muon(net):
    return torch.optim.Muon([one for one in net.parameters() if one.ndim == 2], lr=0.02, weight_decay=0.0)


def begun(every: int = 1, delay: int = 0, text: str = "best:density=0.1", seed: int = 0, make=adamw, **more):
    """A net, its optimizer, and what exchanges its steps over torch.distributed."""
    from horovod_sparse import ddp

    net = net_of(seed)
    optimizer = make(net, **more)
    return net, optimizer, ddp.attach(net, text, optimizer, every=every, delay=delay)
