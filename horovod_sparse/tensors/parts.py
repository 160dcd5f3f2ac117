"""Buckets as tasks of the driver, and what a plan looks at: the facts of every parameter."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.telemetry import BucketReport
from horovod_sparse.tensors.gradients import GradientMemory, Gradients
from horovod_sparse.tensors.layout import dtype_name, host_entry, local, shaped, unshaped
from horovod_sparse.topology import Topology
from horovod_sparse.training import parts as common
from horovod_sparse.training.engine import Facts, PartSpec, Starter, Task
from horovod_sparse.training.state import check_entry, checked_states

#: where an optimizer's state_dict has this rank's exact entry; PyTorch passes over what it does not know
ENTRY = "horovod_sparse"
_ADVICE = (
    "the training uses {}: use the same algorithm, or load None (a state_dict without 'horovod_sparse') to "
    "start with no residual"
)


class Part(common.BucketPart):
    """Parameters that are synchronized together, as their gradients lie in one memory.

    Attributes:
        gradient: memory of the parameters' gradients.
        streams: told of every gradient that is written, where there are several.
        num_missing: parameters whose gradient is not complete yet in this step.
        task: under way, None before `start`.
        whole: whether the sum of all elements stays where gradients are, see `PartSpec`.
        group: the optimizer's settings for these parameters, as they are now; empty without an optimizer.
    """

    def __init__(
        self,
        spec: PartSpec,
        parameters: Sequence[torch.Tensor],
        group: Callable[[], Mapping[str, Any]],
        place: tuple[int, int],
        *,
        topology: Topology | None = None,
    ) -> None:
        self.whole, self.dtype = (
            spec.whole,
            dtype_name(parameters[0]) or "unknown",
        )  # others are refused before
        self.gradient: Gradients = Gradients(parameters, spec.names[0])
        self.gradient.all_get |= topology is not None
        self.memory: GradientMemory = self.gradient.memory
        super().__init__(
            *(spec, [one.shape for one in self.gradient.layouts], place, self.dtype),
            memory=self.memory.accumulator,
            topology=topology,
            summable=self.memory.summable,
            foldable=self.memory.shard,
        )
        self.streams = self.memory.streams()
        self.num_missing = len(self.names)
        self.task: Task | None = None
        self.group = group
        #: see `Bucket.step`
        self.scale = 1.0
        self._loss_scale = 1.0
        #: places and values of the last sum, where `keeps_sum` asks for them
        self.keeps_sum = False
        self.last_sum: tuple[Any, Any] | None = None
        self._shown: float | None = None

    def shaped(self, number: int, values: np.ndarray) -> torch.Tensor:
        return shaped(values, self.gradient.layouts[number])

    def flat(self, number: int, values: torch.Tensor) -> np.ndarray:
        return unshaped(values, self.gradient.layouts[number])

    def start(
        self, driver: Starter, loss_scale: float = 1.0, turn: str = "", *, refused: bool = False
    ) -> None:
        """Takes the gradients and starts their synchronization; `turn` says in its name of which step."""
        if self.streams is not None:
            self.streams.meet()  # before gradients are copied together, or divided by the loss's scale
        self.gradient.settle()
        self._loss_scale = loss_scale
        step = self._step(refused)
        if self.streams is not None:
            step = self.streams.run(step)
        name = self.name + turn
        if self.gradient.absent and not self.gradient.told:  # ranks that have frozen others must not meet
            name += " without " + ", ".join(self.names[number] for number in self.gradient.absent)
        start = driver.start
        if self.whole and self.streams is not None:  # a sum of whole tensors begins where they are
            start = getattr(driver, "start_on_device", start)
        self.task = start(name, step)

    def apply(self) -> BucketReport:
        """Puts the scaled sum over ranks, once the task is done, where the gradients are."""
        task = self.task
        if task is None or not task.done:
            raise RuntimeError("the synchronization is not done: this is a bug, please report it")
        if task.error is not None:
            raise task.error
        started = time.perf_counter()
        if self.streams is not None:
            self.streams.join()
        report = self._put(task.result, self.scale * self._loss_scale)
        took = time.perf_counter() - started
        return dataclasses.replace(report, wait_seconds=task.waited_seconds, apply_seconds=took)

    def _step(self, refused: bool) -> Synchronization[Any]:
        rate = self.group().get("lr")
        rate = None if rate is None else float(rate)
        foldable = self.gradient.foldable(self._loss_scale)
        absent = [] if self.whole else [self.places[number] for number in self.gradient.absent]
        return self.bucket.step(foldable, rate, refused=refused, scale=self.scale, absent=absent)

    def _put(self, total: Any, scale: float) -> BucketReport:
        if total.whole:  # of n elements: no copy of them
            num_union = self.gradient.scatter(None, total.values, scale)
        else:
            values = total.values if scale == 1.0 else total.values * total.values.dtype.type(scale)
            num_union = self.gradient.scatter(total.indices, values)
            self.last_sum = (total.indices, values) if self.keeps_sum else None
        self.bucket.accept()
        return BucketReport(self.bucket.last, num_union, self.gradient.num_bytes, total.notes.norms)

    def _first_of_sum(self) -> float | None:
        indices: Any = () if self.last_sum is None else self.last_sum[0]
        return self.gradient.value_at(int(indices[0])) if len(indices) else None

    def note_sum(self) -> None:
        """Notes what stands at the first place of the last sum."""
        self._shown = self._first_of_sum()

    def has_last_sum(self) -> bool:
        """True if gradients hold the last sum: PyTorch does not count changes by ``.data``."""
        return self._first_of_sum() == self._shown

    def abandon(self, *, drop: bool = False) -> None:
        if self.streams is not None:
            self.streams.join()
        self.bucket.abandon(drop=drop)


def make_parts(
    specs: Sequence[PartSpec],
    facts: Facts,
    place: tuple[int, int],
    topology: Topology | None,
    optimizer: Any | None,
) -> list[Part]:
    parts = []
    for spec in specs:
        parameters = [facts[name][1] for name in spec.names]
        group = partial(_group, optimizer, facts[spec.names[0]][0].group)
        hosts = None if spec.dense else topology
        parts.append(Part(spec, parameters, group, place, topology=hosts))
    return parts


def _group(optimizer: Any | None, number: int) -> Mapping[str, Any]:
    # by number: load_state_dict makes new dicts of the groups
    found: Mapping[str, Any] = {} if optimizer is None else optimizer.param_groups[number]
    return found


def facts_of(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    group_of: Mapping[torch.Tensor, int] | None,
    rules: ParameterRules,
) -> dict[str, tuple[ParameterFacts, torch.Tensor]]:
    """Returns facts and tensor of every parameter that has elements, by name."""
    facts = {}
    for name, parameter in named_parameters:
        n, dtype = parameter.numel(), dtype_name(parameter)
        if n == 0:
            continue
        if parameter.is_complex():
            raise UnsupportedError(
                f"{name} is complex ({parameter.dtype}), and selection looks at each real number: "
                "keep it as real numbers, and let forward take torch.view_as_complex of it"
            )
        if dtype is None:
            raise UnsupportedError(
                f"{name} has dtype {parameter.dtype}: gradients of float32, float64, float16 and bfloat16 "
                f"can be synchronized; give such parameters an optimizer of their own"
            )
        group = 0 if group_of is None else group_of[parameter]
        device, density = str(parameter.device), rules.density_of(name, n) or 0.0
        facts[name] = (
            ParameterFacts(name, n, dtype, device, group, density, tuple(parameter.shape)),
            parameter,
        )
    return facts


def new_facts(
    optimizer: Any, known: Facts, names: Mapping[torch.Tensor, str], rules: ParameterRules
) -> Facts:
    """Returns the parameters that an optimizer trains and `known` has not, in the order of their names."""
    have = {id(one) for _, one in known.values()}
    groups = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    if all(id(one) in have or not one.requires_grad for one in groups):
        return {}
    places = [
        (f"allreduce.noname.{i}.{j}", one)
        for i, group in enumerate(optimizer.param_groups)
        for j, one in enumerate(group["params"])
    ]
    place_of = {one: name for name, one in places}
    order = {one: number for number, one in enumerate([*place_of, *names])}
    trained = [one for one in groups if one.requires_grad and id(one) not in have]
    trained.sort(key=lambda one: order[one])
    new = {names.get(one, place_of[one]): one for one in trained}
    if replaced := sorted(new.keys() & known.keys()):
        raise UnsupportedError(
            f"{', '.join(replaced)} of the model was replaced since it was attached: attach it again"
        )
    own = {name: local(one) for name, one in new.items()}
    found = facts_of(own.items(), {own[name]: groups[one] for name, one in new.items()}, rules)
    return {name: (fact, new[name]) for name, (fact, _) in found.items()}


def checked_entry(training: Any, entry: Any) -> dict[str, Any]:
    """Returns an entry of a checkpoint, all tensors on the host, if it fits a training; changes nothing."""
    entry = host_entry(entry)
    check_entry(entry, training.recipe, _ADVICE)
    facts = {**training.facts, **training.engine.facts(training.facts)}
    known = {name: local(one) for name, (_, one) in facts.items()}
    # of parameters that have joined, residuals are saved or zeros
    training.check_fits(entry, set(training.facts) - training.joined, known)
    checked_states(training, entry)
    return dict(entry)


def check_groups(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Refuses an optimizer's own state, of other parameter groups, before anything is loaded."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    numbers: list[Any] = []
    lacking: set[str] = set()
    if isinstance(groups, (list, tuple)) and isinstance(saved.get("state"), Mapping):
        numbers = [len(group.get("params", ())) for group in groups if isinstance(group, Mapping)]
        # switches that PyTorch has got since are set to their defaults; of numbers it has always had all
        settings = {name for name, value in optimizer.defaults.items() if isinstance(value, (float, tuple))}
        lacking = settings.difference(*groups)
    own = [len(group["params"]) for group in optimizer.param_groups]
    if numbers != own:
        raise StateMismatchError(
            f"param_groups in the saved state have {numbers or 'no'} parameters, those of the optimizer {own}"
        )
    if lacking:
        kind = type(optimizer).__name__
        raise StateMismatchError(
            f"the saved state is of another optimizer than {kind}: it has no {min(lacking)}"
        )


#: by parameter, what exchanges its gradients; neither is kept alive
_owners: Any = WeakTensorKeyDictionary()
#: by module, whom it tells before it loads; a hook of the module that held them would go into its copies
_told: MutableMapping[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def claim(owner: Any, parameters: Iterable[torch.Tensor], spared: type[Any] | tuple[()] = ()) -> None:
    """Gives parameters to an owner, or to none. Owners that had one of them are retired, but those spared."""
    taken = list(parameters)
    former = {_owners.pop(one)() for one in taken if one in _owners}
    for one in former - {None, owner}:
        if not isinstance(one, spared):
            one.retire()
    for parameter in taken if owner is not None else ():
        _owners[parameter] = weakref.ref(owner)


def tell_of_loading(modules: Iterable[torch.nn.Module], training: Any) -> None:
    """Has modules call `before_load` of a training before they load a state."""
    for module in modules:
        if module not in _told:
            _told[module] = weakref.WeakSet()
            module._register_load_state_dict_pre_hook(_before_loading, with_module=True)
        _told[module].add(training)


def _before_loading(module: torch.nn.Module, *_: Any) -> None:
    for training in _told.get(module, ()):
        training.before_load()


def trained_by(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters that an optimizer trains, by name; all of them without an optimizer.

    Raises:
        ArgumentError: if it trains others, too.
    """
    parameters = parameters_of(inner_of(model))
    if optimizer is None:
        return {_plain(name): one for name, one in parameters}
    given = {id(one) for group in optimizer.param_groups for one in group["params"]}
    named = {_plain(name): one for name, one in parameters if id(one) in given}
    known = set(map(id, named.values()))
    if strange := [
        f"group {number}, parameter {place} of shape {list(one.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, one in enumerate(group["params"])
        if id(one) not in known
    ]:
        allowed = f"one that trains only this model's parameters; it also has {'; '.join(strange[:3])}"
        raise ArgumentError("optimizer", type(optimizer).__name__, allowed)
    return named


