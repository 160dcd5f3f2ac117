"""A model's parameters and buffers: their facts for plans, their owner, and checks before a load."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_sparse.errors import ArgumentError, StateMismatchError, UnsupportedError
from horovod_sparse.feedback import ParameterRules
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.tensors.layout import dtype_name, local, on_host
from horovod_sparse.training.engine import Facts
from horovod_sparse.training.state import check_entry, checked_states

#: key of this rank's checkpoint entry in an optimizer's state_dict; PyTorch ignores unknown keys
ENTRY = "horovod_sparse"
_ADVICE = (
    "the training uses {}: use the same algorithm, or load None (a state_dict without 'horovod_sparse') to "
    "start with no residual"
)


def new_facts(
    optimizer: Any, known: Facts, names: Mapping[torch.Tensor, str], rules: ParameterRules
) -> Facts:
    """Returns the optimizer's parameters that are not in `known`, with their facts, in order of names.

    Without an optimizer these are all parameters in `names` that require a gradient.
    """
    group_of, unnamed = dict[torch.Tensor, int](), dict[torch.Tensor, str]()
    for i, group in enumerate([{"params": names}] if optimizer is None else optimizer.param_groups):
        for j, one in enumerate(group["params"]):
            group_of[one], unnamed[one] = i, f"allreduce.noname.{i}.{j}"
    have = {id(one) for _, one in known.values()}
    trained = [one for one in group_of if one.requires_grad and id(one) not in have]
    order = {one: number for number, one in enumerate([*group_of, *names])}
    facts: dict[str, tuple[ParameterFacts, Any]] = {}
    for one in sorted(trained, key=order.__getitem__):
        name, own = names.get(one, unnamed[one]), local(one)
        n, dtype = own.numel(), dtype_name(own)
        if name in known:
            raise UnsupportedError(f"{name} of the model was replaced since it was attached: attach it again")
        if n == 0:
            continue
        if own.is_complex():
            raise UnsupportedError(
                f"{name} is complex ({own.dtype}), and selection looks at each real number: "
                "keep it as real numbers, and let forward take torch.view_as_complex of it"
            )
        if dtype is None:
            raise UnsupportedError(
                f"{name} has dtype {own.dtype}: gradients of float32, float64, float16 and bfloat16 "
                f"can be synchronized; give such parameters an optimizer of their own"
            )
        density = rules.density_of(name, n) or 0.0
        fact = ParameterFacts(name, n, dtype, str(own.device), group_of[one], density, tuple(own.shape))
        facts[name] = fact, one
    return facts


def checked_entry(training: Any, entry: Any) -> dict[str, Any]:
    """Returns a checkpoint entry with tensors on the host; raises if it does not fit the training."""
    try:
        entry = on_host(entry)
    except RecursionError as error:
        raise StateMismatchError("the saved state is nested too deeply: give what was saved here") from error
    check_entry(entry, training.recipe, _ADVICE)
    facts = {**training.facts, **training.engine.facts(training.facts)}
    known = {name: local(one) for name, (_, one) in facts.items()}
    # parameters that joined have saved residuals or zeros
    training.check_fits(entry, set(training.facts) - training.joined, known)
    checked_states(training, entry)
    return dict(entry)


def check_groups(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raises if a saved optimizer state has other parameter groups, before anything is loaded."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    numbers: list[Any] = []
    lacking: set[str] = set()
    if isinstance(groups, (list, tuple)) and isinstance(saved.get("state"), Mapping):
        numbers = [len(group.get("params", ())) for group in groups if isinstance(group, Mapping)]
        # options that newer versions of PyTorch added get their defaults; hyperparameters were always saved
        settings = {name for name, value in optimizer.defaults.items() if isinstance(value, (float, tuple))}
        lacking = settings.difference(*groups)
    own = [len(group["params"]) for group in optimizer.param_groups]
    if numbers != own:
        raise StateMismatchError(
            f"the saved param_groups have {numbers or 'no'} parameters each, those of the optimizer {own}"
        )
    if lacking:
        kind = type(optimizer).__name__
        raise StateMismatchError(
            f"the saved state is of another optimizer than {kind}: it has no {min(lacking)}"
        )


#: by parameter: its owner, which exchanges its gradients; both weak
_owners: Any = WeakTensorKeyDictionary()
#: by module: trainings to call before a load; a hook that held them would be copied with the module
_followers: MutableMapping[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def claim(owner: Any, parameters: Iterable[torch.Tensor], spared: type[Any] | tuple[()] = ()) -> None:
    """Makes `owner` the one training of these parameters; calls `retire` of the former, unless `spared`."""
    taken = list(parameters)
    former = {_owners.pop(one)() for one in taken if one in _owners}
    for one in former - {None, owner}:
        if not isinstance(one, spared):
            one.retire()
    for parameter in taken if owner is not None else ():
        _owners[parameter] = weakref.ref(owner)


def roll_back_before_loading(modules: Iterable[torch.nn.Module], training: Any) -> None:
    """Registers hooks: `load_state_dict` of any of the modules first calls `training.before_load`."""
    for module in modules:
        if module not in _followers:
            _followers[module] = weakref.WeakSet()
            module._register_load_state_dict_pre_hook(_load_state_dict_pre_hook, with_module=True)
        _followers[module].add(training)


def _load_state_dict_pre_hook(module: torch.nn.Module, *_: Any) -> None:
    for training in _followers.get(module, ()):
        training.before_load()


def trained_by(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters that the optimizer trains, by name; all of them without an optimizer."""
    parameters = parameters_of(inner_module(model))
    if optimizer is None:
        return {_unwrapped_name(name): one for name, one in parameters}
    given = {id(one) for group in optimizer.param_groups for one in group["params"]}
    named = {_unwrapped_name(name): one for name, one in parameters if id(one) in given}
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
    """Yields a model's parameters, also if FSDP2 shows unsharded ones after a forward pass."""
    for one in model.modules():
        if hasattr(one, "reshard"):
            one.reshard()
    return model.named_parameters()


