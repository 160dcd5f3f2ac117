"""Several steps on simulated ranks, and the laws that hold for every run, as checks on a `History`."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_sparse.collectives import AllGather, ReduceScatter
from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.feedback import Recipe
from horovod_sparse.simulation import Recorder, SimulatedCluster
from horovod_sparse.sparsifiers import SparseSum
from horovod_sparse.sparsifiers.base import Traffic
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer
from horovod_sparse.topology import Topology
from horovod_sparse.training.encoding import shared_digest
from support.cases import Case
from support.gradients import as_gradient, gaussian, wide


@dataclass(frozen=True)
class Scenario:
    """How many ranks, how many elements, of which dtype; on how many hosts, where there are two levels."""

    size: int
    num_elements: int
    dtype: str = "float32"
    num_steps: int = 4
    hosts: int = 0

    def __str__(self) -> str:
        ranks = f"P{self.size}" if self.topology is None else f"N{self.hosts}-L{self.topology.per_host}"
        return f"{ranks}-n{self.num_elements}-{self.dtype}"

    @property
    def topology(self) -> Topology | None:
        """Which ranks share a host; None where there is one level."""
        return Topology.regular(self.hosts, self.size // self.hosts) if self.hosts else None

    def cluster(self, recipe: Recipe) -> SimulatedCluster:
        return SimulatedCluster(recipe, self.num_elements, self.size, self.dtype, topology=self.topology)


@dataclass
class Step:
    """What came out of one step: a sum per rank, or the error that each raised; residuals; traffic."""

    results: list[SparseSum | Exception]
    residuals: list[np.ndarray]
    recorder: Recorder

    @property
    def sums(self) -> list[SparseSum]:
        """The sums of all ranks, where the step was not abandoned."""
        for result in self.results:
            if isinstance(result, Exception):
                raise result
        return self.results  # type: ignore[return-value]

    @property
    def abandoned(self) -> bool:
        return any(isinstance(result, Exception) for result in self.results)


@dataclass
class History:
    """A run: float64 gradients [steps, P, n] as ranks were given them, and the cluster as it ended."""

    recipe: Recipe
    scenario: Scenario
    gradients: np.ndarray
    cluster: SimulatedCluster
    steps: list[Step] = field(default_factory=list)

    def dense(self, step: int, rank: int = 0) -> np.ndarray:
        """The synchronized gradient (a sum) of one step on one rank, as float64."""
        out = np.zeros(self.scenario.num_elements)
        sum_ = self.steps[step].sums[rank]
        np.add.at(out, sum_.indices, sum_.values.astype(np.float64))
        return out


def random_gradients(
    scenario: Scenario, draw: Callable[[np.random.Generator, Any], np.ndarray] = gaussian, seed: int = 0
) -> np.ndarray:
    generator = np.random.default_rng([seed, scenario.size, scenario.num_elements])
    return draw(generator, (scenario.num_steps, scenario.size, scenario.num_elements))


def run(
    recipe: Recipe,
    scenario: Scenario,
    gradients: np.ndarray,
    cluster: SimulatedCluster | None = None,
    rates: Sequence[float] | None = None,
) -> History:
    """Steps of gradients [steps, P, n], rounded to the scenario's dtype; on a fresh cluster by default."""
    cluster = cluster or scenario.cluster(recipe)
    given = [[as_gradient(values, scenario.dtype) for values in step] for step in gradients]
    exact = np.array([[wide(gradient) for gradient in step] for step in given])
    history = History(recipe, scenario, exact.reshape(gradients.shape), cluster)
    for number, step in enumerate(given):
        cluster.recorder = Recorder()
        results = cluster.synchronize(step, 1.0 if rates is None else rates[number], keep_errors=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, NonFiniteGradientError):
                raise result
        left = np.array([wide(gradient) for gradient in step])
        assert np.array_equal(left, exact[number], equal_nan=True), "a fold leaves the gradient alone"
        history.steps.append(Step(copy.deepcopy(results), cluster.residuals(), cluster.recorder))
    return history


def allows(declared: Traffic, bytes_sent: int) -> bool:
    most = declared.bytes_sent if declared.at_most is None else declared.at_most
    return declared.bytes_sent <= bytes_sent <= most


