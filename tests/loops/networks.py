"""Networks of every shape, under one optimizer."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from loops.way import WAYS, fitted, loop
from support.passes import backward, net_of


class Tied(torch.nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.first, self.second, self.last = net_of(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.last.weight, self.reentrant = self.second.weight, reentrant

    def forward(self, inputs):
        if self.reentrant is None:
            return self.last(torch.tanh(self.second(self.first(inputs))))
        inputs = inputs.requires_grad_(self.reentrant)
        return self.last(
            torch.tanh(self.second(checkpoint(self.first, inputs, use_reentrant=self.reentrant)))
        )


class More(torch.nn.Module):
    """A net with something besides."""

    def __init__(self, more, **buffers):
        super().__init__()
        self.net, self.more = net_of(), None if more is None else torch.nn.Parameter(more)
        for name, one in buffers.items():
            self.register_buffer(name, one)

    def forward(self, inputs):
        return self.net(inputs) + (0.0 if self.more is None else (self.more * 1.0).real.sum())


@loop(without=("DDP", "FSDP2"))
def nothing_to_train(on):
    net = net_of().requires_grad_(False)
    model, optimizer = on.both(net)
    for inputs, _ in on.batches(2):
        model(inputs)
        optimizer.step()


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = net_of(), net_of(1)

    def forward(self, inputs, first, second):
        return (self.first(inputs) if first else 0.0) + (self.second(inputs) if second else 0.0)


@loop(reference="module")
def parameters_unused_on_all_ranks_or_on_one(on):
    model = on.model(Branches(), find_unused_parameters=True)
    optimizer = on.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    branches = [(False, True), (True, False), (True, True), (True, on.rank)] * 2
    for used, (inputs, targets) in zip(branches, on.batches(8), strict=True):
        optimizer.zero_grad()
        mse_loss(model(inputs, *used), targets).backward()
        optimizer.step()


class Words(torch.nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(30, 4, sparse=sparse), torch.nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.table((inputs.abs() * 7).long().clamp(0, 29)).mean(1))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.LSTM(3, 5), torch.nn.Linear(5, 3)

    def forward(self, inputs, state=None):
        found, state = self.cell(inputs.view(8, 4, 3).transpose(0, 1), state)
        return self.head(found[-1]), state


@loop()
def truncated_backpropagation_through_time(on):
    model, optimizer = on.both(Recurrent())
    state = None
    for inputs, targets in on.batches():
        optimizer.zero_grad()
        outputs, state = model(inputs, state)
        mse_loss(outputs, targets).backward()
        optimizer.step()
        state = tuple(one.detach() for one in state)


@loop()
def pruned_in_place(on):
    net = net_of()
    model, optimizer = on.both(net)
    mask = torch.ones(40, 12)
    for number, batch in enumerate(on.batches(6)):
        if number == 3:
            mask[::2] = 0
        backward(model, batch)
        optimizer.step()
        with torch.no_grad():
            net[0].weight.mul_(mask) if on.front != "FSDP2" else net[0].weight.to_local().mul_(mask)


class Adapted(torch.nn.Module):
    """A frozen layer with a trained product of rank 2 beside it."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(12, 3).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(12, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.base(inputs) + self.up(self.down(inputs))


@loop(conserves=False)
def bfloat16_parameters(on):
    on.is_exact = False  # rounded otherwise
    on.fit(
        net_of().bfloat16(),
        loss=lambda model, *batch: mse_loss(model(batch[0].bfloat16()), batch[1].bfloat16()),
    )


class One(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs):
        return self.one * inputs[:, :3]


def normed():
    net = net_of()
    parametrizations.weight_norm(net[0])
    parametrizations.spectral_norm(net[2])
    return net


def plain_convolutional():
    pixels, convolution = torch.nn.Unflatten(1, (2, 3, 2)), torch.nn.Conv2d(2, 4, 2)
    return torch.nn.Sequential(pixels, convolution, torch.nn.Flatten(), torch.nn.Linear(8, 3))


def convolutional():
    return plain_convolutional().to(memory_format=torch.channels_last)


def channels_last(model, _):
    model.to(memory_format=torch.channels_last)


