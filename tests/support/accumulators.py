"""Histories of calls that two accumulators have to come through alike, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.tensors.accumulator import TorchAccumulator
from support.drawing import KINDS, SEEDS, SIZES, make, spoil
from support.gradients import DTYPES, as_gradient
from support.reference import check_moments

History = dict[str, Any]
#: rules that may follow one another: what they keep beside the values is the same
RULES = (
    [*map(FoldRule, (1.0, 0.9, 0.0, 10.0, -0.5)), FoldRule(0.3, keep_residual=False)],
    [
        FoldRule(decay, momentum, nesterov, masking=momentum != 1.0)
        for decay in (1.0, 0.9, 0.0)
        for momentum in (0.9, 0.0, 1.0)
        for nesterov in (True, False)
    ],
    [
        FoldRule(0.9, moment=0.99, rate=0.1),
        FoldRule(moment=0.5, rate=0.0, count=3),
        FoldRule(moment=0.5, count=2),
    ],
)
CHANGES = ("clear", "add", "put", "mask", "look", "look", "abandon", "take", "assign")


@st.composite
def histories(draw: st.DrawFn, max_elements: int = 10_000) -> History:
    """Of any type, size, kind of numbers and rule, some of them not finite."""
    rules = draw(st.sampled_from(RULES))
    step = st.tuples(st.sampled_from(rules), st.lists(st.sampled_from(CHANGES), max_size=6))
    return {
        "n": draw(SIZES.map(lambda n: min(n, max_elements))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "density": draw(st.sampled_from([0.001, 0.02, 0.2, 0.6])),
        "companions": draw(st.integers(int(rules is not RULES[0]), 2)),
        "kind": draw(st.sampled_from(KINDS)),
        "share": draw(st.sampled_from([0.0, 0.0, 0.001, 0.3])),
        "seed": draw(SEEDS),
        "steps": draw(st.lists(step, min_size=1, max_size=3)),
    }


def as_array(values: Any) -> np.ndarray:
    return values.cpu().numpy() if hasattr(values, "cpu") else values


def as_tensor(gradient: np.ndarray, dtype: str, device: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(gradient.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(gradient.copy()).to(device)


def play(history: History, device: str = "cpu", **more: Any) -> None:
    """A tensor's accumulator does what the host's does."""
    sizes = {name: history[name] for name in ("density", "companions")}
    shape = history["n"], "float64" if history["dtype"] == "float64" else "float32"
    ours, theirs = TorchAccumulator(*shape, device=device, **sizes, **more), HostAccumulator(*shape, **sizes)
    n, generator = history["n"], np.random.default_rng(history["seed"])

    def check_state() -> None:
        for mine, other in zip(
            (ours.values(), *ours.companions), (theirs.values(), *theirs.companions), strict=True
        ):
            np.testing.assert_array_equal(as_array(mine), other)
            np.testing.assert_array_equal(np.signbit(as_array(mine)), np.signbit(other))
        scale = theirs.report.square_norm
        if np.isfinite(scale):
            assert ours.square_norm == pytest.approx(theirs.square_norm, rel=1e-5, abs=1e-5 * (1 + scale))

    largest = 0.0
    for number, (rule, changes) in enumerate(history["steps"]):
        with np.errstate(all="ignore"):
            values = spoil(
                make(history["kind"], n, history["seed"] + number, np.float64), generator, history["share"]
            )
            gradient = as_gradient(values, history["dtype"])
        own = as_tensor(gradient, history["dtype"], device)
        found, expected = ours.fold(own, rule), theirs.fold(gradient, rule)
        assert not (own != 0).any(), "it is cleared"
        assert (found.num_nonfinite, found.first_nonfinite) == (
            expected.num_nonfinite,
            expected.first_nonfinite,
        )
        for name, least in (("square_norm", 0.0), ("carried_square_norm", 1e-4 * largest)):
            norms = [getattr(report, name) for report in (found, expected)]
            if np.isfinite(norms[1]):
                assert norms[0] == pytest.approx(norms[1], rel=1e-5, abs=least)
        largest = theirs.square_norm
        check_state()
        for change in [*changes, "look"]:
            if change == "look":
                check_alike(ours, theirs, generator)
                continue
            share = generator.choice([0.001, 0.1, 0.9])
            arguments: list[Any] = [np.flatnonzero(generator.random(n) < share).astype(np.int32)]
            if change in ("add", "put"):
                arguments.append((generator.standard_normal(arguments[0].size) * 3).astype(theirs.dtype))
            if change in ("abandon", "assign"):
                arguments = [theirs.values()[::-1].copy()] * (change == "assign")
            answers = [getattr(one, change)(*arguments) for one in (ours, theirs)]
            if change == "take":
                np.testing.assert_array_equal(*answers)
            check_state()


def check_alike(ours: Any, theirs: Any, generator: np.random.Generator) -> None:
    """Two accumulators of the same values give the same answers."""
    n = theirs.num_elements
    for low, high in ((0, n), sorted(generator.integers(0, n + 1, 2).tolist())):
        # first what is content with upper bounds of the maxima: the others make them exact
        threshold = theirs.kth_magnitude(int(generator.integers(1, min(n, 30) + 1))) if n else 1.0
        found = ours.at_least(threshold, low, high)
        np.testing.assert_array_equal(found, theirs.at_least(threshold, low, high))
        # few enough that the maxima of the blocks bound the k-th; and more
        length = high - low
        k = int(generator.integers(0, generator.choice([length // 64, min(length, 700), length]) + 1))
        largest = ours.largest(k, low, high)
        np.testing.assert_array_equal(largest, theirs.largest(k, low, high))
        assert found.dtype == largest.dtype == np.int32
        assert not k or ours.kth_magnitude(k, low, high) == theirs.kth_magnitude(k, low, high)
        chunk = int(generator.choice([1, 5, 64, 100, 4096]))
        lengths = np.minimum(chunk, n - np.arange(0, n, chunk))
        quotas = np.rint(generator.choice([0.0, 0.003, 0.02, 0.4, 1.0], lengths.size) * lengths).astype(
            np.int64
        )
        if n:
            of_each = ours.largest_of_each(chunk, quotas)
            np.testing.assert_array_equal(of_each, theirs.largest_of_each(chunk, quotas))
    thresholds = [0.0, threshold, float(np.exp(generator.normal()))]
    counts = ours.count_at_least(thresholds)
    assert counts.dtype == np.int64
    np.testing.assert_array_equal(counts, theirs.count_at_least(thresholds))
    for least in thresholds:
        check_moments(ours.moments(least), theirs.values(), least)
    stride, offset = int(generator.integers(1, 9)), int(generator.integers(0, 9))
    np.testing.assert_array_equal(
        ours.sample_magnitudes(stride, offset), theirs.sample_magnitudes(stride, offset)
    )