def rounding(history: History, num_steps: int) -> np.ndarray:
    """Largest error per element that the arithmetic of `num_steps` steps can make, float64 [n].

    P * steps additions, each rounded by at most half an ulp of a number below A = sum over steps and ranks of
    |g|; twice that leaves room for the errors' own rounding. A quantizer sends of a small element as much as
    of its group's others, and so do two bits: there A is the bucket's largest.
    """
    dtype = history.cluster.buckets[0].info.value_dtype
    magnitude = np.abs(np.nan_to_num(history.gradients[:num_steps], nan=0, posinf=0, neginf=0)).sum((0, 1))
    if isinstance(history.recipe.sparsifier, Quantizer) or history.recipe.sparsifier.values == "2bit":
        magnitude = np.full_like(magnitude, magnitude.max(initial=0.0))
    # below the normal numbers an ulp no longer shrinks: half of the smallest denormal per addition
    smallest = float(np.finfo(dtype).smallest_subnormal)
    additions = history.scenario.size * num_steps
    return additions * (float(np.finfo(dtype).eps) * magnitude + smallest)


def nothing_is_lost(history: History, *, exactly: bool = False) -> None:
    """Law 1: after every step, what was applied + the sum of residuals = the sum of all gradients.

    (Both sides times P, against the law's wording.) What is not finite counts as 0, and an abandoned
    step applies nothing.
    """
    wanted = np.zeros(history.scenario.num_elements)
    applied = np.zeros(history.scenario.num_elements)
    for number, step in enumerate(history.steps):
        wanted += np.where(np.isfinite(history.gradients[number]), history.gradients[number], 0.0).sum(0)
        if not step.abandoned:
            applied += history.dense(number)
        held = np.sum(step.residuals, axis=0, dtype=np.float64)
        error = np.abs(applied + held - wanted)
        allowed = np.zeros_like(error) if exactly else rounding(history, number + 1)
        assert (error <= allowed).all(), f"step {number}: {error.max()} lost at element {error.argmax()}"


def nothing_is_lost_within_a_step(history: History) -> None:
    """What law 1 leaves where nothing is carried on: each step sends or drops its own gradient, once."""
    for number, step in enumerate(history.steps):
        wanted = history.gradients[number].sum(0)
        held = np.sum(step.residuals, axis=0, dtype=np.float64)
        assert (np.abs(history.dense(number) + held - wanted) <= rounding(history, number + 1)).all()


def replicas_agree(history: History) -> None:
    """Law 2: all ranks hold the same sum, bit for bit, and so they do what their states share."""
    for step in history.steps:
        if step.abandoned:
            assert all(isinstance(result, Exception) for result in step.results)
            continue
        first = step.sums[0]
        for other in step.sums[1:]:
            assert other.indices.tobytes() == first.indices.tobytes()
            assert other.values.tobytes() == first.values.tobytes()
            assert other.counts.tolist() == first.counts.tolist()
    topology = history.scenario.topology
    for ranks in [range(history.scenario.size)] if topology is None else topology.columns:
        states = [history.cluster.buckets[rank].state for rank in ranks]
        assert all(state.step == states[0].step for state in states)
        assert len({shared_digest({"bucket": state}) for state in states}) == 1, states


def sums_are_right(history: History) -> None:
    """Indices within the bucket, as many as values, finite; counts that say who sent how many."""
    info = history.cluster.buckets[0].whole
    for step in history.steps:
        for sum_ in [] if step.abandoned else step.sums:
            assert sum_.indices.dtype == np.int32
            assert sum_.values.dtype == info.value_dtype
            assert sum_.indices.shape == sum_.values.shape
            assert ((sum_.indices >= 0) & (sum_.indices < info.num_elements)).all()
            assert np.isfinite(sum_.values).all()
            assert sum_.counts.shape == (info.size,)


def exclusive_means_exclusive(history: History) -> None:
    """Law 4: no index twice, and the union has as many elements as counts say (but for what fills shards)."""
    for step in history.steps:
        for sum_ in [] if step.abandoned else step.sums:
            assert np.unique(sum_.indices).size == sum_.indices.size
            assert 0 <= sum_.counts.sum() - sum_.indices.size <= _filling(history)


def counts_as_promised(history: History, case: Case) -> None:
    """Law 5, where counts are exact: every rank selects k, every time.

    With two levels k is of a shard, and a shard that is filled up may have selected what fills it.
    """
    columns, filling = _columns(history), _filling(history)
    target = case.target(history.cluster.buckets[0].info.num_elements)
    for step in history.steps:
        for rank, sum_ in enumerate([] if step.abandoned else step.sums):
            assert sum_.counts.tolist() == [target] * history.scenario.size
            union = sum(case.union(sum_.counts[column]) for column in columns)
            assert union - filling * len(columns[0]) <= sum_.indices.size <= union
            if case.same_indices:
                assert np.unique(sum_.indices).size == sum_.indices.size
            assert history.cluster.buckets[rank].last.num_selected == target * len(columns)


def _columns(history: History) -> list[list[int]]:
    """The ranks that sparsify the same elements: all of them, or a column of hosts."""
    topology = history.scenario.topology
    everyone = [tuple(range(history.scenario.size))]
    return [list(ranks) for ranks in (everyone if topology is None else topology.columns)]


