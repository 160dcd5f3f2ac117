"""Random steps and costs, and the plain way to everything: enumeration."""

import dataclasses
from collections.abc import Iterator

from hypothesis import strategies as st

from benchmarks.plans import SortingTime
from horovod_sparse.merging import CostModel, ParameterFacts, Plan, Profile, Workload, predict
from horovod_sparse.planning.model import AffineTime, Fit, plan_of_segments

KINDS = (("float32", "cpu", 0), ("float32", "cpu", 1), ("float64", "cpu", 0))


@st.composite
def workloads(draw, max_layers: int = 9, kinds: int = 1, dense: bool = False) -> Workload:
    rows = draw(
        st.lists(
            st.tuples(st.integers(1, 5000), st.floats(0.0, 5.0), st.integers(0, kinds - 1), st.booleans()),
            min_size=1,
            max_size=max_layers,
        )
    )
    facts, times, stays = [], [], []
    for number, (elements, seconds, kind, is_dense) in enumerate(rows):
        dtype, device, group = KINDS[kind]
        facts.append(ParameterFacts(f"p{number}", elements, dtype, device, group))
        times.append(seconds)
        if dense and is_dense:
            stays.append(f"p{number}")
    times[0] += 0.125  # something has to take time
    return Workload(tuple(facts), tuple(times), draw(st.floats(0.0, 1.0)), frozenset(stays))


@st.composite
def costs(draw) -> CostModel:
    selection = draw(
        st.one_of(
            st.builds(AffineTime, st.floats(0.0, 1.0), st.floats(0.0, 1e-3)),
            st.builds(SortingTime, st.floats(0.0, 1e-4)),
        )
    )
    communication = draw(st.builds(AffineTime, st.floats(0.0, 3.0), st.floats(0.0, 1e-3)))
    dense = draw(st.builds(AffineTime, st.floats(0.0, 3.0), st.floats(0.0, 1e-3)))
    return CostModel(selection, communication, dense)


def all_plans(workload: Workload) -> Iterator[Plan]:
    """Every way to merge neighbours: 2^(m - 1) plans."""
    m = len(workload.sparse)
    for cuts in range(2 ** (m - 1)):
        ends = [place for place in range(1, m) if cuts >> (place - 1) & 1]
        yield plan_of_segments(workload, [*ends, m])


def seconds(workload: Workload, plan: Plan, cost: CostModel) -> float:
    return predict(workload, plan, cost).iteration_seconds


def profile_of_two(selection: dict[str, Fit], backward: dict[str, float], forward: float) -> Profile:
    """Of two ranks, both of whose collectives take 1 ms and 10 ns a byte."""
    collectives = dict.fromkeys(("allgather", "allreduce"), Fit(1e-3, 1e-8))
    made = Profile(2, "torch", "gloo", 0.001, collectives, selection)
    return dataclasses.replace(made, backward_seconds=backward, forward_seconds=forward)
