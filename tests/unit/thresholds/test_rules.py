"""The two threshold rules, number by number."""

import numpy as np
import pytest

from horovod_sparse.thresholds import Sketch, ThresholdScaling, ThresholdState
from support.reference import ReferenceAccumulator


def holding(values: list[float]) -> ReferenceAccumulator:
    accumulator = ReferenceAccumulator(len(values), np.dtype(np.float64))
    accumulator.assign(np.array(values))
    return accumulator


@pytest.mark.parametrize(
    ("count", "factor"),
    [
        # Algorithm 5, beta = 1.1, gamma = 0.005, k = 1000: exam = k' / k
        (5000, 1.005),  # exam > 1.1
        (1101, 1.005),
        (1100, 1.00125),  # 1.1 is not > 1.1, but > 1 / 1.1 = 0.90909...
        (1000, 1.00125),  # inside the band the threshold only ever grows
        (910, 1.00125),
        (909, 0.995),  # 0.909 is not > 0.90909...
        (0, 0.995),
    ],
)
def test_algorithm_5(count: int, factor: float) -> None:
    state = ThresholdScaling().steer(count, 1000, ThresholdState(threshold=2.0))
    assert state.threshold == pytest.approx(2.0 * factor, rel=1e-12)


def test_the_first_threshold_of_the_paper_rule() -> None:
    # 1 / (2 sqrt(25)) = 0.1
    state = ThresholdScaling().find(holding([1.0] * 100), 25, ThresholdState())
    assert state.threshold == pytest.approx(0.1)
    # three steps with far too many selected: 0.1 * 1.005 ** 3
    for _ in range(3):
        state = ThresholdScaling().steer(100, 25, state)
    assert ThresholdScaling().find(holding([1.0] * 100), 25, state).threshold == pytest.approx(0.1 * 1.005**3)


def test_the_sketch_is_the_order_statistic() -> None:
    accumulator = holding([0.5, -4.0, 3.0, -1.0, 2.0, 0.0])
    assert Sketch().find(accumulator, 2, ThresholdState()).threshold == 3.0
    # c = 1.5: order round(2 * 1.5) = 3
    assert Sketch().find(accumulator, 2, ThresholdState(correction=1.5)).threshold == 2.0
    # never below order 1 or above n
    assert Sketch().find(accumulator, 2, ThresholdState(correction=1 / 16)).threshold == 4.0
    assert Sketch().find(accumulator, 5, ThresholdState(correction=16.0)).threshold == 0.0


def test_the_correction_follows_the_count() -> None:
    # twice k: c = 0.5 ** 0.5 = 0.70711; then half of k: c = 0.70711 * 2 ** 0.5 = 1
    state = Sketch().steer(200, 100, ThresholdState())
    assert state.correction == pytest.approx(0.5**0.5)
    state = Sketch().steer(50, 100, state)
    assert state.correction == pytest.approx(1.0)
    # nothing selected says nothing
    state = Sketch().steer(0, 100, state)
    assert state.correction == pytest.approx(1.0)


def test_the_share_of_the_last_union_outweighs_the_hits() -> None:
    # weight of the share: 0.5 * 30 / (30 + 10) = 0.375; 31 ** 0.375 * 101 ** 0.625 - 1 = 63.9
    # (of the 120 hits 100 count, the order asked for)
    half = Sketch(memory=0.5)
    assert half.wanted(120, 100, ThresholdState(threshold=1.0, share=0.3, correction=1.0)) == 64
    # no more hits count than the order asked for: 100 (many magnitudes are equal)
    assert half.wanted(10**6, 100, ThresholdState(threshold=1.0, share=0.3)) == 64
    # a window that gave nothing has only its hits to go by
    assert half.wanted(7, 100, ThresholdState(threshold=1.0, share=0.0)) == 7