def _filling(history: History) -> int:
    """Elements that fill shards up, so that all are of one length."""
    of_shards = len(_columns(history)) * history.cluster.buckets[0].info.num_elements
    return of_shards - history.scenario.num_elements


def traffic_as_declared(history: History) -> None:
    """Law 7: kinds, rounds and bytes of every step and rank are what the algorithm declares.

    An abandoned step has the same rounds as any other: a graph driver unrolls them beforehand. With two
    levels there is a round before and one behind it, within the host.
    """
    buckets, columns = history.cluster.buckets, _columns(history)
    sparsifier, size = buckets[0].recipe.sparsifier, len(columns[0])
    inside = history.scenario.topology is not None
    own = slice(1, -1) if inside else slice(None)
    # kinds hold for a step that was given up too; its number is not counted by the sparsifier
    number = -1
    for step in history.steps:
        kinds = tuple(step.recorder.kinds)
        assert kinds[own] == sparsifier.rounds(size)
        if inside:
            assert (kinds[0], kinds[-1]) == (ReduceScatter, AllGather)
            assert step.recorder.levels == ["host", *["across"] * (len(kinds) - 2), "host"]
        if step.abandoned:
            continue
        number += 1
        for rank, bucket in enumerate(buckets):
            sum_ = step.sums[rank]
            counts = sum_.counts[next(column for column in columns if rank in column)]
            declared = sparsifier.traffic(bucket.info, counts, number)
            assert tuple(round_.kind for round_ in declared) == kinds[own]
            sent = [by_rank[rank] for by_rank in step.recorder.bytes_sent]
            assert all(allows(round_, bytes_) for round_, bytes_ in zip(declared, sent[own], strict=True)), (
                f"rank {rank} sent {sent} bytes, declared are {declared}"
            )
            if inside:
                assert sent[0] == history.scenario.num_elements * bucket.info.value_dtype.itemsize
    if not history.steps[-1].abandoned:  # telemetry speaks of the last step only
        for rank, bucket in enumerate(buckets):
            sent = [by_rank[rank] for by_rank in history.steps[-1].recorder.bytes_sent]
            assert bucket.last.bytes_by_round == sent
            assert bucket.last.bytes_sent == sum(sent[own])
            assert bucket.last.bytes_inside == sum(sent) - sum(sent[own])


def dense_bounds(history: History) -> None:
    """No element is ever sent, or held back, that is larger than all gradients until then together.

    All of them at once is what dense steps would have applied one by one. Rounding for the wire is let
    through: it may enlarge a small value beside a large one.
    """
    total = np.abs(history.gradients).sum(1)
    for number, step in enumerate(history.steps):
        most = 1.25 * total[: number + 1].sum(0).max()
        assert np.abs(history.dense(number)).max() <= most, f"step {number}"
        assert np.abs(step.residuals).max() <= most, f"step {number}"


def nobody_starves(cluster: SimulatedCluster, growth: np.ndarray, swing: np.ndarray, most_steps: int) -> int:
    """Law 9: what keeps growing is sent in finitely many steps, and again after that; steps that it took.

    Every step adds `growth` to the ranks' residuals, and `swing` with a sign that alternates, float32 [P, n].
    Whatever grows on a rank has to leave its residual twice, and the element has to be applied twice, unless
    the ranks cancel each other out there.
    """
    left, applied = np.zeros(growth.shape, int), np.zeros(growth.shape[1], int)
    before = np.zeros_like(growth)
    for step in range(most_steps):
        gradients = growth + (swing if step % 2 else -swing)
        applied += cluster.step([*gradients.copy()]) != 0.0
        after = np.array(cluster.residuals())
        left += np.abs(after) < 0.99 * np.abs(before + gradients)  # rounding for the wire leaves a little
        before = after
        if (left[growth != 0.0] >= 2).all() and (applied[growth.sum(0) != 0.0] >= 2).all():
            return step + 1
    unapplied = (applied < 2) & (growth.sum(0) != 0.0)
    starved = np.argwhere((growth != 0.0) & ((left < 2) | unapplied)).tolist()
    raise AssertionError(f"in {most_steps} steps these (rank, element) were not sent twice: {starved[:8]}")


def check_all(history: History, case: Case, *, exactly: bool = False) -> None:
    """Every law that can be read off a run (1, 2, 4, 5, 7); exactly: where no sum of its gradients rounds."""
    sums_are_right(history)
    if case.loses_mass:
        nothing_is_lost_within_a_step(history)
    else:
        nothing_is_lost(history, exactly=exactly and case.stays_dyadic)
    replicas_agree(history)
    if case.exclusive:
        exclusive_means_exclusive(history)
    if case.exact_count:
        counts_as_promised(history, case)
    traffic_as_declared(history)
