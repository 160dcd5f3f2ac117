"""The arguments that decide about buckets, checked against each other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.cost import CostModel, Profile
from horovod_sparse.cost.times import AffineTime
from horovod_sparse.errors import ArgumentError, HorovodSparseError, ProfileMismatchError, UnknownNameError
from horovod_sparse.feedback import AutoDensity
from horovod_sparse.merging import (
    DEFAULT_BUCKET_BYTES,
    Kept,
    ParameterFacts,
    Plan,
    Strategy,
    TensorSelection,
    Workload,
    dense_of,
    explicit_groups,
    fixed,
    fixed_bytes,
    joint,
    needs_times,
    num_buckets,
    select_tensors,
    strategy_named,
)
from horovod_sparse.sparsifiers.base import value_text

#: what is sparsified where the arguments say nothing of buckets: "formulas", all buckets that may win by
#: them, or "all". The first rank's counts.
TENSOR_SELECTION_VARIABLE = "HOROVOD_SPARSE_TENSOR_SELECTION"

#: what stands in for times where none are looked at
_NO_COST = CostModel(AffineTime(), AffineTime())


@dataclass(frozen=True)
class PlanRequest:
    """A way to make plans, as the arguments of an optimizer ask for it.

    Attributes:
        merging: as the user wrote it, for messages.
        strategy: what it means.
        selection: the argument `tensor_selection`.
        profile: the one that was given.
        failure: why that could not be read: raised once all ranks have been told.
        density: limits within which times decide about the density, too; None where they do not.
    """

    merging: str
    strategy: Strategy
    selection: TensorSelection = "all"
    profile: Profile | None = None
    failure: HorovodSparseError | None = None
    density: AutoDensity | None = None

    @property
    def measures(self) -> bool:
        """Whether the plan depends on times, or the density does."""
        return self._merges_by_times or self.density is not None

    @property
    def _merges_by_times(self) -> bool:
        return needs_times(self.strategy) or self.selection == "cost"

    @property
    def complete(self) -> bool:
        """Whether a profile says all that there is to measure."""
        return self.profile is not None and bool(self.profile.backward_seconds)

    def describe(self) -> str:
        """One line, equal on ranks that ask for the same."""
        text = f"merging={self.merging}, tensor_selection={_name_of(self.selection)}"
        return text if self.density is None else f"{text}, density={value_text(self.density)}"

    def first_plan(self, parameters: Sequence[ParameterFacts]) -> Plan:
        """The plan that needs no times: the one asked for, or the default one until times are known.

        Args:
            parameters: in the order in which the model uses them.

        Raises:
            ArgumentError: if the rule of `tensor_selection` answers something else than yes or no.
        """
        dense = whole_parameters(parameters)
        if self.selection != "cost":
            dense |= dense_of(select_tensors(self.selection, parameters))
        workload = Workload(tuple(parameters), (1.0,) * len(parameters), dense=dense)
        strategy = fixed(bytes=DEFAULT_BUCKET_BYTES) if self._merges_by_times else self.strategy
        return strategy(workload, _NO_COST)


def sparsifies_by_formulas() -> bool:
    """Whether buckets that cannot win stay dense where the arguments say nothing of buckets.

    Raises:
        UnknownNameError: if the environment asks for something else than there is.
    """
    wanted, known = os.environ.get(TENSOR_SELECTION_VARIABLE, "formulas"), ("formulas", "all")
    if wanted not in known:
        raise UnknownNameError(TENSOR_SELECTION_VARIABLE, wanted, known)
    return wanted == "formulas"


def whole_parameters(parameters: Sequence[ParameterFacts]) -> frozenset[str]:
    """Names of those that a rule of the compressor leaves dense."""
    return frozenset(parameter.name for parameter in parameters if parameter.density == 1.0)


def plan_request(
    *,
    merging: Any = None,
    tensor_selection: Any = None,
    profile: Any = None,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
    density: AutoDensity | None = None,
) -> tuple[PlanRequest | None, Plan | None]:
    """What the arguments ask for, if they do not contradict each other.

    ==================  =========================================================================
    `plan`, `groups`    say which parameters form which bucket: nothing else may be said
    a `Plan` as         the same as `plan`
    `merging`
    `bucket_bytes`      the same as ``merging=fixed(bytes=...)``; `tensor_selection` may be given
    "joint"             decides what stays dense, too: no `tensor_selection`
    `profile`           is looked at where times are; otherwise it changes nothing
    `density`           is decided by times, whatever buckets there are; a `Plan` that says one decides it
    ==================  =========================================================================

    Args:
        merging: "layerwise", "single", "omgs", "optimal", "joint", `fixed(...)`, a function of a workload
            and a cost model, or a `Plan`.
        tensor_selection: "cost", "all", `min_elements(...)`, or a function of a parameter.
        profile: a `Profile`, or the path of a saved one. A file that cannot be read is a failure that all
            ranks have to hear of, so it is not raised here: see `PlanRequest.failure`.
        plan: which parameters form which bucket.
        groups: Horovod's argument.
        bucket_bytes: of gradient in a bucket.
        density: limits, where the sparsifier's density is "auto".

    Returns:
        What is asked for; and the plan, where one was given as such. Both None where `groups`,
        `bucket_bytes` or nothing was given alone.

    Raises:
        ArgumentError: naming those that contradict each other, or a value that is not allowed.
        UnknownNameError: for a misspelt name.

    Example:
        >>> plan_request(merging="optimal", tensor_selection="cost")[0].measures
        True
        >>> plan_request(merging="optimal", bucket_bytes=1000)
        Traceback (most recent call last):
        horovod_sparse.errors.ArgumentError: merging and bucket_bytes=('optimal', 1000) is not allowed: ...
    """
    if isinstance(merging, Plan):
        _only_one(merging=merging, plan=plan)
        merging, plan = None, merging
    _only_one(merging=merging, plan=plan, groups=groups, bucket_bytes=bucket_bytes)
    _only_one(tensor_selection=tensor_selection, plan=plan)
    _only_one(tensor_selection=tensor_selection, groups=groups)
    given: Any
    if density is not None and plan is not None and plan.density is None:
        given, failure = _profile(profile)
        return PlanRequest("the plan given", Kept(plan), "all", given, failure, density), plan
    if density is not None and groups is not None:
        given, failure = _profile(profile)
        return PlanRequest("groups", Kept(), "all", given, failure, density), None
    if plan is not None or (merging is None and tensor_selection is None and density is None):
        if profile is not None:
            what = "merging='optimal', 'omgs' or 'joint', or tensor_selection='cost' with it"
            raise ArgumentError("profile", profile, what)
        return None, plan
    strategy: Strategy
    if merging is None:
        strategy = fixed(bytes=DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes)
    else:
        strategy = strategy_named(merging)
    if strategy is joint and tensor_selection is not None:
        _only_one(merging=merging, tensor_selection=tensor_selection)
    selection = "all" if tensor_selection is None else tensor_selection
    if isinstance(selection, str) and selection not in ("all", "cost"):
        raise UnknownNameError("tensor_selection", selection, ["all", "cost", "min_elements(...)"])
    if not isinstance(selection, str) and not callable(selection):
        raise ArgumentError("tensor_selection", selection, "'cost', 'all', min_elements(...) or a function")
    given, failure = _profile(profile)
    return PlanRequest(
        _name_of(strategy if merging is None else merging), strategy, selection, given, failure, density
    ), None


def _name_of(rule: Any) -> str:
    """What a rule is called; the same on all ranks, so without addresses."""
    if isinstance(rule, str):
        return rule
    if dataclasses.is_dataclass(rule):
        return repr(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def _profile(given: Any) -> tuple[Profile | None, HorovodSparseError | None]:
    if given is None or isinstance(given, Profile):
        return given, None
    if not isinstance(given, (str, Path)):
        raise ArgumentError("profile", given, "a Profile, or the path of a saved one")
    try:
        return Profile.load(given), None
    except ProfileMismatchError as error:
        return None, error
    except OSError as error:
        return None, ProfileMismatchError(f"{given}: the profile cannot be read ({error.strerror})")


def _only_one(**named: Any) -> None:
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ArgumentError(" and ".join(given), tuple(given.values()), "only one of them")


def make_plan(
    facts: Mapping[str, tuple[ParameterFacts, Any]],
    *,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
) -> Plan:
    """The plan that the arguments ask for, at most one of which may be given.

    Args:
        facts: by name, of every parameter, and the parameter itself.
        plan: taken as it is.
        groups: Horovod's argument: a number of buckets, or lists of parameters.
        bucket_bytes: see `fixed_bytes`.

    Raises:
        ArgumentError: if several are given, or the plan does not fit the parameters.
    """
    named = {"plan": plan, "groups": groups, "bucket_bytes": bucket_bytes}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(" and ".join(given), tuple(named[name] for name in given), "only one of them")
    parameters = [fact for fact, _ in facts.values()]
    if plan is not None:
        made = plan
    elif isinstance(groups, list):
        name_of = {id(parameter): name for name, (_, parameter) in facts.items()}
        made = explicit_groups(parameters, [[name_of.get(id(p), "") for p in group] for group in groups])
    elif groups is not None:
        made = num_buckets(parameters, groups)
    else:
        made = fixed_bytes(parameters, DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes)
    made.check(parameters)
    return made
