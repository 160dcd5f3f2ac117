"""A tensor's accumulator does what the host's does, bit for bit, whatever it is asked."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from horovod_sparse import kernels
from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.errors import MessageError
from horovod_sparse.tensors.accumulator import TorchAccumulator
from horovod_sparse.tensors.device_memory import apply_sum, clear_at
from support import reference
from support.gradients import DTYPES, as_gradient
from support.sampling import rows_by

# Magnitudes that tie, vanish, or are not numbers; between them anything.
_SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, 1e-42, 3e38, np.inf, -np.inf, np.nan])
COMPANIONS = [{}, {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]
COMPANIONS += [{"moment": 0.99, "rate": 0.1}, {"moment": 0.5, "count": 2}]


def as_tensor(gradient: np.ndarray, dtype: str, device: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(gradient.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(gradient.copy()).to(device)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint64 if array.dtype == np.float64 else np.uint32)


@st.composite
def scenarios(draw: st.DrawFn, max_elements: int) -> dict[str, Any]:
    return {
        "num_elements": draw(st.integers(1, max_elements)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "density": draw(st.sampled_from([0.001, 0.02, 0.6])),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "kind": draw(st.sampled_from(["gaussian", "ties", "sparse", "clustered"])),
        "special_share": draw(st.sampled_from([0.0, 0.02])),
        "companion": draw(st.sampled_from(COMPANIONS)),
        "folds": draw(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "decay": st.sampled_from([1.0, 0.3, 2.0]),
                        "masking": st.booleans(),
                        "keep_residual": st.sampled_from([True, True, False]),
                    }
                ),
                min_size=1,
                max_size=2,
            )
        ),
    }


def gradient_of(scenario: dict[str, Any], generator: np.random.Generator) -> np.ndarray:
    n = scenario["num_elements"]
    values = generator.standard_normal(n)
    if scenario["kind"] == "ties":
        values = generator.integers(-2, 3, n).astype(np.float64)
    elif scenario["kind"] == "sparse":
        values *= generator.random(n) < 0.05
    elif scenario["kind"] == "clustered":
        values *= np.where(np.arange(n) < n // 10, 100.0, 0.01)
    chosen = generator.random(n) < scenario["special_share"]
    values[chosen] = generator.choice(_SPECIAL, int(chosen.sum()))
    with np.errstate(over="ignore"):
        return as_gradient(values, scenario["dtype"])


def check_state(host: Any, ours: Any) -> None:
    assert ours.values().dtype == host.values().dtype
    np.testing.assert_array_equal(bits(ours.values()), bits(host.values()))
    for mine, theirs in zip(ours.companions, host.companions, strict=True):
        np.testing.assert_array_equal(bits(mine.cpu().numpy()), bits(theirs))
    scale = host.report.square_norm
    if np.isfinite(scale):
        assert ours.square_norm == pytest.approx(host.square_norm, rel=1e-5, abs=1e-5 * scale)


def run(scenario: dict[str, Any], place: Any) -> None:
    generator = np.random.default_rng(scenario["seed"])
    n, dtype = scenario["num_elements"], scenario["dtype"]
    shared = {"density": scenario["density"], "companions": 1}
    host = HostAccumulator(n, dtype, **shared)
    ours = TorchAccumulator(n, dtype, device=place.device, kernels=place.kernels, **shared)
    largest = 0.0
    for fold in scenario["folds"]:
        gradient = gradient_of(scenario, generator)
        tensor = as_tensor(gradient, dtype, place.device)
        rule = FoldRule(**{**fold, **scenario["companion"]})
        expected, report = host.fold(gradient, rule), ours.fold(tensor, rule)
        assert torch.count_nonzero(tensor) == 0
        assert report.num_nonfinite == expected.num_nonfinite
        assert report.first_nonfinite == expected.first_nonfinite
        if np.isfinite(expected.square_norm):
            assert report.square_norm == pytest.approx(expected.square_norm, rel=1e-5)
        if np.isfinite(expected.carried_square_norm):
            carried = pytest.approx(expected.carried_square_norm, rel=1e-5, abs=1e-4 * largest)
            assert report.carried_square_norm == carried
        largest = host.square_norm
        check_state(host, ours)
        reference.check_alike(ours, host, generator)

        sent = host.largest(max(1, n // 20))
        before = host.values().copy()
        np.testing.assert_array_equal(bits(ours.take(sent)), bits(host.take(sent)))
        for accumulator in (host, ours):
            accumulator.clear(sent)
            accumulator.add(sent[::2], np.full(sent[::2].size, 0.75))
            accumulator.put(sent[::3], np.full(sent[::3].size, 1.25, np.float32))
            accumulator.mask(np.arange(0, n, 7, dtype=np.int32))
        check_state(host, ours)
        reference.check_alike(ours, host, generator)
        for accumulator in (host, ours):
            accumulator.abandon()
        np.testing.assert_array_equal(bits(ours.values()), bits(before))
        check_state(host, ours)
        assert ours.kth_magnitude(1) == host.kth_magnitude(1)
        for accumulator in (host, ours):
            accumulator.assign(before[::-1].copy())  # as a checkpoint is loaded
            accumulator.clear(sent)
        check_state(host, ours)


#: an example in the interpreter takes a second: it is not made smaller, only shown
EXAMPLES: Any = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
}


def test_like_the_host(place: Any) -> None:
    @settings(max_examples=place.num_examples, **EXAMPLES)
    @given(scenario=scenarios(place.max_elements))
    def check(scenario: dict[str, Any]) -> None:
        run(scenario, place)

    check()


@pytest.mark.parametrize("kind", ["sparse", "clustered"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hard_windows(place: Any, kind: str, dtype: str) -> None:
    """More than k candidates in few blocks; fewer than k that are not 0; a masked last tile."""
    scenario = {
        # Several tiles of the fold.
        "num_elements": 2305 if dtype == "float32" else 1157,
        "dtype": dtype,
        "density": 0.02,
        "seed": 5,
        "kind": kind,
        "special_share": 0.0,
        "companion": {},
        "folds": [{"decay": 1.0}],
    }
    run(scenario, place)


def test_a_small_buffer_is_noticed(place: Any) -> None:
    """Where candidates do not fit, the second, dense attempt is exact."""
    if not hasattr(place.kernels, "find_kth"):
        pytest.skip("only the Triton kernels have a buffer")
    values = torch.linspace(-1.0, 1.0, 2000, device=place.device)
    ours = TorchAccumulator(2000, density=0.02, device=place.device, kernels=place.kernels)
    ours.assign(values)
    layout, maxima = ours._kernels.layout, ours._exact_maxima()
    report, _ = place.kernels.find_kth(values, maxima, layout, 50, 0, 2000, False, capacity=20)
    assert report[1] == 1
    expected = values.abs().sort(descending=True).values[49]
    report, _ = place.kernels.find_kth(values, maxima, layout, 50, 0, 2000, True)
    assert report.tolist() == [int(expected.view(torch.int32)), 0]


@rows_by("dtype,special", DTYPES, [1.0, np.nan, np.inf])
def test_clipping_is_the_hosts(place: Any, dtype: str, special: float) -> None:
    values = np.random.default_rng(9).standard_normal(500)
    values[77] = special
    gradient = as_gradient(values, dtype)
    host = HostAccumulator(500, dtype)
    ours = TorchAccumulator(500, dtype, device=place.device, kernels=place.kernels)
    report = ours.fold(as_tensor(gradient, dtype, place.device), FoldRule(clip_norm=2.0))
    expected = host.fold(gradient, FoldRule(clip_norm=2.0))
    assert report.first_nonfinite == expected.first_nonfinite == (-1 if special == 1.0 else 77)
    np.testing.assert_allclose(ours.values(), host.values(), rtol=1e-2, atol=1e-4)
    assert float(np.linalg.norm(ours.values())) == pytest.approx(2.0, rel=1e-2)


def raw(tensor: torch.Tensor) -> np.ndarray:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.cpu().view(kinds[tensor.element_size()]).numpy()


def check(place: Any, dtype: str, dense: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
    host = as_gradient(dense, dtype)
    ours = as_tensor(host, dtype, place.device)
    expected = kernels.apply_sum(host, indices, values)
    assert apply_sum(ours, indices, values, place.kernels) == expected
    np.testing.assert_array_equal(raw(ours), raw(as_tensor(host, dtype, "cpu")))
    clear_at(ours, indices)
    kernels.clear_at(host, indices)
    np.testing.assert_array_equal(raw(ours), raw(as_tensor(host, dtype, "cpu")))


def test_sums_like_the_host(place: Any) -> None:
    @settings(max_examples=place.num_examples, **EXAMPLES)
    @given(
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**32 - 1),
        num_elements=st.integers(1, 400),
        num_values=st.integers(0, 600),
        ranks=st.integers(1, 9),
    )
    def examples(dtype: str, seed: int, num_elements: int, num_values: int, ranks: int) -> None:
        generator = np.random.default_rng(seed)
        # Messages of several ranks, one behind the other: each ascending, all together with repetitions.
        indices = np.concatenate(
            [
                np.flatnonzero(generator.random(num_elements) < num_values / num_elements / ranks)
                for _ in range(ranks)
            ]
        ).astype(np.int32)
        # of large ones and small ones any other order of additions gives another sum
        drawn = [-1.5, 1.5, 1e-3, 0.0, -0.0, 3.3333333] if seed % 2 else [1e7, -1e7, 1.0, 0.37]
        values = generator.choice(drawn, indices.size)
        dense = generator.choice([0.0, 0.0, -0.0, 1.0, -1.5], num_elements)
        check(place, dtype, dense, indices, values)

    examples()


def test_damaged_messages_write_nothing(place: Any) -> None:
    dense = torch.zeros(4, device=place.device)
    with pytest.raises(MessageError, match="index 4"):
        apply_sum(dense, np.array([1, 4]), np.ones(2), place.kernels)
    with pytest.raises(MessageError, match="2 indices came with 1 values"):
        apply_sum(dense, np.array([1, 2]), np.ones(1), place.kernels)
    with pytest.raises(MessageError, match="index -1"):
        clear_at(dense, np.array([-1]))
    assert torch.count_nonzero(dense) == 0
