"""How a loop's models are trained: by the package or on mean gradients; and what is measured in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse import ddp
from horovod_sparse.tensors.layout import local
from support.passes import net_of

#: front ends; "steps" exchange a rank's own steps, the others its gradients
WAYS = [f"{front}{kind}" for front in ("DDP", "FSDP2", "module", "Horovod") for kind in ("", " steps")]
STEPS = [way for way in WAYS if way.endswith("steps")]
LOOPS: list[Loop] = []


@dataclass(eq=False)
class Loop:
    """A loop, and what it is refused for; else it comes out as on mean gradients.

    Attributes:
        refused: words of the error, by way.
        without: front ends that have no such loop.
        conserves: whether gradients of a step are those of its backward passes, unchanged.
        reference: whose mean gradients it is compared with, "DDP" or "module" (means are taken in the step);
            that of the way itself, if left out.
    """

    train: Callable[[Training], Any]
    refused: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    conserves: bool = True
    reference: str | None = None

    @property
    def name(self) -> str:
        return self.train.__name__

    def words(self, way: str) -> str | None:
        """Returns the words of its error; those of our optimizer hold for stock Horovod's, too."""
        return self.refused.get(way, self.refused.get(way.replace("stock", "Horovod")))


def loop(**more: Any) -> Callable[[Any], Any]:
    """Adds a loop to those that are tested."""

    def add(train: Any) -> Any:
        LOOPS.append(Loop(train, **more))
        return train

    return add


def fitted(name: str, net: Callable[[], torch.nn.Module] = net_of, **more: Any) -> None:
    """Adds the plainest loop over a net, with arguments of `loop` and of `Training.fit`."""
    own = {one: more.pop(one) for one in ("refused", "without", "conserves", "reference") if one in more}

    def train(on: Training) -> None:
        on.fit(net(), **more)

    train.__name__ = name
    loop(**own)(train)


def table() -> str:
    """The loops that are refused, as README.md has them."""
    refused = sorted((one for one in LOOPS if one.refused), key=lambda one: one.name)
    ways = ([way for way, words in one.refused.items() if words] for one in refused)
    rows = (
        f"| {one.name.replace('_', ' ')} | {', '.join(own)} |\n"
        for one, own in zip(refused, ways, strict=True)
    )
    return "| loop | refused in |\n|---|---|\n" + "".join(rows)


