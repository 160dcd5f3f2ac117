"""Ok-Topk and TopkDSA against plain accounts of their papers."""

from dataclasses import dataclass, field

import numpy as np

from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import Recorder, SimulatedCluster
from horovod_sparse.sparsifiers.oktopk import told_orders
from horovod_sparse.sparsifiers.rounds.sparse_vectors import discards_meet
from support.gradients import dyadic
from support.sampling import rows_by


def kth(magnitudes: np.ndarray, k: int) -> float:
    return float(np.sort(magnitudes)[-k])


@dataclass
class OkTopkReference:
    """Algorithms 1 and 2 of Ok-Topk (Li & Hoefler 2022), with thresholds steered between exact steps."""

    residuals: np.ndarray  # float64 [P, n], epsilon
    k: int  # of the global selection
    threshold_steps: int  # tau', how often both thresholds are found exactly
    step: int = 0  # t
    local: list[float] = field(default_factory=list)  # [P], thresholds of the ranks
    whole: float = 0.0  # threshold of the sums
    counts: list[int] = field(default_factory=list)  # of the last step: elements that each rank selected
    passed: int = 0  # of the last step: elements of the sum

    def synchronize(self, gradients: np.ndarray, owners: np.ndarray | None = None) -> np.ndarray:
        """One step; the synchronized sum, dense, NaN where nothing came back.

        `owners` [n] keep the sums that do not come back, where that is not as in the paper.
        """
        size, n = gradients.shape
        self.local = self.local or [0.0] * size
        accumulators = self.residuals + gradients
        exact = self.step % self.threshold_steps == 0
        selected = np.zeros((size, n), bool)
        for rank, accumulator in enumerate(accumulators):
            if exact or self.local[rank] == 0.0:
                self.local[rank] = kth(np.abs(accumulator), self.k)
            selected[rank] = (np.abs(accumulator) >= self.local[rank]) & (accumulator != 0.0)
        total = np.where(selected, accumulators, 0.0).sum(axis=0)
        union = selected.any(axis=0)
        if exact or self.whole == 0.0:
            self.whole = kth(np.abs(total[union]), self.k) if union.sum() > self.k else 0.0
        chosen = union & (np.abs(total) >= self.whole)
        # Algorithm 2: what was selected here and came back leaves the residual
        self.residuals = np.where(selected & chosen, 0.0, accumulators)
        if owners is not None:
            self.residuals[selected] = 0.0
            dropped = np.flatnonzero(union & ~chosen)
            self.residuals[owners[dropped], dropped] += total[dropped]
        self.counts, self.passed = selected.sum(axis=1).tolist(), int(chosen.sum())
        return np.where(chosen, total, np.nan)

    def steer(self) -> None:
        """After a step: local / 1.012 below 2k/3, * 1.012 above 5k/4; whole by 1.008 outside [2k/3, 4k/3]."""
        for rank, count in enumerate(self.counts):
            if count < 2 * self.k / 3:
                self.local[rank] /= 1.012
            elif count > 5 * self.k / 4:
                self.local[rank] *= 1.012
        if self.passed < 2 * self.k / 3:
            self.whole /= 1.008
        elif self.passed > 4 * self.k / 3:
            self.whole *= 1.008
        self.step += 1


