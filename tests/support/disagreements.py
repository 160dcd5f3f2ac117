"""Cases of two ranks that do not do the same: loops as users write them, and what rank 1 has else.

Beside each are the words by which ranks have to name it. Add a row to try another; see `pairs`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, GRADIENTS, LOCAL, PLAIN = "steps", "gradients", "local", "plain"
_TEXTS = {STEPS: "best:density=0.1", LOCAL: "topk:density=0.1"}


def small(width: int = 16, last: int = 4, **more: Any) -> torch.nn.Sequential:
    first = torch.nn.Linear(24, width)
    return torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(width, last, **more))


def renamed(*names: str) -> torch.nn.Sequential:
    """The same parameters under other names, or in another order: the forward pass stays."""
    net, made = small(), torch.nn.Sequential()
    for name, part in dict(zip(names, (net[0], net[2]), strict=True)).items():
        made.add_module(name, part)
    made._modules = dict(sorted(made._modules.items()))
    made.forward = net.forward
    return made


def frozen(net: Any) -> torch.nn.Module:
    net[0].bias.requires_grad_(False)
    net[0].bias.grad = None
    return net


def adamw(net: torch.nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in net.parameters() if one.requires_grad], **{"lr": 1e-3, **more})


def sgd(net: torch.nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr)


def everything(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 1e-2)


def grouped(net: torch.nn.Module, order: int = 1, at: int = 2) -> torch.optim.Optimizer:
    every = list(net.parameters())
    return torch.optim.AdamW([{"params": every[:at]}, {"params": every[at:]}][::order], lr=1e-3)


def nothing(run: Run, step: int) -> Any:
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A user's loop: what it makes, and what happens before a forward pass, around it, and before a step."""

    way: str = STEPS
    model: Callable[[], torch.nn.Module] = small
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = adamw
    compression: Any = ""
    options: dict[str, Any] = field(default_factory=dict)
    wrapper: dict[str, Any] | None = field(default_factory=dict)
    attached: bool = True
    before: Callable[[Run, int], Any] = nothing
    around: Callable[[Run, int], Any] = nothing
    between: Callable[[Run, int], Any] = nothing
    skips: Callable[[Run, int], Any] = nothing
    steps: int = 5
    passes: int = 1
    finishes: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    protocol: int = 0
    scale: float = 0.0


class Run:
    """One rank's loop under way."""

    def __init__(self, front: Any, loop: Loop, rank: int) -> None:
        self.rank, self.loop = rank, loop
        self.sync: Any = None
        self.kept: Any = None
        torch.manual_seed(0)
        self.net: Any = loop.model()
        self.optimizer: Any = loop.optimizer(self.net)
        text = loop.compression if loop.compression != "" else _TEXTS.get(loop.way, "topk:density=0.1")
        self.scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale or 1.0, enabled=loop.scale > 0)
        self.model, self.optimizer = front(self, text)

    def go(self) -> list[float]:
        """Trains, and returns what is compared between ranks."""
        loop = self.loop
        for step in range(loop.steps):
            loop.before(self, step)
            for one in range(loop.passes):
                torch.manual_seed(100 * step + 10 * one + self.rank)
                with loop.around(self, step):
                    self.scaler.scale(self.model(torch.randn(8, 24)).square().mean()).backward()
            loop.between(self, step)
            with loop.skips(self, step) as left_out:
                if not left_out:
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
            self.optimizer.zero_grad()
        if loop.finishes and hasattr(self.sync, "finish"):
            self.sync.finish()
        return sorted(float(one.detach().double().sum()) for one in self.net.parameters())


def over_ddp(run: Run, compression: Any) -> tuple[Any, Any]:
    from horovod_sparse import ddp

    loop, model = run.loop, run.net
    if loop.wrapper is not None and loop.way != PLAIN:
        model = DistributedDataParallel(run.net, **loop.wrapper)
    if loop.attached and loop.way == LOCAL:
        run.sync = ddp.LocalSteps(
            run.optimizer, model, **{"every": 2, "compression": compression, **loop.options}
        )
    elif loop.attached and compression is not None:
        run.sync = ddp.attach(model, compression, run.optimizer, **loop.options)
    return model, run.optimizer