def parameters_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns a model's parameters: FSDP2 shows whole ones after a forward pass without a backward pass."""
    for one in model.modules():
        if hasattr(one, "reshard"):
            one.reshard()
    return model.named_parameters()


def inner_of(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module within those of torch.compile and DistributedDataParallel."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def _plain(name: str) -> str:
    """Removes from a parameter's name what wrappers put before it."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


class ModelBuffers:
    """A model's float buffers, statistics of batches, and counters, integers of one element: `Averaged`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def _numbers(self) -> list[torch.Tensor]:
        # asked for each time: ``self.mean = 0.9 * self.mean + ...`` puts another tensor in its place
        given = [one for one in self._model.buffers() if one.numel() and not one.is_complex()]
        counts = [one.numel() == 1 and one.dtype != torch.bool for one in given]
        found = [one for one, count in zip(given, counts, strict=True) if count or one.is_floating_point()]
        # an expanded one has each number once in memory
        return [one[tuple(slice(None if step else 1) for step in one.stride())] for one in found]

    def read(self) -> np.ndarray:
        numbers = [one.detach().double().reshape(-1).cpu().numpy() for one in self._numbers()]
        return np.concatenate(numbers) if numbers else np.zeros(0)

    @torch.no_grad()
    def move(self, sent: np.ndarray, mean: np.ndarray) -> None:
        first = 0
        for one in self._numbers():
            here = slice(first, first + one.numel())
            pair = sent[here], mean[here] if one.is_floating_point() else np.rint(mean[here])
            before, after = (torch.from_numpy(array.copy()).view(one.shape) for array in pair)
            if not before.isfinite().all() or torch.equal(one.detach().double().cpu(), before):
                one.copy_(after)
            else:  # what was learned since stays
                one.add_((after - before).to(one.device, one.dtype))
            first = here.stop