def topk_dsa_step(accumulators: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """SparCML's direct-send sum of everyone's k largest [n]; the union of what was selected; residuals.

    And whether the sums are shorter without indices: n words against two for each of the union and four in
    front of each of P messages.
    """
    size, n = accumulators.shape
    selected = np.zeros((size, n), bool)
    for rank, accumulator in enumerate(accumulators):
        selected[rank, np.argsort(-np.abs(accumulator), kind="stable")[:k]] = True
    union = selected.any(axis=0)
    total = np.where(selected, accumulators, 0.0).sum(axis=0)
    return total, union, np.where(selected, 0.0, accumulators), n < 4 * size + 2 * int(union.sum())


def uneven(generator: np.random.Generator, size: int, n: int) -> np.ndarray:
    gradients = dyadic(generator, (size, n))
    gradients[:, : n // 8] *= 8.0
    return gradients


@rows_by("size,every", [1, 2, 3, 4, 6, 8, 13, 16], [(1, 1), (4, 3), (32, 64)])
def test_oktopk_is_that_of_the_paper(size: int, every: tuple[int, int]) -> None:
    threshold_steps, region_steps = every
    n, density = 40 * size, 0.1
    cluster = SimulatedCluster(
        recipe("oktopk", density=density, threshold_steps=threshold_steps, region_steps=region_steps), n, size
    )
    expected = OkTopkReference(np.zeros((size, n)), round(density * n), threshold_steps)
    generator = np.random.default_rng([size, threshold_steps])
    for step in range(20):
        gradients = uneven(generator, size, n)
        owners = np.searchsorted(cluster.buckets[0].state.bounds, np.arange(n), side="right")
        wanted = expected.synchronize(gradients, owners if discards_meet(step) else None)
        sums = cluster.synchronize(list(gradients.astype(np.float32)))
        sum_, chosen = sums[0], ~np.isnan(wanted)
        assert sum_.indices.tolist() == np.flatnonzero(chosen).tolist()
        np.testing.assert_array_equal(sum_.values, wanted[chosen])  # few bits: exact in any order
        np.testing.assert_array_equal(cluster.residuals(), expected.residuals)
        assert sum_.counts.tolist() == expected.counts
        expected.steer()
        states = [bucket.state for bucket in cluster.buckets]
        np.testing.assert_allclose([state.local_threshold for state in states], expected.local, rtol=1e-6)
        np.testing.assert_allclose([state.global_threshold for state in states], expected.whole, rtol=1e-6)
        assert all((state.bounds == states[0].bounds).all() for state in states)


@rows_by("size,region_steps", [1, 2, 3, 8], [1, 64])
def test_k_pass_and_6k_travel_in_every_step(size: int, region_steps: int) -> None:
    """From the first step on, while residuals grow: kept thresholds let many times as many pass.

    Without the padding that lets lengths repeat.
    """
    n, k = 60_000, 600
    made = recipe("oktopk", density=k / n, region_steps=region_steps)
    cluster = SimulatedCluster(made, n, size)
    generator = np.random.default_rng(size)
    for step in range(12):
        gradients = generator.standard_normal((size, n), np.float32)
        # one region, if it stays, has nearly all
        gradients[:, : n // 8] *= 1.5 if region_steps == 1 else 8.0
        accumulators = np.array(cluster.residuals()) + gradients
        cluster.recorder = Recorder()
        sums = cluster.synchronize(list(gradients))
        assert sums[0].counts.tolist() == [k] * size
        assert k <= sums[0].indices.size <= 1.1 * k
        # words that a rank receives: headers, the notes of the thresholds, bounds; the rest is of elements
        notes = (size - 1) * (2 + told_orders(k).size + 3 * 5 + size)
        received = [cluster.recorder.total(rank).bytes_received / 4 - notes for rank in range(size)]
        assert np.mean(received) <= 6 * k * 1.1
        # those that come back are the largest sums, but for the tenth to which they are told
        chosen = np.abs(accumulators) >= np.sort(np.abs(accumulators))[:, -k][:, None]
        total = np.abs((accumulators * chosen).sum(0))
        if not discards_meet(step):
            left = np.delete(total, sums[0].indices)
            assert (left > 1.1 * np.sort(total)[-k]).sum() <= 0.12 * k


@rows_by("size,density", [1, 2, 3, 4, 6, 8, 16], [0.01, 0.1, 0.4])
def test_topk_dsa_is_that_of_the_paper(size: int, density: float) -> None:
    n = 100 * size
    cluster = SimulatedCluster(recipe("topk_dsa", density=density), n, size)
    generator, seen = np.random.default_rng(size), set()
    for _ in range(6):
        gradients = uneven(generator, size, n)
        total, union, residuals, dense = topk_dsa_step(
            np.array(cluster.residuals(), np.float64) + gradients, round(density * n)
        )
        sum_ = cluster.synchronize(list(gradients.astype(np.float32)))[0]
        assert bool(sum_.facts["dense"]) == dense
        # travelling without indices, what cancels is not known to have been there
        chosen = union & (total != 0.0) if dense else union
        assert sum_.indices.tolist() == np.flatnonzero(chosen).tolist()
        np.testing.assert_array_equal(sum_.values, total[chosen])
        np.testing.assert_array_equal(cluster.residuals(), residuals)
        seen.add(dense)
    if density != 0.1:  # both ways are met
        assert seen == {density == 0.4 and size > 1}