def inner_module(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module within torch.compile's and DistributedDataParallel's wrappers."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def _unwrapped_name(name: str) -> str:
    """Returns a parameter's name without what torch.compile and checkpoint wrappers put into it."""
    parts = name.split(".")
    return ".".join(part for part in parts if part not in ("_orig_mod", "_checkpoint_wrapped_module"))


class ModelBuffers:
    """A model's float buffers and integer counters, which exchanges average over ranks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def _averaged_buffers(self) -> list[torch.Tensor]:
        # listed anew each time, since ``self.mean = 0.9 * self.mean + ...`` replaces the tensor
        given = [one for one in self._model.buffers() if one.numel() and not one.is_complex()]
        counts = [one.numel() == 1 and one.dtype != torch.bool for one in given]
        found = [one for one, count in zip(given, counts, strict=True) if count or one.is_floating_point()]
        # an expanded one has each number once in memory
        return [one[tuple(slice(None if step else 1) for step in one.stride())] for one in found]

    def read(self) -> np.ndarray:
        numbers = [one.detach().double().reshape(-1).cpu().numpy() for one in self._averaged_buffers()]
        return np.concatenate(numbers) if numbers else np.zeros(0)

    @torch.no_grad()
    def move(self, sent: np.ndarray, mean: np.ndarray) -> None:
        first = 0
        for one in self._averaged_buffers():
            here = slice(first, first + one.numel())
            pair = sent[here], mean[here] if one.is_floating_point() else np.rint(mean[here])
            before, after = (torch.from_numpy(array.copy()).view(one.shape) for array in pair)
            if not before.isfinite().all() or torch.equal(one.detach().double().cpu(), before):
                one.copy_(after)
            else:  # changes made since then stay
                one.add_((after - before).to(one.device, one.dtype))
            first = here.stop