def over_horovod(run: Run, compression: Any) -> tuple[Any, Any]:
    import horovod_sparse.torch as hvd

    loop, made = run.loop, run.optimizer
    if loop.attached and loop.way == LOCAL:
        run.sync = hvd.LocalSteps(made, run.net, **{"every": 2, "compression": compression, **loop.options})
    elif loop.attached:
        given = {name: getattr(hvd, one) if name == "op" else one for name, one in loop.options.items()}
        compression = hvd.Compression.none if compression is None else compression
        run.sync = made = hvd.DistributedOptimizer(made, run.net.named_parameters(), compression, **given)
    return run.net, made


def warmed() -> None:
    """Imports and compiles before a fork what every case would."""
    import torch._dynamo

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for way in (PLAIN, STEPS, LOCAL):
        Run(over_ddp, Loop(way=way, wrapper=None, optimizer=sgd if way == PLAIN else adamw), 0).go()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Case:
    name: str
    words: str
    both: Loop
    other: dict[str, Any]
    kinds: tuple[str, ...]
    #: over what a rank may end in words of PyTorch's, Gloo's or Horovod's own
    theirs: tuple[str, ...] = ()

    def carried_out(self, kind: str, rank: int, folder: Path) -> list[float]:
        from horovod_sparse.training import agreement

        loop = replace(self.both, **self.other) if rank == 1 else self.both
        os.environ.update(loop.variables)
        agreement.PROTOCOL += loop.protocol
        if kind == "ddp":
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
            return Run(over_ddp, loop, rank).go()
        import horovod_sparse.torch as hvd

        hvd.init()
        return Run(over_horovod, loop, rank).go()


def at(number: int, action: Callable[[Run], Any]) -> Callable[[Run, int], Any]:
    return lambda run, step: action(run) if step == number else None


def raises(run: Run) -> None:
    raise ValueError("of the user")


def put(value: float, into: str = "grad") -> Callable[[Run], None]:
    """Writes a value into a gradient's or a parameter's first element."""
    return lambda run: getattr(next(iter(run.net.parameters())), into).view(-1)[:1].fill_(value)


