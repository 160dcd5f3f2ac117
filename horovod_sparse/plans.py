"""Plans (which parameters form which bucket, which stay dense) as values; made by size or by hand."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import rank_part
from horovod_sparse.errors import ArgumentError, UnknownNameError

#: Indices travel as int32.
MAX_BUCKET_ELEMENTS = 2**31 - 1

#: dtype, device, parameter group, density
Kind: TypeAlias = tuple[str, str, int, float]

_ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter's name (unique in the model), size, dtype and what else a plan depends on."""

    name: str
    num_elements: int
    #: of its gradient: "float32", "float64", "float16" or "bfloat16"
    dtype: str = "float32"
    #: its device, as the framework writes it
    device: str = "cpu"
    #: number of the optimizer's parameter group; groups may differ in their learning rate
    group: int = 0
    #: density by `ParameterRules`: 1 for a parameter that is sent whole, 0 if no rule matches
    density: float = 0.0
    #: its shape, which ranks compare; empty if unknown
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes of the parameter's gradient."""
        return self.num_elements * _ITEM_SIZES[self.dtype]


def grouping_key(parameter: ParameterFacts) -> Kind:
    """Returns (dtype, device, parameter group, density), which are equal within a bucket."""
    return parameter.dtype, parameter.device, parameter.group, parameter.density


