"""Methods with several networks, several losses or several passes."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loops.way import fitted, loop
from support.passes import backward, net_of

SGD = torch.optim.SGD
THROWN = {"DDP": "thrown away", "Horovod": "zero_grad"}


def gan_of(on, turns):
    maker, critic = net_of(), torch.nn.Linear(3, 1)
    first, second = on.model(maker), on.model(critic)
    make = on.optimizer(first, SGD(maker.parameters(), lr=0.1))
    judge = on.optimizer(second, SGD(critic.parameters(), lr=0.1))
    for inputs, targets in on.batches():
        if turns:
            critic.requires_grad_(True)
        judge.zero_grad()
        (second(first(inputs).detach()).tanh().mean() - second(targets).tanh().mean()).backward()
        judge.step()
        if turns:
            critic.requires_grad_(False)
        make.zero_grad()
        (-second(first(inputs)).tanh().mean()).backward()
        make.step()


@loop(refused=THROWN)
def gan(on):
    gan_of(on, turns=False)


@loop()
def gan_whose_critic_is_frozen_in_turn(on):
    gan_of(on, turns=True)


@loop(refused=THROWN, conserves=False)
def sharpness_aware_minimization(on):
    model, optimizer = on.both(net_of())
    for batch in on.batches():
        backward(model, batch)
        before = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for one in model.parameters():
                one.add_(0.05 * one.grad)
        optimizer.zero_grad()
        backward(model, batch)
        with torch.no_grad():
            for one, other in zip(model.parameters(), before, strict=True):
                one.copy_(other)
        optimizer.step()


@loop(without=("FSDP2",))
def averages_of_weights(on):
    """The exponential average, and that of stochastic weight averaging."""
    net = net_of()
    model, optimizer = on.both(net)
    averages = AveragedModel(net), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in on.batches():
        backward(model, batch)
        optimizer.step()
        for average in averages:
            average.update_parameters(net)
    return [one.detach() for average in averages for one in average.module.parameters()]


class ActorCritic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = (
            torch.nn.Linear(12, 8),
            torch.nn.Linear(8, 3),
            torch.nn.Linear(8, 1),
        )

    def forward(self, inputs):
        found = self.body(inputs).tanh()
        return self.actor(found), self.critic(found)


@loop(refused=dict.fromkeys(("DDP", "FSDP2", "module"), "one of all the model's parameters"))
def two_optimizers_over_one_model(on):
    net = ActorCritic()
    model = on.model(net)
    acts = on.optimizer(model, SGD([*net.body.parameters(), *net.actor.parameters()], lr=0.1))
    judges = on.optimizer(model, SGD(net.critic.parameters(), lr=0.1))
    for inputs, targets in on.batches():
        acts.zero_grad()
        judges.zero_grad()
        outputs, value = model(inputs)
        (mse_loss(outputs, targets) + value.square().mean()).backward()
        acts.step()
        judges.step()


@loop(refused={"DDP": "one per attach"})
def one_optimizer_over_two_models(on):
    both = torch.nn.ModuleList([on.model(net_of()), on.model(net_of(1))])
    optimizer = on.optimizer(both, SGD(both.parameters(), lr=0.1))
    for inputs, targets in on.batches():
        optimizer.zero_grad()
        mse_loss(both[0](inputs) + both[1](inputs), targets).backward()
        optimizer.step()


@loop(refused=THROWN)
def adversarial_inputs_by_backward(on):
    model, optimizer = on.both(net_of())
    for inputs, targets in on.batches():
        inputs.requires_grad_()
        mse_loss(model(inputs), targets).backward()
        optimizer.zero_grad()
        mse_loss(model((inputs + 0.1 * inputs.grad.sign()).detach()), targets).backward()
        optimizer.step()


@loop(refused={"Horovod": "backward_passes_per_step"}, reference="module")
def two_losses_of_one_graph(on):
    model, optimizer = on.both(net_of())
    for inputs, targets in on.batches():
        optimizer.zero_grad()
        outputs = model(inputs)
        mse_loss(outputs, targets).backward(retain_graph=True)
        (0.1 * outputs.square().mean()).backward()
        optimizer.step()


@loop(refused={"DDP": "create_graph", "Horovod": "create_graph"})
def second_order_gradients(on):
    model, optimizer = on.both(net_of())
    for inputs, targets in on.batches():
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward(create_graph=True)
        optimizer.step()


@loop(without=("FSDP2",))
def look_ahead(on):
    """Every two steps parameters go half the way back."""
    net = net_of()
    model, optimizer = on.both(net)
    slow = [one.detach().clone() for one in net.parameters()]
    for number, batch in enumerate(on.batches(6)):
        backward(model, batch)
        optimizer.step()
        if number % 2:
            with torch.no_grad():
                for one, other in zip(net.parameters(), slow, strict=True):
                    other.lerp_(one, 0.5)
                    one.copy_(other)


@loop(conserves=False)
def resumed_in_mid_epoch(on):
    batches = list(on.batches(6))
    model, optimizer = on.both(net_of(), momentum=0.9)
    for batch in batches[:3]:
        backward(model, batch)
        optimizer.step()
    saved = model.state_dict(), optimizer.state_dict()
    on.nets.clear()
    again = on.model(net_of(9))
    again.load_state_dict(saved[0])
    other = on.optimizer(again, SGD(again.parameters(), lr=0.1, momentum=0.9))
    other.load_state_dict(saved[1])
    for batch in batches[3:]:
        backward(again, batch)
        other.step()


@loop(
    without=("FSDP2", "module", "Horovod"),
    refused=dict.fromkeys(("DDP", "DDP steps"), "as many batches"),
    conserves=False,
)
def ranks_with_fewer_batches_that_join(on):
    model, optimizer = on.both(net_of())
    with model.join():
        for batch in on.batches(5 - on.rank):
            backward(model, batch)
            optimizer.step()


def distilled(model, inputs, targets):
    with torch.no_grad():
        taught = net_of(7).eval()(inputs)
    outputs = model(inputs)
    return mse_loss(outputs, targets) + mse_loss(outputs, taught)


def penalized(model, inputs, targets):
    outputs = model(inputs.requires_grad_())
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return mse_loss(outputs, targets) + (slope.norm(dim=1) - 1).square().mean()


def attacked(model, inputs, targets):
    for _ in range(2):
        inputs = inputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(mse_loss(model(inputs), targets), inputs)
        inputs = inputs + 0.1 * slope.sign()
    return mse_loss(model(inputs.detach()), targets)


def called_twice(model, inputs, targets):
    one, other = model(inputs), model(inputs.flip(0))
    return mse_loss(one, targets) + mse_loss(one, other.detach()) + mse_loss(other, targets.flip(0))


fitted("distillation", loss=distilled)
fitted("gradient_penalty", loss=penalized, without=("FSDP2",))
fitted("adversarial_inputs", loss=attacked)
fitted("a_model_that_is_called_twice", loss=called_twice)
