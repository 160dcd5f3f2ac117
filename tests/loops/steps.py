"""What scripts do around a step of one optimizer over one model."""

from __future__ import annotations

import contextlib
import copy
import functools

import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler

from loops.way import WAYS, fitted, loop
from support.passes import backward, net_of

THROWN = {"DDP": "thrown away", "Horovod": "zero_grad"}


def in_bfloat16(model, inputs, targets):
    with torch.autocast("cpu", torch.bfloat16):
        return mse_loss(model(inputs), targets)


def clipped(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def noisy(model):
    for one in model.parameters():
        one.grad.add_(0.01)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10).step


def by_the_loss(optimizer):
    return functools.partial(lr_scheduler.ReduceLROnPlateau(optimizer, patience=0).step, 1.0)


LATER = {"refused": {"Horovod": "synchroniz"}, "conserves": False}
fitted("plain")
fitted("momentum_and_weight_decay", count=8, momentum=0.9, nesterov=True, weight_decay=0.01)
fitted("adamw", count=8, kind=torch.optim.AdamW, lr=0.01)
fitted("clipped_norms", before=clipped, **LATER)
fitted("noise_in_gradients", before=noisy, **LATER)
fitted("logged_gradients", before=lambda model: sum(float(one.grad.norm()) for one in model.parameters()))
fitted("bfloat16_autocast", loss=in_bfloat16)
fitted("one_cycle_made_after_attaching", count=9, momentum=0.9, schedule=one_cycle)
fitted("rate_by_the_loss", schedule=by_the_loss)


@loop()
def model_loaded_between_steps(on):
    best = {}
    keep = lambda model, _: best.update(copy.deepcopy(model.state_dict()))  # noqa: E731
    on.fit(count=6, at={1: keep, 4: lambda model, _: model.load_state_dict(best)})


@loop()
def groups_of_parameters(on):
    net = net_of()
    model = on.model(net)
    decay = [one for one in model.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1, "lr": 0.05}, {"params": rest}]
    optimizer = on.optimizer(model, torch.optim.SGD(groups, lr=0.1))
    for batch in on.batches():
        backward(model, batch)
        optimizer.step()


@loop()
def accumulation_with_a_short_last_window(on):
    model = on.model(net_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = on.optimizer(model, optimizer, backward_passes_per_step=3)
    for number, batch in enumerate(batches := list(on.batches(7))):
        ends = number % 3 == 2 or number == len(batches) - 1
        with contextlib.nullcontext() if ends else on.no_sync(model):
            (mse_loss(model(batch[0]), batch[1]) / 3).backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()


@loop(refused={"Horovod": "backward_passes_per_step"})
def accumulation_without_no_sync(on):
    model, optimizer = on.both(net_of())
    for number, (inputs, targets) in enumerate(on.batches(6)):
        (mse_loss(model(inputs), targets) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def cleared(on, clear, **more):
    model, optimizer = on.both(net_of(), **more)
    for inputs, targets in on.batches():
        clear(optimizer)
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


@loop(conserves=False)
def gradients_set_to_zeros(on):
    cleared(on, lambda optimizer: optimizer.zero_grad(set_to_none=False))


@loop(conserves=False)
def gradients_that_are_never_cleared(on):
    cleared(on, lambda optimizer: None, lr=0.01)


def scaled(on, count=5, factor=lambda number: 1):
    model, optimizer = on.both(net_of())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number, (inputs, targets) in enumerate(on.batches(count)):
        optimizer.zero_grad()
        scaler.scale(mse_loss(model(inputs), targets) * factor(number)).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(conserves=False)
def loss_scaler(on):
    scaled(on)


@loop(conserves=False, reference="DDP")
def overflow_on_one_rank(on):
    scaled(on, 6, factor=lambda number: 1e38 if number == 3 and on.rank == 1 else 1)


@loop()
def closure(on):
    model, optimizer = on.both(net_of())
    for batch in on.batches():
        optimizer.step(lambda batch=batch: backward(model, batch))


@loop(refused=dict.fromkeys([way for way in WAYS if way != "Horovod"], "along a line"), conserves=False)
def lbfgs(on):
    model, optimizer = on.both(net_of(), torch.optim.LBFGS, max_iter=2)
    for batch in on.batches(3):
        optimizer.step(lambda batch=batch: backward(model, batch))


@loop(without=("FSDP2", "module", "Horovod"))
def compiled_step(on):
    model, optimizer = on.both(net_of())
    step = torch.compile(optimizer.step, backend="eager")
    for batch in on.batches():
        backward(model, batch)
        step()


@loop()
def one_cycle_made_before_attaching(on):
    model = on.model(net_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    wrapped = on.optimizer(model, optimizer)
    for batch in on.batches(9):
        backward(model, batch)
        wrapped.step()
        schedule.step()


@loop()
def rate_of_zero_in_warmup_and_end(on):
    model, optimizer = on.both(net_of())
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.5, 1.0, 1.0, 0.0, 0.0][step])
    for batch in on.batches(5):
        before = [one.detach().clone() for one in model.parameters()]
        backward(model, batch)
        optimizer.step()
        if schedule.get_last_lr() == [0.0]:
            assert all(map(torch.equal, before, model.parameters()))
        schedule.step()


@loop()
def validation_between_steps(on):
    model, optimizer = on.both(net_of())
    for inputs, targets in on.batches():
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            for inputs, _ in on.batches(2 + on.rank, seed=1):
                model(inputs)
        model.train()


@loop(refused=THROWN)
def batches_that_are_skipped_after_backward(on):
    model, optimizer = on.both(net_of())
    for number, batch in enumerate(on.batches()):
        backward(model, batch)
        if number == 2:
            optimizer.zero_grad()
            continue
        optimizer.step()


@loop()
def batches_that_are_skipped_before_backward(on):
    model, optimizer = on.both(net_of())
    for number, (inputs, targets) in enumerate(on.batches()):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        if number == 2:
            continue
        loss.backward()
        optimizer.step()


@loop(without=("FSDP2",), refused={"DDP": "of this rank alone"}, conserves=False)
def gradients_by_hand(on):
    model, optimizer = on.both(net_of())
    for inputs, targets in on.batches():
        loss = mse_loss(model(inputs), targets)
        parameters = list(model.parameters())
        for one, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            one.grad = gradient
        optimizer.step()


@loop()
def two_optimizers_in_turn(on):
    model = on.model(net_of())
    for kind in (torch.optim.SGD, torch.optim.SGD):
        optimizer = on.optimizer(model, kind(model.parameters(), lr=0.1))
        for batch in on.batches(3):
            backward(model, batch)
            optimizer.step()
