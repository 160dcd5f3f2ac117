"""Plans that follow sizes, or the user's own groups: no model of time is asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horovod_sparse.checks import check_count
from horovod_sparse.errors import ArgumentError
from horovod_sparse.plans.plan import MAX_BUCKET_ELEMENTS, Kind, ParameterFacts, Plan, same_kind

#: Large enough that a bucket's fixed cost (measured: 0.12 ms of CPU for top-k, 0.16 ms for ExDyna, and a
#: place in a Horovod cycle) is small beside its pass over memory (2.5 ms for 32 MiB at 7.5 ms per 100 MB),
#: and small enough that all buckets but a large model's last communicate while backward still runs.
#: Between 8 and 32 MiB a step's CPU time was the same within noise; at 1 MB it was a third higher.
DEFAULT_BUCKET_BYTES = 32 * 2**20


def fixed_bytes(parameters: Sequence[ParameterFacts], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Plan:
    """Buckets of about the same number of bytes.

    Walks the parameters from the last to the first, as backward does. A bucket is closed before it
    would exceed `bucket_bytes`, so a larger parameter has a bucket of its own. Parameters of different
    dtype, device or parameter group never share a bucket; each kind fills buckets of its own, so that
    weights and biases in separate groups do not break each other's buckets apart.

    Args:
        parameters: in the order in which the model uses them (forward).
        bucket_bytes: of gradient, 1 or more; 1 gives every parameter a bucket of its own.

    Returns:
        The plan. Buckets are ordered by their first parameter.

    Raises:
        ArgumentError: if `bucket_bytes` is not a positive whole number.

    Example:
        >>> facts = [ParameterFacts("a", 100), ParameterFacts("b", 10), ParameterFacts("c", 20)]
        >>> fixed_bytes(facts, bucket_bytes=120).buckets
        (('c', 'b'), ('a',))
    """
    check_count("bucket_bytes", bucket_bytes, "a whole number of bytes, 1 or more")
    buckets: list[list[str]] = []
    filling: dict[Kind, tuple[list[str], int, int]] = {}
    for parameter in reversed(parameters):
        bucket, num_bytes, num_elements = filling.get(same_kind(parameter), ([], 0, 0))
        num_bytes += parameter.num_bytes
        num_elements += parameter.num_elements
        if not bucket or num_bytes > bucket_bytes or num_elements > MAX_BUCKET_ELEMENTS:
            bucket, num_bytes, num_elements = [], parameter.num_bytes, parameter.num_elements
            buckets.append(bucket)
        bucket.append(parameter.name)
        filling[same_kind(parameter)] = bucket, num_bytes, num_elements
    return Plan(tuple(map(tuple, buckets)))


def fixed_elements(parameters: Sequence[ParameterFacts], num_elements: int) -> Plan:
    """Buckets of at least a number of elements, as MGS-SGD's threshold makes them.

    Walks the parameters from the last to the first, as backward does. A bucket is closed as soon as it
    holds `num_elements`; what is left over at the end forms the last ones. Kinds fill buckets of their
    own, as in `fixed_bytes`.

    Args:
        parameters: in the order in which the model uses them (forward).
        num_elements: 1 or more; 1 gives every parameter a bucket of its own.

    Source: OMGS-SGD, section V-D (8192), the rule as its public program has it.

    Raises:
        ArgumentError: if `num_elements` is not a positive whole number.

    Example:
        >>> facts = [ParameterFacts("a", 100), ParameterFacts("b", 10), ParameterFacts("c", 20)]
        >>> fixed_elements(facts, num_elements=30).buckets
        (('c', 'b'), ('a',))
    """
    check_count("num_elements", num_elements)
    buckets: list[list[str]] = []
    filling: dict[Kind, tuple[list[str], int]] = {}
    for parameter in reversed(parameters):
        bucket, total = filling.get(same_kind(parameter), ([], num_elements))
        if total >= num_elements or total + parameter.num_elements > MAX_BUCKET_ELEMENTS:
            bucket, total = [], 0
            buckets.append(bucket)
        bucket.append(parameter.name)
        filling[same_kind(parameter)] = bucket, total + parameter.num_elements
    return Plan(tuple(map(tuple, buckets)))


def num_buckets(parameters: Sequence[ParameterFacts], count: int) -> Plan:
    """About `count` buckets of about the same number of parameters, as Horovod's ``groups=count``.

    Args:
        parameters: in the order in which the model uses them.
        count: of buckets, 1 or more. There are more where kinds (dtype, device, parameter group) would
            mix, and fewer where there are fewer parameters.

    Example:
        >>> num_buckets([ParameterFacts(name, 1) for name in "abcde"], 2).buckets
        (('e', 'd', 'c'), ('b', 'a'))
    """
    check_count("groups", count, "a whole number, 1 or more, or a list of lists of parameters")
    backward = list(reversed(parameters))
    quotient, remainder = divmod(len(backward), count)
    groups, start = [], 0
    for number in range(count):
        stop = start + quotient + (number < remainder)
        groups.append(backward[start:stop])
        start = stop
    return Plan(tuple(_split_by_kind(groups)))


def explicit_groups(parameters: Sequence[ParameterFacts], groups: Iterable[Iterable[str]]) -> Plan:
    """One bucket for each of the user's groups; a parameter in none has a bucket of its own.

    Args:
        parameters: in the order in which the model uses them.
        groups: names; those that are no parameters here are passed over (frozen ones, as Horovod does).
            A group of several kinds (dtype, device, parameter group) becomes a bucket for each.

    Example:
        >>> explicit_groups([ParameterFacts(name, 1) for name in "abcd"], [["a", "c"]]).buckets
        (('d',), ('c', 'a'), ('b',))
    """
    wanted = {name: number for number, group in enumerate(groups) for name in group}
    gathered: dict[object, list[ParameterFacts]] = {}
    for parameter in reversed(parameters):
        gathered.setdefault(wanted.get(parameter.name, parameter.name), []).append(parameter)
    return Plan(tuple(_split_by_kind(gathered.values())))


def _split_by_kind(groups: Iterable[Sequence[ParameterFacts]]) -> list[tuple[str, ...]]:
    """Each group's names, as one bucket per kind."""
    buckets: list[tuple[str, ...]] = []
    for group in groups:
        kinds: dict[Kind, list[str]] = {}
        for parameter in group:
            kinds.setdefault(same_kind(parameter), []).append(parameter.name)
        buckets.extend(tuple(names) for names in kinds.values())
    return buckets


def make_plan(
    facts: Mapping[str, tuple[ParameterFacts, Any]],
    *,
    plan: Plan | None = None,
    groups: Any = None,
    bucket_bytes: int | None = None,
) -> Plan:
    """The plan that the arguments ask for, at most one of which may be given."""
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


def only_one(**named: Any) -> None:
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ArgumentError(" and ".join(given), tuple(given.values()), "only one of them")
