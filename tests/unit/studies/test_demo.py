"""What the demo says: predicted times, bytes of the interface, and when a score was reached."""

import math

import pytest

pytest.importorskip("matplotlib")

import demo
import torch

SHAPES = [torch.Size([1000, 100]), torch.Size([100])]


def result():
    run = {"passes": 8, "seconds_per_pass": 0.5, "predicted_seconds": 0.4, "bytes_per_pass": 5_000_000}
    dense = {**run, "bits": 4.0, "curve": [[0.0, 8.0], [10.0, 5.0], [20.0, 4.0]]}
    sparse = {**run, "bits": 3.0, "bytes_per_pass": 10_000, "curve": [[0.0, 8.0], [10.0, 3.0]]}
    others = {**run, "bits": 5.0, "curve": [[0.0, 8.0], [20.0, 5.0]]}
    runs = {demo.DENSE: dense, demo.POWER: others, demo.SPARSE: sparse}
    return {"network": "four emulated hosts", "num_elements": 830_000, "runs": runs}


def test_a_pass_is_computing_and_bytes_by_the_rate():
    seconds = {name: demo.predicted(name, SHAPES, 0.1, 1e6) - 0.1 for name in demo.METHODS}
    dense = 8 * 1.5 * 4 * 100_100 / 0.956e6  # a ring of four ranks sends one and a half times what is summed
    assert seconds[demo.DENSE] == pytest.approx(dense, rel=1e-3)
    assert seconds[demo.LOCAL] == pytest.approx(dense / 30, rel=1e-3)
    factors = (4 * 1100 + 100) / 100_100
    assert seconds[demo.POWER] == pytest.approx(factors * dense, rel=1e-2)
    assert seconds[demo.LATE] < seconds[demo.RARE] < seconds[demo.SPARSE] < dense / 50


def test_the_table_says_when_the_dense_score_was_reached():
    told = result()
    assert [demo.seconds_to(run, 4.0) for run in told["runs"].values()] == [20.0, math.inf, 8.0]
    dense, power, sparse = demo.table(told).splitlines()[2:]
    assert dense.endswith("| 20.0 |") and power.endswith("| never |")
    assert sparse.endswith("| 500 | 400 | 500 | 3.00 | 8.0 |")
    assert len(demo.draw(told).axes) == 2