class Training:
    """What a loop asks for where a plain script has `DistributedDataParallel(net)` and an optimizer."""

    def __init__(self, way: str, density: float | None) -> None:
        self.stock = way.startswith("stock")
        self.front, _, kind = way.replace("stock", "Horovod").partition(" ")
        self.steps, self.density = kind == "steps", density
        self.text = f"topk:density={density},feedback=best" if self.steps else f"topk:density={density}"
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.nets: list[torch.nn.Module] = []
        self.recorders: list[Recorder] = []
        #: whether own steps at density 1 are the optimizer's of mean gradients
        self.is_exact = True

    def model(self, net: torch.nn.Module, **more: Any) -> Any:
        self.nets.append(net)
        if self.front == "DDP":
            return DistributedDataParallel(net, **more)
        if self.front == "FSDP2" and self.density is not None:
            mesh = init_device_mesh("cpu", (self.size, 1), mesh_dim_names=("replicate", "shard"))
            self.replicas = mesh["replicate"]
            return fully_shard(net, mesh=mesh["shard"])
        return net

    def optimizer(self, model: Any, optimizer: Any, **more: Any) -> Any:
        self.is_exact &= isinstance(optimizer, torch.optim.SGD) or not self.steps
        if self.density is None:
            if self.front != "DDP":
                optimizer.register_step_pre_hook(where_gradients_are(average))
            return optimizer
        recorder = Recorder(optimizer, self.steps)
        if self.front == "Horovod":
            import horovod_sparse.torch as hvd

            names = [(name, one) for name, one in model.named_parameters() if recorder.has(one)]
            compression = hvd.Compression.parse(self.text)
            if self.stock:
                import horovod.torch as hvd
            optimizer = hvd.DistributedOptimizer(optimizer, names, compression=compression, **more)
            sync: Any = None
        else:
            replicas = {"replicas": self.replicas} if self.front == "FSDP2" else {}
            sync = ddp.attach(model, self.text, optimizer, **replicas)
        recorder.watch(optimizer)
        recorder.held = (
            (lambda: optimizer.state_dict()["horovod_sparse"]["residuals"])
            if sync is None
            else (lambda: sync.state_dict()["residuals"])
        )
        recorder.names = {plain(name): one for name, one in model.named_parameters() if recorder.has(one)}
        former = [one for one in self.recorders if not any(map(recorder.has, one.parameters))]
        # elsewhere what stands in gradients before the step is the mean of all ranks already
        own = self.steps or self.front in ("FSDP2", "module")
        self.recorders = [*former, *([recorder] if own else [])]
        return optimizer

    def both(
        self,
        net: torch.nn.Module,
        kind: Any = torch.optim.SGD,
        lr: float = 0.1,
        leaves_out_frozen: bool = False,
        **more: Any,
    ) -> Any:
        """A model and its optimizer, as most loops have them."""
        model = self.model(net)
        trained = [one for one in model.parameters() if one.requires_grad or not leaves_out_frozen]
        return model, self.optimizer(model, kind(trained, lr=lr, **more))

    def fit(
        self,
        net: torch.nn.Module | None = None,
        count: int = 5,
        loss: Callable[..., torch.Tensor] | None = None,
        before: Callable[[Any], Any] | None = None,
        schedule: Callable[[Any], Callable[[], Any]] | None = None,
        at: dict[int, Callable[[Any, Any], Any]] | None = None,
        **more: Any,
    ) -> None:
        """The plainest loop; with a loss of its own, a line before each step, or a schedule after it.

        `at` has what is done to the model and its optimizer before a batch of this number.
        """
        model, optimizer = self.both(net_of() if net is None else net, **more)
        adjust = None if schedule is None else schedule(optimizer)
        for number, (inputs, targets) in enumerate(self.batches(count)):
            if at and number in at:
                at[number](model, optimizer)
            optimizer.zero_grad()
            (mse_loss(model(inputs), targets) if loss is None else loss(model, inputs, targets)).backward()
            if before is not None:
                before(model)
            optimizer.step()
            if adjust is not None:
                adjust()

    def no_sync(self, model: Any) -> Any:
        return model.no_sync() if self.front == "DDP" else contextlib.nullcontext()

    def batches(self, count: int = 5, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(17 + 100 * seed + self.rank)
        for _ in range(count):
            inputs = torch.randn(8, 12, generator=generator)
            yield inputs, torch.sin(3 * inputs[:, :3])

    def ends(self) -> list[torch.Tensor]:
        return [local(one.detach()).clone() for net in self.nets for one in net.parameters()]


def where_gradients_are(then: Callable[[Any], None]) -> Any:
    """A hook before a step, which is carried out after the closure, if the step has one."""

    def hook(optimizer: Any, arguments: Any, named: Any) -> Any:
        given = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if given is None:
            return then(optimizer)

        def closure() -> Any:
            loss = given()
            then(optimizer)
            return loss

        return (arguments[0], closure), {}

    return hook


def average(optimizer: Any) -> None:
    """Takes mean gradients of all ranks."""
    for one in (one for group in optimizer.param_groups for one in group["params"]):
        mean = torch.zeros_like(one) if one.grad is None else one.grad.detach().to_dense()
        shared = torch.cat([mean.reshape(-1), torch.tensor([one.grad is not None]).to(mean)])
        dist.all_reduce(shared)
        if shared[-1].real:
            one.grad = (shared[:-1] / dist.get_world_size()).view_as(one)


class Recorder:
    """Adds up what a rank computes and what steps apply: over all ranks they differ by what is held."""

    def __init__(self, optimizer: Any, steps: bool) -> None:
        self._steps, self.groups = steps, optimizer.param_groups
        self.parameters = [one for group in self.groups for one in group["params"]]
        self.computed, self.applied = (
            {one: torch.zeros_like(local(one.detach())) for one in self.parameters} for _ in range(2)
        )
        self._before: dict[torch.Tensor, torch.Tensor] = {}
        self.held: Any = None
        self.names: dict[str, torch.Tensor] = {}
        group = optimizer.param_groups[0]
        self.knows = not steps or not (group.get("momentum", 1) or group["weight_decay"])
        optimizer.register_step_pre_hook(where_gradients_are(self._compute))

    def has(self, one: torch.Tensor) -> bool:
        return any(one is other for other in self.parameters)

    @torch.no_grad()
    def _compute(self, _: Any) -> None:
        for one, rate in ((one, group["lr"]) for group in self.groups for one in group["params"]):
            self._before[one] = local(one.detach()).clone()
            if one.grad is not None and one in self.computed:
                gradient = local(one.grad.to_dense() if one.grad.is_sparse else one.grad)
                self.computed[one] += gradient * (rate if self._steps else 1.0)

    def watch(self, optimizer: Any) -> None:
        optimizer.register_step_post_hook(self._apply)

    @torch.no_grad()
    def _apply(self, *_: Any) -> None:
        for one in self.parameters:
            if self._steps:
                self.applied[one] += self._before[one] - local(one.detach())
            elif one.grad is not None:
                self.applied[one] += local(one.grad)

    def check(self, size: int) -> None:
        held = {plain(name): one for name, one in self.held().items()}
        for name, one in self.names.items():
            left = self.computed[one] - (local(held[name]).to(one.dtype) if name in held else 0)
            dist.all_reduce(left)
            close(self.applied[one], left / size, name)


def plain(name: str) -> str:
    """Returns a parameter's name without what DistributedDataParallel and torch.compile put before it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Refuses differences beyond rounding."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda why: f"{name}: {why}")
