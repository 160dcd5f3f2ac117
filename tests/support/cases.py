"""The table: one row per variant of a sparsifier. A new row meets every law in every test."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from horovod_sparse.feedback import ErrorFeedback, Recipe, recipe
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer


@dataclass(frozen=True)
class CountBand:
    """How far the union count of a threshold rule may be from k."""

    first: float  # the count of the first step is within this factor of k, either way
    settled: float  # mean of |count / k - 1| from step 5 on
    from_target: int  # the band is promised from this k on


@dataclass(frozen=True)
class Case:
    """A variant and what it promises."""

    recipe: Recipe
    exact_count: bool = False  # every rank selects exactly k, whatever the gradient
    exclusive: bool = False  # no index is selected by two ranks
    same_indices: bool = False  # all ranks select the same indices, so that the union has k elements too
    count_band: CountBand | None = None  # for threshold rules that promise one
    loses_mass: bool = False  # without error feedback: the declared exception to law 1

    @property
    def value_rounding(self) -> float:
        """Relative error of a value that is written for the wire; 0 where values are exact."""
        return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "2bit": 1.0}.get(self.recipe.sparsifier.values, 0.0)

    @property
    def stays_dyadic(self) -> bool:
        """Whether numbers of few bits stay so.

        Two bits divide by counts, which leaves residuals of full length; several teams share out what they
        drop; a quantizer's units are means and norms.
        """
        sparsifier = self.recipe.sparsifier
        return not self.quantizes and sparsifier.values != "2bit" and getattr(sparsifier, "teams", 1) == 1

    @property
    def quantizes(self) -> bool:
        """Whether every element is sent, in few bits: the density is 1, and rounding is coarse."""
        return isinstance(self.recipe.sparsifier, Quantizer)

    def at(self, density: float) -> Recipe:
        """The recipe at another density, where one can be chosen."""
        if self.quantizes:
            return self.recipe
        sparsifier = dataclasses.replace(self.recipe.sparsifier, density=density)
        return dataclasses.replace(self.recipe, sparsifier=sparsifier)

    def target(self, num_elements: int) -> int:
        """k, by its definition."""
        return min(num_elements, max(1, round(self.recipe.sparsifier.density * num_elements)))

    def union(self, counts: np.ndarray) -> int:
        """Elements of the union that a step's counts promise (where it is promised at all)."""
        return int(counts[0] if self.same_indices else counts.sum())


def case_id(case: Case) -> str:
    """A row's name in test reports: its recipe without the density."""
    sparsifier, changed = case.recipe.sparsifier, []
    for item in dataclasses.fields(sparsifier):
        value = getattr(sparsifier, item.name)
        if item.name != "density" and value != item.default:
            changed.append(f"{item.name}={value}")
    if case.recipe.feedback != ErrorFeedback():
        changed.append(f"feedback={case.recipe.feedback.text_name}")
    return "-".join([sparsifier.name, *changed])


# 7 % of the elements: small buckets then still have something to choose from.
_DENSITY = 0.07
_SKETCH_BAND = CountBand(first=1.1, settled=0.03, from_target=10_000)


def _case(name: str, *, promises: dict[str, Any] | None = None, **arguments: Any) -> Case:
    return Case(recipe(name, **{"density": _DENSITY, **arguments}), **(promises or {}))


_EXACT = {"exact_count": True}
_SHARED = {"exact_count": True, "same_indices": True}
_SKETCH = {"exclusive": True, "count_band": _SKETCH_BAND}
_PAPER = {"exclusive": True}
#: what laws say of counts they say of density 1
_ALL: dict[str, Any] = {"density": 1.0, "promises": _SHARED}
_LOSES: dict[str, Any] = {"feedback": "none", "density": 1.0, "promises": _SHARED | {"loses_mass": True}}

CASES: tuple[Case, ...] = (
    _case("topk", promises=_EXACT),
    _case("topk", feedback="none", promises=_EXACT | {"loses_mass": True}),
    _case("micro", promises=_SKETCH),
    _case("micro", threshold="paper", promises=_PAPER),
    _case("exdyna", promises=_SKETCH),
    _case("exdyna", rebalance="paper", promises=_SKETCH),
    _case("exdyna", threshold="paper", promises=_PAPER),
    _case("exdyna", threshold="paper", rebalance="paper", promises=_PAPER),
    _case("randomk", promises=_SHARED),
    _case("randomk", values="float16", promises=_SHARED),
    _case("cltk", promises=_SHARED),
    _case("cltk", values="bfloat16", promises=_SHARED),
    _case("hard_threshold", threshold=0.5),
    _case("hard_threshold", threshold=0.5, values="bfloat16", indices="gaps"),
    _case("dgc"),
    _case("sidco"),
    _case("sidco", values="float16", indices="gaps"),
    _case("mstopk", promises=_EXACT),
    _case("dragonn"),
    _case("dragonn", slots_per_selected=0.5, values="float16", indices="gaps"),
    _case("gtopk", promises=_SHARED),
    _case("spardl", promises=_SHARED),
    _case("spardl", values="float16", indices="gaps", promises=_SHARED),
    _case("gtopk", values="float16", indices="gaps", promises=_SHARED),
    _case("oktopk"),
    _case("oktopk", threshold_steps=2, region_steps=3, values="float16", indices="gaps"),
    _case("topk_dsa"),
    _case("topk_dsa", values="bfloat16", indices="gaps"),
    _case("signsgd", **_ALL),
    _case("signsgd", group=64, **_ALL),
    _case("qsgd", **_ALL),
    _case("qsgd", levels=127, group=1024, **_ALL),
    _case("qsgd", levels=1, group=32, **_LOSES),
    _case("topk", values="float16", indices="gaps", promises=_EXACT),
    _case("micro", values="float16", indices="gaps", promises=_SKETCH),
    _case("topk", values="2bit", indices="gaps", promises=_EXACT),
    _case("exdyna", values="2bit", promises=_SKETCH),
    _case("chunk_topk", promises=_EXACT),
    _case("chunk_topk", chunk=9, values="2bit", indices="gaps", promises=_EXACT),
    _case("oktopk", values="2bit"),
    _case("exdyna", values="bfloat16", indices="gaps", promises=_SKETCH),
)

#: one row per kind of request: what real ranks can do differently from the simulator
REPRESENTATIVES = tuple(
    {case_id(case): case for case in CASES}[name]
    for name in (
        "topk",  # one gather
        "exdyna",  # a gather, then sums at what was gathered
        "randomk",  # sums at positions that all ranks know
        "cltk-values=bfloat16",  # a leader's broadcast; sums in parts, since the codec rounds
        "gtopk",  # pairs, one of which has nothing to say
        "spardl",  # pairs, then a gather
        "oktopk",  # all to all
        "qsgd",  # every element in few bits
    )
)


def on_ranks(*names: str) -> list[Any]:
    """The table as parameters of a test on real ranks: by day these rows, or the representatives."""
    by_day = names or tuple(map(case_id, REPRESENTATIVES))
    named = {case_id(case): case for case in CASES}
    return [
        pytest.param(case, id=name, marks=[] if name in by_day else pytest.mark.nightly)
        for name, case in named.items()
    ]