def halved(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def keeping(again: int) -> Callable[[Run, int], None]:
    """Keeps the state before step 1, and loads it before another."""

    def event(run: Any, step: int) -> None:
        if step == 1:
            run.kept = run.sync.state_dict()
        if step == again:
            run.sync.load_state_dict(run.kept)

    return event


def without_sync(run: Run, step: int) -> Any:
    return run.model.no_sync() if step == 2 else contextlib.nullcontext()


@contextlib.contextmanager
def interrupted(run: Run, step: int) -> Any:
    """Raises an interrupt while this rank waits for one that is late, and goes on."""

    def handle(*_: Any) -> None:
        raise KeyboardInterrupt

    if step == 2:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def ended_by(number: int) -> Callable[[Run], None]:
    return lambda run: os.kill(os.getpid(), number)


CASES: list[Case] = []
_DDP, _HVD, _ALL = ("ddp",), ("horovod",), f"{STEPS} {GRADIENTS} {LOCAL}"
_BOTH, _EVERY = f"{STEPS} {GRADIENTS}", f"{_ALL} {PLAIN}"


def row(
    name: str,
    words: str,
    ways: str = _EVERY,
    /,
    kinds: Any = ("ddp", "horovod"),
    both: Any = None,
    theirs: tuple[str, ...] = (),
    **other: Any,
) -> None:
    """Adds a case for each way to train."""
    for way in ways.split():
        if way != PLAIN or "ddp" in kinds:
            more = {} if way != GRADIENTS and way != PLAIN else {"optimizer": sgd}
            loop = Loop(way=way, **{**more, **(both or {})})
            of_case = ("ddp",) if way == PLAIN else kinds
            CASES.append(Case(f"{name}, {way}", words, loop, other, of_case, theirs))


# fmt: off
_SAME = r"waited|come|ended|lost|left|reset|closed|thrown away|pass|shut down|before call|prohibited"
_LEFT = rf"of the user|signal|{_SAME}"
for _text in ("topk:density=0.2", "exdyna:density=0.1", "topk:density=0.1,values=float16",
              "topk:density=0.1,values=misspelt", "topk:density=0.1,indices=int32",
              "topk:density=0.1,feedback=none", "dense",
              "topk:density=0.1,feedback=momentum(momentum=0.9)", "topk:density=0.1,dense_below=200",
              "topk:density=0.1,feedback=error(clip_norm=1.0)", "topk:density=0.1,feedback=adam",
              "qsgd:levels=7", "topk:density=0.1,schedule=exponential(steps=3,start=0.5)"):
    row(_text, "compression|engine|wire format|feedback", f"{GRADIENTS} {PLAIN}", compression=_text)
for _text in "best:density=0.2", "exdyna:density=0.1", "topk:density=0.1,feedback=none", "signsgd":
    row(_text, "compression|feedback", f"{STEPS} {LOCAL}", compression=_text)
# whoever is not attached is in a collective of PyTorch's or Horovod's when the other rank ends
row("no compression", "compression|attach|whole|come|waited", theirs=_DDP + _HVD, compression=None)
row("not attached", "attach|come|waited", theirs=_DDP + _HVD, attached=False)
row("another way", "engine|differs|come", STEPS, way=GRADIENTS, optimizer=sgd, compression="topk:density=0.1")
row("local steps", "engine|differs|come", _BOTH, way=LOCAL)
for _name, _value, _ways, _kinds in [
    ("check_every", 2, _ALL, 0), ("on_nonfinite", "skip", _ALL, 0), ("levels", "host", _ALL, 0),
    ("deadline_seconds", 2.5, _ALL, 0), ("misspelt", 1, _ALL, 0), ("every", 3, f"{STEPS} {LOCAL}", 0),
    ("delay", 1, f"{STEPS} {LOCAL}", 0), ("every", 0, STEPS, 0),
    ("outer", "nesterov", LOCAL, 0), ("combine", "ranks", LOCAL, 0),
    ("max_grad_norm", 1.0, GRADIENTS, 1), ("synchronize_at", "step", GRADIENTS, 1),
    ("op", "Sum", GRADIENTS, 1), ("bucket_bytes", 300, GRADIENTS, 1), ("merging", "layerwise", GRADIENTS, 1),
    ("groups", 3, GRADIENTS, 1), ("tensor_selection", "cost", GRADIENTS, 1),
    ("backward_passes_per_step", 2, GRADIENTS, 1)]:
    row(f"{_name}={_value}", f"{_name}|plan", _ways, _HVD if _kinds else ("ddp", "horovod"),
        options={_name: _value})
for _name, _value in {"CHECK_EVERY": "nonsense", "DEADLINE_SECONDS": "2", "TRANSPORT": "pairs",
                      "TENSOR_SELECTION": "cost", "RANKS_PER_HOST": "1"}.items():
    row(f"{_name}={_value}", f"(?i){_name}", _ALL, variables={f"HOROVOD_SPARSE_{_name}": _value})
row("another protocol", "protocol", protocol=99)
row("another class", "differs|optimizer|rate", f"{STEPS} {LOCAL}", optimizer=sgd)
for _name, _value in {"lr": 1e-1, "weight_decay": 0.5, "betas": (0.8, 0.9), "amsgrad": True}.items():
    row(f"{_name} of AdamW", f"{_name}|differ", f"{STEPS} {LOCAL}", both={"options": {"check_every": 2}},
        optimizer=lambda net, given={_name: _value}: adamw(net, **given))
row("lr of SGD", "lr|rate|differ", f"{GRADIENTS} {PLAIN}", both={"options": {"check_every": 2}},
    optimizer=lambda net: sgd(net, 0.5))
row("lr changed", "lr|rate|differ", both={"options": {"check_every": 1}}, before=at(2, halved))
row("more groups", "group", f"{STEPS} {LOCAL}", optimizer=grouped)
for _name, _more in {"other members": {"at": 3}, "groups turned": {"order": -1}}.items():
    row(_name, "group", f"{STEPS} {LOCAL}", both={"optimizer": grouped},
        optimizer=lambda net, given=_more: grouped(net, **given))
for _name, _model in {
    "wider": lambda: small(20), "other last": lambda: small(last=5), "no bias": lambda: small(bias=False),
    "deeper": lambda: small().append(torch.nn.Linear(4, 4)), "other order": lambda: renamed("2", "0"),
    "other names": lambda: renamed("a", "b"), "one frozen": lambda: frozen(small()),
    "buffers": lambda: small().append(torch.nn.BatchNorm1d(4, affine=False))}.items():
    # DistributedDataParallel compares models itself, and names them on one rank
    row(f"model: {_name}", "param|shape|size|buffer|differ|attach", theirs=_DDP, model=_model)
    row(f"plain: {_name}", "param|buffer|differ", STEPS, _DDP, both={"wrapper": None}, model=_model)
row("not wrapped", "attach|engine|differs|come|wrap", _ALL, _DDP, theirs=_DDP, wrapper=None)
for _wrapper in ({"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.001},
                 {"gradient_as_bucket_view": True}):
    row(str(_wrapper), "plan|static|unused", _ALL, ("ddp",), wrapper=_wrapper)
row("fewer steps", _SAME, steps=3)
row("fewer steps, no finish", _SAME, both={"finishes": False}, steps=3)
row("fewer steps, every=2", _SAME, STEPS, both={"options": {"every": 2}}, steps=2)
row("finish alone", _SAME, LOCAL, _HVD, finishes=False)
row("a step left out", rf"{_SAME}|ended, or left", theirs=_HVD,
    skips=lambda run, step: contextlib.nullcontext(step == 2))
# over Horovod a rank that ends shuts Horovod down, in whose words the other one ends
for _name, _event in {"raises at first": at(0, raises), "terminated": at(2, ended_by(signal.SIGTERM)),
                      "raises": at(2, raises), "killed": at(2, ended_by(signal.SIGKILL))}.items():
    row(_name, _LEFT, theirs=_HVD, between=_event)
row("stops", "waited|ended, or left", theirs=_HVD, between=at(2, lambda run: time.sleep(8)))
row("NaN", "NaN|finite", between=at(2, put(float("nan"))))
row("Inf", "Inf|finite", between=at(2, put(float("inf"))))
row("NaN skipped", "NaN|finite|differ|changed", both={"options": {"on_nonfinite": "skip"}},
    between=at(2, put(float("nan"))))
row("NaN in a parameter", "NaN|finite|differ", both={"options": {"check_every": 2}},
    before=at(2, put(float("nan"), "data")))
row("parameters changed", "differ", both={"options": {"check_every": 2}}, between=at(2, put(9.0, "data")))
row("other parameters", "differ", both={"options": {"check_every": 1}}, before=at(0, put(9.0, "data")))
row("a scaler on one rank", "scale|differ|finite", _BOTH, scale=8.0)
row("a scaler that skips", "scale|finite", f"{STEPS} {PLAIN}", both={"scale": 8.0},
    between=at(2, put(float("nan"))))
row("another scale", "scale", _BOTH, both={"scale": 8.0}, scale=2.0)
row("more passes", "pass|differ", _BOTH, ("ddp",), passes=2)
row("no_sync once", _SAME, _BOTH, ("ddp",), around=without_sync)
row("skip_synchronize once", _SAME, GRADIENTS, _HVD, theirs=_HVD,
    skips=lambda run, step: run.optimizer.skip_synchronize() if step == 2 else contextlib.nullcontext())
row("backward twice", _SAME, _BOTH, theirs=_HVD,
    between=at(2, lambda run: run.model(torch.ones(2, 24)).sum().backward()))
row("frozen later", "parameter|without", before=at(2, lambda run: frozen(run.net)))
row("a group added", "parameter|group|ended, or left", theirs=_HVD,
    before=at(2, lambda run: run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})))
row("a state loaded", "step|state|differ|wait", theirs=_HVD, both={"before": keeping(99)}, before=keeping(3))
row("interrupted", rf"{_SAME}|step|exchange|same name", theirs=_HVD, before=nothing, around=interrupted,
    skips=interrupted, both={"before": at(2, lambda run: time.sleep(1.5))})
row("thawed later", "parameter|step|pass|wait", theirs=_HVD,
    both={"model": lambda: frozen(small()), "optimizer": everything},
    before=at(2, lambda run: run.net[0].bias.requires_grad_(True)))
row("the optimizer's state loaded", "step|state|differ|wait", theirs=_HVD,
    before=at(2, lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict())))
