"""Networks of every shape, under one optimizer."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from loops.way import WAYS, loop
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


@loop()
def tied_weights(on):
    on.fit(Tied())


@loop()
def checkpointed_activations(on):
    on.fit(Tied(reentrant=False))


@loop()
def checkpointed_activations_by_reentrance(on):
    on.fit(Tied(reentrant=True))


@loop()
def batch_norm(on):
    net = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    on.fit(net)


@loop()
def convolutions(on):
    net = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 3, 4)), torch.nn.Conv2d(1, 4, 2), torch.nn.Flatten(), torch.nn.Linear(24, 3)
    )
    on.fit(net.to(memory_format=torch.channels_last))


@loop()
def normed_weights(on):
    net = net_of()
    parametrizations.weight_norm(net[0])
    parametrizations.spectral_norm(net[2])
    on.fit(net)


@loop(without=("FSDP2",))
def one_parameter(on):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, inputs):
            return self.one * inputs[:, :3]

    on.fit(Net())


class More(torch.nn.Module):
    """A net with something besides."""

    def __init__(self, more, **buffers):
        super().__init__()
        self.net, self.more = net_of(), None if more is None else torch.nn.Parameter(more)
        for name, one in buffers.items():
            self.register_buffer(name, one)

    def forward(self, inputs):
        return self.net(inputs) + (0.0 if self.more is None else (self.more * 1.0).real.sum())


@loop(without=("FSDP2",))
def parameters_of_no_elements(on):
    on.fit(More(torch.zeros(0, 3)))


@loop(without=("FSDP2",), refused=dict.fromkeys(WAYS, "complex"))
def complex_parameters(on):
    on.fit(More(torch.zeros(4, dtype=torch.complex64)))


@loop(without=("FSDP2",))
def parameters_of_float64(on):
    on.fit(More(torch.zeros(4, dtype=torch.float64)))


@loop(without=("DDP",))
def expanded_buffers(on):
    on.fit(More(None, masks=torch.ones(1, 3).expand(4, 3)))


@loop(without=("FSDP2",))
def transposed_parameters(on):
    on.fit(More(torch.zeros(3, 4).t()))


@loop(without=("DDP", "FSDP2"))
def nothing_to_train(on):
    net = net_of().requires_grad_(False)
    model, optimizer = on.both(net)
    for inputs, _ in on.batches(2):
        model(inputs)
        optimizer.step()


@loop()
def frozen_from_the_start(on):
    net = net_of()
    net[0].requires_grad_(False)
    model = on.model(net)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = on.optimizer(model, torch.optim.SGD(trained, lr=0.1))
    for batch in on.batches():
        backward(model, batch)
        optimizer.step()


@loop(reference="module")
def frozen_in_mid_training(on):
    net = net_of()
    model, optimizer = on.both(net)
    for number, batch in enumerate(on.batches(6)):
        if number == 3:
            net[0].requires_grad_(False)
            before = net[0].weight.detach().clone()
        backward(model, batch)
        optimizer.step()
    assert torch.equal(net[0].weight, before)


@loop(reference="module", conserves=False)
def thawed_in_mid_training(on):
    net = net_of()
    net[0].requires_grad_(False)
    model, optimizer = on.both(net)
    for number, batch in enumerate(on.batches(6)):
        if number == 3:
            net[0].requires_grad_(True)
        backward(model, batch)
        optimizer.step()


@loop(reference="module")
def thawed_by_a_group_of_its_own(on):
    net = net_of()
    net[0].requires_grad_(False)
    model = on.model(net)
    optimizer = on.optimizer(model, torch.optim.SGD(net[2].parameters(), lr=0.1))
    for number, batch in enumerate(on.batches(6)):
        if number == 3:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.01})
        backward(model, batch)
        optimizer.step()


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = net_of(), net_of(1)

    def forward(self, inputs, first, second):
        return (self.first(inputs) if first else 0.0) + (self.second(inputs) if second else 0.0)


@loop(reference="module")
def unused_parameters(on):
    model = on.model(Branches(), find_unused_parameters=True)
    optimizer = on.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (inputs, targets) in enumerate(on.batches(6)):
        optimizer.zero_grad()
        mse_loss(model(inputs, number % 2, number % 2 == 0), targets).backward()
        optimizer.step()


@loop(reference="module")
def used_on_one_rank_alone(on):
    model = on.model(Branches(), find_unused_parameters=True)
    optimizer = on.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (inputs, targets) in enumerate(on.batches(6)):
        optimizer.zero_grad()
        mse_loss(model(inputs, True, number % 2 and on.rank), targets).backward()
        optimizer.step()


class Words(torch.nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(30, 4, sparse=sparse), torch.nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.table((inputs.abs() * 7).long().clamp(0, 29)).mean(1))


@loop()
def embeddings(on):
    on.fit(Words())


@loop(without=("FSDP2",), refused={"Horovod": "sparse_as_dense", "stock": ""})
def sparse_embeddings(on):
    on.fit(Words(sparse=True))


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


@loop(without=("FSDP2",))
def pruned_by_masks(on):
    net = net_of()
    model, optimizer = on.both(net)
    for number, batch in enumerate(on.batches(6)):
        if number == 3:
            prune.l1_unstructured(net[0], "weight", amount=0.5)
        backward(model, batch)
        optimizer.step()
        if number >= 3:
            assert not net[0].weight[net[0].weight_mask == 0].any()


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


@loop(without=("FSDP2",))
def adapters_that_are_merged(on):
    net = Adapted()
    model = on.model(net)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = on.optimizer(model, torch.optim.SGD(trained, lr=0.1))
    for number, batch in enumerate(on.batches(6)):
        if number == 3:
            with torch.no_grad():
                net.base.weight += net.up.weight @ net.down.weight
                net.up.weight.zero_()
        backward(model, batch)
        optimizer.step()


@loop(conserves=False)
def bfloat16_parameters(on):
    on.is_exact = False  # rounded otherwise
    on.fit(
        net_of().bfloat16(),
        loss=lambda model, *batch: mse_loss(model(batch[0].bfloat16()), batch[1].bfloat16()),
    )