def batch_normed():
    return torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))


def frozen():
    net = net_of()
    net[0].requires_grad_(False)
    return net


def thaw(model, optimizer):
    getattr(model, "module", model)[0].requires_grad_(True)


def by_half(model, *_):
    model.half()
    model.float()


def elsewhere(model, *_):
    for one in model.parameters():
        one.data = one.data.clone()


def shared(model, *_):
    model.share_memory()


NOT_SHARDED = {"without": ("FSDP2",)}
fitted("tied_weights", Tied)
fitted("checkpointed_activations", lambda: Tied(reentrant=False))
fitted("checkpointed_activations_by_reentrance", lambda: Tied(reentrant=True))
fitted("batch_norm", batch_normed)
fitted("convolutions", convolutional)
# of its own sums DistributedDataParallel 2.13 puts some at other positions
_LATER = dict.fromkeys(("DDP steps", "module steps", "Horovod steps"), "order in memory")
_REORDERED = NOT_SHARDED | {"at": {2: channels_last}, "refused": _LATER, "reference": "module"}
fitted("channels_last_after_construction", plain_convolutional, **_REORDERED)
_MOVED = {"without": ("DDP", "FSDP2"), "reference": "module"}
for _move in (by_half, elsewhere, shared):
    fitted(f"moved_{_move.__name__}", plain_convolutional, at={1: _move, 3: _move}, **_MOVED)
fitted("moved_elsewhere_before_a_step", plain_convolutional, before=elsewhere, **_MOVED)
fitted("moved_shared_before_a_step", plain_convolutional, before=shared, **_MOVED)
fitted("compiled_models", lambda: torch.compile(net_of(), backend="eager"), **NOT_SHARDED)
fitted("normed_weights", normed)
fitted("one_parameter", One, **NOT_SHARDED)
fitted("parameters_of_no_elements", lambda: More(torch.zeros(0, 3)), **NOT_SHARDED)
fitted("parameters_of_float64", lambda: More(torch.zeros(4, dtype=torch.float64)), **NOT_SHARDED)
fitted("transposed_parameters", lambda: More(torch.zeros(3, 4).t()), **NOT_SHARDED)
fitted("expanded_buffers", lambda: More(None, masks=torch.ones(1, 3).expand(4, 3)), without=("DDP",))
_COMPLEX = NOT_SHARDED | {"refused": dict.fromkeys(WAYS, "complex")}
fitted("complex_parameters", lambda: More(torch.zeros(4, dtype=torch.complex64)), **_COMPLEX)
fitted("embeddings", Words)
_REFUSED = {"Horovod": "sparse_as_dense", "stock": ""}
fitted("sparse_embeddings", lambda: Words(sparse=True), refused=_REFUSED, **NOT_SHARDED)
fitted("frozen_from_the_start", frozen, leaves_out_frozen=True)
for _name, _at in {"in_mid_training": 3, "before_the_first_step": 0}.items():
    fitted(f"thawed_{_name}", frozen, count=6, at={_at: thaw}, reference="module", conserves=False)


@loop(reference="module")
def frozen_in_mid_training(on):
    net, kept = net_of(), []

    def freeze(*_):
        net[0].requires_grad_(False)
        kept.append(net[0].weight.detach().clone())

    on.fit(net, 6, at={3: freeze})
    assert torch.equal(net[0].weight, kept[0])


@loop(reference="module")
def thawed_by_a_group_of_its_own(on):
    net = frozen()

    def add(model, optimizer):
        net[0].requires_grad_(True)
        optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.01})

    on.fit(net, 6, at={3: add}, leaves_out_frozen=True)


@loop(**NOT_SHARDED)
def pruned_by_masks(on):
    net = net_of()
    on.fit(net, 6, at={3: lambda *_: prune.l1_unstructured(net[0], "weight", amount=0.5)})


@loop(**NOT_SHARDED)
def adapters_that_are_merged(on):
    net = Adapted()

    @torch.no_grad()
    def merge(*_):
        net.base.weight += net.up.weight @ net.down.weight
        net.up.weight.zero_()

    on.fit(net, 6, at={3: merge}, leaves_out_frozen=True)