@dataclass(frozen=True)
class Plan:
    """Says which parameters form which bucket, and which stay dense.

    The optimizer takes any plan, made by size, by hand, or by a cost model.

    Attributes:
        buckets: names of the parameters of every bucket. Buckets, and the parameters in them, stand in
            backward order: the gradient that is ready first comes first.
        dense: names of the parameters that are synchronized by a plain allreduce.

    Example:
        >>> plan = Plan(buckets=(("fc.weight",), ("conv.weight", "conv.bias")), dense=("norm.weight",))
        >>> print(plan)
        buckets: 2, of 1, 2 parameters; dense parameters: 1
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    buckets: tuple[tuple[str, ...], ...]
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # lists are what JSON gives back and what users write
        object.__setattr__(self, "buckets", tuple(tuple(bucket) for bucket in self.buckets))
        object.__setattr__(self, "dense", tuple(self.dense))
        twice = sorted(name for name, count in Counter(self.names()).items() if count > 1)
        if twice:
            raise ArgumentError("plan", twice, "each parameter once: these are in it twice")
        if not all(self.buckets):
            raise ArgumentError("plan", self.buckets, "buckets of at least one parameter")

    def __str__(self) -> str:
        sizes = [str(len(bucket)) for bucket in self.buckets]
        shown = ", ".join(sizes[:12]) + (", ..." if len(sizes) > 12 else "")
        return f"buckets: {len(sizes)}, of {shown or 'no'} parameters; dense parameters: {len(self.dense)}"

    def names(self) -> tuple[str, ...]:
        """The names of all parameters, those in buckets first."""
        return tuple(name for bucket in self.buckets for name in bucket) + self.dense

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as lists and strings, for JSON and checkpoints."""
        return {"buckets": [list(one) for one in self.buckets], "dense": list(self.dense)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Plan:
        """Makes a plan of what `to_dict` returned; raises an `ArgumentError` for anything else."""
        try:
            return cls(tuple(map(tuple, saved["buckets"])), tuple(saved["dense"]))
        except (KeyError, TypeError) as error:
            given = f"{type(saved).__name__} ({type(error).__name__})"  # it may be too deep to be shown
            raise ArgumentError("plan", given, "what Plan.to_dict() returned") from error

    def check(self, parameters: Sequence[ParameterFacts]) -> None:
        """Raises an `ArgumentError` if a parameter is missing, unknown, or does not fit its bucket."""
        facts = {parameter.name: parameter for parameter in parameters}
        named = set(self.names())
        if unknown := sorted(named - set(facts)):
            raise ArgumentError("plan", unknown, "only names of parameters that require a gradient")
        if missing := sorted(set(facts) - named):
            raise ArgumentError("plan", f"nothing for {missing}", "a bucket, or dense, for every parameter")
        for bucket in self.buckets:
            kinds = sorted({grouping_key(facts[name]) for name in bucket})
            if len(kinds) > 1:
                raise ArgumentError(
                    "plan", bucket, f"buckets of one dtype, device, group and density; here are {kinds}"
                )
            total = sum(facts[name].num_elements for name in bucket)
            if total > MAX_BUCKET_ELEMENTS:
                raise ArgumentError("plan", bucket, f"buckets of fewer than 2**31 elements; this has {total}")


def by_kind(
    parameters: Iterable[ParameterFacts],
    is_full: Callable[[int, int, ParameterFacts], bool] = lambda number, size, one: False,
) -> tuple[tuple[str, ...], ...]:
    """Puts parameters, in backward order, into buckets of one kind each; `is_full` closes a bucket.

    `is_full` closes a bucket, by its elements, its bytes, and the parameter that would come next.
    """
    buckets: list[list[str]] = []
    filling: dict[Kind, tuple[list[str], int, int]] = {}
    for one in parameters:
        bucket, number, size = filling.get(grouping_key(one), ([], 0, 0))
        if not bucket or number + one.num_elements > MAX_BUCKET_ELEMENTS or is_full(number, size, one):
            bucket, number, size = [], 0, 0
            buckets.append(bucket)
        bucket.append(one.name)
        filling[grouping_key(one)] = bucket, number + one.num_elements, size + one.num_bytes
    return tuple(map(tuple, buckets))


#: A bucket's fixed cost (0.12 to 0.16 ms of CPU) is small beside its pass over memory (2.5 ms for 32 MiB),
#: and all buckets but a large model's last communicate while backward still runs. Between 8 and 32 MiB a step
#: took the same; at 1 MB a third more.
DEFAULT_BUCKET_BYTES = 32 * 2**20


def fixed_bytes(parameters: Sequence[ParameterFacts], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Plan:
    """Returns a plan with buckets of at most so many bytes of gradients, filled in backward order.

    Walks the parameters from the last to the first, as backward does. A bucket is closed before it would
    exceed `bucket_bytes`, so a larger parameter has a bucket of its own. Each kind (dtype, device, parameter
    group) fills buckets of its own.
    """
    check_count("bucket_bytes", bucket_bytes, "a whole number of bytes, 1 or more")
    return Plan(by_kind(reversed(parameters), lambda _, size, one: size + one.num_bytes > bucket_bytes))


def fixed_elements(parameters: Sequence[ParameterFacts], num_elements: int) -> Plan:
    """Returns a plan that closes a bucket once it holds `num_elements`, as MGS-SGD's threshold does.

    Source: OMGS-SGD, section V-D (8192), the rule as its public program has it.
    """
    check_count("num_elements", num_elements)
    return Plan(by_kind(reversed(parameters), lambda number, _size, _one: number >= num_elements))


def num_buckets(parameters: Sequence[ParameterFacts], count: int) -> Plan:
    """Returns a plan with `count` buckets of nearly equally many parameters, as Horovod's ``groups=count``.

    There are more if kinds would mix, and fewer if there are fewer parameters.

    Example:
        >>> num_buckets([ParameterFacts(name, 1) for name in "abcde"], 2).buckets
        (('e', 'd', 'c'), ('b', 'a'))
    """
    check_count("groups", count, "a whole number, 1 or more, or a list of lists of parameters")
    backward = list(reversed(parameters))
    groups = [backward[slice(*rank_part(len(backward), number, count))] for number in range(count)]
    return Plan(tuple(bucket for group in groups for bucket in by_kind(group)))


def explicit_groups(parameters: Sequence[ParameterFacts], groups: Iterable[Iterable[str]]) -> Plan:
    """Returns a plan with one bucket for each group of names, and one for every other parameter.

    Names that are no parameters here are passed over (frozen ones, as Horovod does). A group of several kinds
    becomes a bucket for each.
    """
    wanted = {name: number for number, group in enumerate(groups) for name in group}
    gathered: dict[object, list[ParameterFacts]] = {}
    for parameter in reversed(parameters):
        gathered.setdefault(wanted.get(parameter.name, parameter.name), []).append(parameter)
    return Plan(tuple(bucket for group in gathered.values() for bucket in by_kind(group)))


def make_plan(
    facts: Mapping[str, tuple[ParameterFacts, Any]],
    *,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
) -> Plan:
    """Returns the given plan, or makes one of groups or bucket_bytes; only one of them may be given."""
    only_one(plan=plan, groups=groups, bucket_bytes=bucket_bytes)
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


def only_one(**named: Any) -> None:
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ArgumentError(" and ".join(given), tuple(given.values()), "only one of them")


#: What is sparsified where the arguments say nothing of buckets: "large", those of `DENSE_BELOW` elements or
#: more, or "all". The first rank's counts.
TENSOR_SELECTION_VARIABLE = "HOROVOD_SPARSE_TENSOR_SELECTION"
#: At 1 Gbit/s an allreduce of so many float32 takes 4 ms, as long as three rounds of a sparsifier with its
#: work (docs/appendix/performance.md): a smaller bucket gains nothing.
DENSE_BELOW = 1 << 16


def without_small_buckets(plan: Plan, parameters: Sequence[ParameterFacts]) -> tuple[Plan, str]:
    """Returns the plan with small buckets dense, and a sentence that says which; empty if there are none.

    A bucket whose density a rule of the recipe gives stays as it is.
    """
    wanted, known = os.environ.get(TENSOR_SELECTION_VARIABLE, "large"), ("large", "all")
    if wanted not in known:
        raise UnknownNameError(TENSOR_SELECTION_VARIABLE, wanted, known)
    facts = {parameter.name: parameter for parameter in parameters}

    def stays_sparse(names: tuple[str, ...]) -> bool:
        given = facts[names[0]].density > 0.0
        return given or sum(facts[name].num_elements for name in names) >= DENSE_BELOW

    kept = tuple(filter(stays_sparse, plan.buckets))
    if wanted == "all" or len(kept) == len(plan.buckets):
        return plan, ""
    left = tuple(name for names in plan.buckets if names not in kept for name in names)
    number, total = (sum(facts[name].num_elements for name in names) for names in (left, facts))
    words = (
        f"{number:,} of {total:,} elements stay dense: buckets of fewer than {DENSE_BELOW:,} gain nothing "
        "from a sparsifier"
    )
    return dataclasses.replace(plan, buckets=kept, dense=plan.dense + left), words
