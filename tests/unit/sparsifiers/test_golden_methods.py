"""CLT-k, DGC, SIDCo, MSTopk, hard threshold and DRAGONN in small cases worked by hand."""

import itertools
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.feedback import recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers import BucketInfo, SparsifierState
from horovod_sparse.sparsifiers.dgc import DGC
from horovod_sparse.sparsifiers.hard_threshold import HardThreshold, HardThresholdState
from horovod_sparse.sparsifiers.sidco import FITS, Excess, SIDCo
from support.sampling import rows_by


def folded(values: Any) -> HostAccumulator:
    values = np.array(values, np.float32)
    accumulator = HostAccumulator(values.size, density=0.1)
    accumulator.fold(values.copy())
    return accumulator


class Sampled(HostAccumulator):
    """An accumulator whose sample says what a test wants, and that notes the thresholds it is asked for."""

    def __init__(self, values: Any, sample: list[float]) -> None:
        super().__init__(len(values), density=0.1)
        self.fold(np.array(values, np.float32))
        self.sample, self.asked = np.array(sample, np.float32), []

    def sample_magnitudes(self, stride: int, offset: int = 0) -> Any:
        return self.sample

    def at_least(self, threshold: float, start: int = 0, stop: int | None = None) -> Any:
        self.asked.append(threshold)
        return super().at_least(threshold, start, stop)


_RAMP = np.arange(1, 101)  # magnitudes 1 to 100, k = 10: the tenth largest is 91


@pytest.mark.parametrize(
    ("guess", "asked", "sent"),
    [
        (91.0, [91.0], range(90, 100)),  # 91 and more: exactly 10
        (88.0, [88.0], range(87, 100)),  # 88 and more: 13 = 1.3 k, which is not above 1.3 k
        (87.0, [87.0], range(90, 100)),  # 87 and more: 14 is above 1.3 k, so the 10 largest of them
        (93.0, [93.0], range(92, 100)),  # 93 and more: 8 = 0.8 k, which is not below 0.8 k
        # 94 and more: 7 is below; 0.8 * 94 = 75.2 lets 25 through: above 1.3 k, so the 10 largest.
        (94.0, [94.0, 0.8 * 94.0], range(90, 100)),
        (110.0, [110.0, 88.0], range(87, 100)),  # 110: nothing; 88: 13, as above
        # 2000: 1600, 1280, 1024, ... ten times at most: 2000 * 0.8^10 = 214.7, nothing passes.
        (2000.0, [2000.0 * 0.8**i for i in range(11)], []),
    ],
)
def test_dgc_selects_hierarchically(guess: float, asked: list[float], sent: Any) -> None:
    accumulator = Sampled(_RAMP, [guess] * 10)
    found = DGC(density=0.1).select(accumulator, 10, SparsifierState(), BucketInfo("b", 100))
    assert found.indices.tolist() == list(sent)
    assert accumulator.asked == pytest.approx(asked)


def test_dgc_samples_with_a_stride_and_a_random_start() -> None:
    rule = DGC(sample_fraction=0.01)
    # k = 10 000 of a million: 1 % are 10 000, the quantile of 100 hits among them: stride 100.
    assert rule.stride(1_000_000, 10_000) == 100
    # k = 1000: 1 % would hold 10 hits; 64 hits need 64 000 samples: stride 15.
    assert rule.stride(1_000_000, 1000) == 15
    accumulator = folded(np.arange(1, 10_001))
    starts = set()
    for seed in range(40):
        # n = 10 000, k = 2000: 320 samples give 64 hits, stride 31. Sampled is every 31st of 1 ... 10 000,
        # so the order statistic is off by less than a stride.
        found = rule.sampled_threshold(accumulator, 2000, np.random.default_rng(seed))
        assert abs(found - 8001) <= 2 * 31
        starts.add(found % 31)
    assert len(starts) > 15


_SAMPLES = {
    "exponential": stats.expon(scale=0.3),
    "pareto": stats.genpareto(0.15, scale=2.0),
    "gamma": stats.gamma(0.7, scale=1.5),
}


