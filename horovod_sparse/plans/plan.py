"""A plan: which parameters form which bucket, and which stay dense. A plain value, free of frameworks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from horovod_sparse.checks import check_density
from horovod_sparse.errors import ArgumentError

#: Indices travel as int32.
MAX_BUCKET_ELEMENTS = 2**31 - 1

#: dtype, device, parameter group, density
Kind: TypeAlias = tuple[str, str, int, float]

_ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class ParameterFacts:
    """What a plan has to know about a parameter.

    Attributes:
        name: unique within the model.
        num_elements: n, 1 or more.
        dtype: of its gradient: "float32", "float64", "float16" or "bfloat16".
        device: where it lives, as the framework writes it.
        group: number of the optimizer's parameter group; groups may differ in their learning rate.
        density: what a rule asks for, 1 for a parameter that is sent whole; 0 where no rule holds.
        shape: where it is known; ranks compare it.
    """

    name: str
    num_elements: int
    dtype: str = "float32"
    device: str = "cpu"
    group: int = 0
    density: float = 0.0
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.num_elements * _ITEM_SIZES[self.dtype]


def same_kind(parameter: ParameterFacts) -> Kind:
    """What all parameters of a bucket have in common: dtype, device, parameter group, density.

    Example:
        >>> same_kind(ParameterFacts("weight", 10))
        ('float32', 'cpu', 0, 0.0)
    """
    return parameter.dtype, parameter.device, parameter.group, parameter.density


@dataclass(frozen=True)
class Plan:
    """Which parameters form which bucket, and which stay dense.

    Plans are values: equal where they say the same, hashable, printable, and plain enough for JSON.
    However a plan was made, by size, by hand, or by a cost model, the optimizer takes it.

    Attributes:
        buckets: names of the parameters of every bucket. Buckets, and the parameters in them, stand in
            backward order: the gradient that is ready first comes first.
        dense: names of the parameters that are synchronized by a plain allreduce.
        density: of the buckets, where times decided about it too (`density="auto"`); None where it is the
            sparsifier's own.

    Example:
        >>> plan = Plan(buckets=(("fc.weight",), ("conv.weight", "conv.bias")), dense=("norm.weight",))
        >>> print(plan)
        2 buckets of 1, 2 parameters; 1 parameter stays dense
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
    """

    buckets: tuple[tuple[str, ...], ...]
    dense: tuple[str, ...] = ()
    density: float | None = None

    def __post_init__(self) -> None:
        if self.density is not None:
            check_density("plan.density", self.density)
            object.__setattr__(self, "density", float(self.density))
        # lists are what JSON gives back and what users write
        object.__setattr__(self, "buckets", tuple(tuple(bucket) for bucket in self.buckets))
        object.__setattr__(self, "dense", tuple(self.dense))
        twice = sorted(name for name, count in Counter(self.names()).items() if count > 1)
        if twice:
            raise ArgumentError("plan", twice, "every parameter once")
        if not all(self.buckets):
            raise ArgumentError("plan", self.buckets, "buckets of at least one parameter")

    def __str__(self) -> str:
        sizes = [len(bucket) for bucket in self.buckets]
        shown = ", ".join(map(str, sizes[:12])) + (", ..." if len(sizes) > 12 else "")
        text = f"{_count(len(sizes), 'bucket')} of {shown} parameters" if sizes else "no buckets"
        if self.dense:
            text += f"; {_count(len(self.dense), 'parameter')} {'stays' if len(self.dense) == 1 else 'stay'}"
            text += " dense"
        if self.density is not None:
            text += f"; density {self.density:g}"
        return text

    def names(self) -> tuple[str, ...]:
        """All parameters, those of buckets first."""
        return tuple(name for bucket in self.buckets for name in bucket) + self.dense

    def to_dict(self) -> dict[str, Any]:
        """The plan in lists and strings, for JSON and checkpoints."""
        plain: dict[str, Any] = {"buckets": [list(one) for one in self.buckets], "dense": list(self.dense)}
        return plain if self.density is None else {**plain, "density": self.density}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote.

        Raises:
            ArgumentError: if it is something else.
        """
        try:
            return cls(tuple(map(tuple, saved["buckets"])), tuple(saved["dense"]), saved.get("density"))
        except (KeyError, TypeError) as error:
            raise ArgumentError("plan", saved, "what Plan.to_dict() returned") from error

    def check(self, parameters: Sequence[ParameterFacts]) -> None:
        """Refuses a plan that does not fit these parameters.

        Raises:
            ArgumentError: if a parameter is missing or unknown, or a bucket mixes dtypes, devices or
                parameter groups, or has more elements than an int32 index can name.
        """
        facts = {parameter.name: parameter for parameter in parameters}
        named = set(self.names())
        if unknown := sorted(named - set(facts)):
            raise ArgumentError("plan", unknown, "only names of parameters that require a gradient")
        if missing := sorted(set(facts) - named):
            raise ArgumentError("plan", f"nothing for {missing}", "a bucket, or dense, for every parameter")
        for bucket in self.buckets:
            kinds = sorted({same_kind(facts[name]) for name in bucket})
            if len(kinds) > 1:
                raise ArgumentError(
                    "plan", bucket, f"buckets of one dtype, device, group and density; here are {kinds}"
                )
            total = sum(facts[name].num_elements for name in bucket)
            if total > MAX_BUCKET_ELEMENTS:
                raise ArgumentError("plan", bucket, f"buckets of fewer than 2**31 elements; this has {total}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