@rows_by("distribution,density", _SAMPLES, [0.25, 0.05, 0.01])
def test_fits_find_the_quantiles_of_their_own_distribution(distribution: str, density: float) -> None:
    drawn = _SAMPLES[distribution].rvs(400_000, random_state=np.random.default_rng(5))
    found = FITS[distribution][0](Excess.of(drawn, 0.0), density)
    exact = float(_SAMPLES[distribution].isf(density))
    if distribution != "gamma":
        assert found == pytest.approx(exact, rel=0.03)
    else:
        # The method's tail drops a factor (x / beta) ** (alpha - 1): -beta (ln d + ln Gamma(alpha)). For
        # alpha below 1 the threshold comes out somewhat high.
        assert found == pytest.approx(-1.5 * (np.log(density) + gammaln(0.7)), rel=0.03)
        assert exact < found < 1.6 * exact


def test_each_further_stage_fits_what_exceeds_the_last_threshold() -> None:
    # 16 magnitudes, by hand, exponential: mean of all is 2, so stage one, for a quarter: 2 ln 4 = 2.7726.
    sizes = np.array([0.0] + [1.0] * 12 + [3.0, 4.0, 5.0, 8.0])
    found = SIDCo(density=0.0625).threshold(sizes, 4, 1)
    assert found == pytest.approx(2 * np.log(4), rel=1e-6)
    # Above it are 3, 4, 5, 8 with a mean of 5, so an excess of 5 - 2.7726; k = 1: 1/16 = 1/4 * 1/4:
    # the second stage adds (5 - 2.7726) ln 4.
    expected = 2 * np.log(4) + (5 - 2 * np.log(4)) * np.log(4)
    assert SIDCo(density=0.0625).threshold(sizes, 1, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("tail", "first", "feedback"), [("heavy", 1.2, "error"), ("gaussian", -0.5, "none")])
def test_sidco_changes_the_number_of_stages(tail: str, first: float, feedback: str) -> None:
    """One exponential fit passes too many of a heavy tail, too few of a Gaussian; more stages mend both."""
    n, k = 200_000, 400
    cluster = SimulatedCluster(recipe("sidco", density=k / n, feedback=feedback), n, 1)
    assert cluster.buckets[0].state.num_stages == 4, "0.25 ** 4 > 0.002 > 0.25 ** 5"
    cluster.buckets[0].state = replace(cluster.buckets[0].state, num_stages=1)
    generator = np.random.default_rng(1)
    stages, sent, passed = [], [], []
    for _ in range(60):
        heavy = generator.standard_t(3, n).astype(np.float32)
        gaussian = generator.standard_normal(n, np.float32)
        sizes = np.abs(heavy if tail == "heavy" else gaussian)
        cluster.synchronize([heavy if tail == "heavy" else gaussian])
        stages.append(cluster.buckets[0].state.num_stages)
        sent.append(cluster.buckets[0].last.num_selected / k)
        passed.append(np.count_nonzero(sizes >= cluster.buckets[0].last.facts["threshold"]) / k)
    assert stages[:4] == [1, 1, 1, 1], "it is looked at every five steps"
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(stages))
    assert passed[0] > first if first > 0 else passed[0] < -first
    assert sent[0] == passed[0] if passed[0] else sent[0] == 1, "where nothing passes the k largest are sent"
    assert max(stages) > 1
    assert abs(np.mean(sent[-20:]) - 1) < 0.25


def test_hard_threshold_sends_what_reaches_it(caplog: Any) -> None:
    cluster = SimulatedCluster(recipe("hard_threshold", threshold=2.0), 5, 1)
    sum_ = cluster.synchronize([np.array([2.0, -2.5, 1.999, 0.0, 1.0], np.float32)])[0]
    assert (sum_.indices.tolist(), sum_.values.tolist()) == ([0, 1], [2.0, -2.5])
    # 1.999 + 1 passes in the next step
    sum_ = cluster.synchronize([np.ones(5, np.float32)])[0]
    assert sum_.indices.tolist() == [2, 4]
    # No threshold: 1 / (2 sqrt(k)), k = 4 of 16: 0.25; said once.
    info = BucketInfo("guessed once", 16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert HardThreshold(density=0.25).threshold_for(info, HardThresholdState()) == 0.25
    assert caplog.text.count("guessed once") == 1 and "threshold=" in caplog.text
