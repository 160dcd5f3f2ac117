"""A tensor's accumulator and quantizers do what the host's do, bit for bit, whatever they are asked."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from horovod_sparse import kernels
from horovod_sparse.arrays import FoldRule, HostAccumulator
from horovod_sparse.errors import MessageError
from horovod_sparse.kernels import quantization
from horovod_sparse.kernels.quantization import Quantization
from horovod_sparse.tensors import plain_kernels
from horovod_sparse.tensors.accumulator import TorchAccumulator
from horovod_sparse.tensors.device_memory import apply_scaled_sum
from support.accumulators import as_tensor, histories, play
from support.gradients import DTYPES, as_gradient, layered
from support.sampling import rows_by

#: an example in the interpreter takes a second: it is not made smaller, only shown
EXAMPLES: Any = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],
}


def test_any_history_on_a_device_has_the_hosts_bits(place: Any) -> None:
    @settings(max_examples=place.num_examples, **EXAMPLES)
    @given(history=histories(place.max_elements))
    def check(history: dict[str, Any]) -> None:
        # the interpreter takes subnormal bfloat16 for larger numbers
        assume(place.max_elements > 700 or (history["kind"], history["dtype"]) != ("subnormal", "bfloat16"))
        play(history, place.device, kernels=place.kernels)

    check()


@pytest.mark.parametrize("kind", ["sparse", "cluster"])
@pytest.mark.parametrize(("dtype", "n"), [("float32", 2305), ("float64", 1157)])
def test_windows_of_clusters_have_the_hosts_bits(place: Any, kind: str, dtype: str, n: int) -> None:
    changes = ["look", "clear", "add", "put", "mask", "look", "abandon", "look"]
    changes += ["assign", "clear", "look", "abandon"]
    sizes = {"n": n, "dtype": dtype, "density": 0.02, "companions": 1, "kind": kind, "share": 0.0, "seed": 5}
    play({**sizes, "steps": [(FoldRule(), changes)]}, place.device, kernels=place.kernels)


def test_a_small_buffer_is_noticed(place: Any) -> None:
    if not hasattr(place.kernels, "find_kth"):
        pytest.skip("only the Triton kernels have a buffer")
    values = torch.linspace(-1.0, 1.0, 2000, device=place.device)
    ours = TorchAccumulator(2000, density=0.02, device=place.device, kernels=place.kernels)
    ours.assign(values)
    layout, maxima = ours._kernels.layout, ours._block_maxima(exact=True)
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


def test_sums_like_the_host(place: Any) -> None:
    @settings(max_examples=place.num_examples, **EXAMPLES)
    @given(
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 2**32 - 1),
        num_elements=st.integers(1, 400),
        num_values=st.integers(0, 600),
        ranks=st.integers(1, 9),
        scale=st.sampled_from([1.0, 1 / 3]),
    )
    def examples(dtype: str, seed: int, num_elements: int, num_values: int, ranks: int, scale: float) -> None:
        generator = np.random.default_rng(seed)
        # Messages of several ranks, one behind the other: each ascending, all together with repetitions.
        drawn = generator.random((ranks, num_elements)) < num_values / num_elements / ranks
        indices = np.nonzero(drawn)[1].astype(np.int32)
        # of large ones and small ones any other order of additions gives another sum
        numbers = [-1.5, 1.5, 1e-3, 0.0, -0.0, 3.3333333] if seed % 2 else [1e7, -1e7, 1.0, 0.37]
        values = generator.choice(numbers, indices.size)
        host = as_gradient(np.zeros(num_elements), dtype)
        ours = as_tensor(host, dtype, place.device)
        expected = kernels.apply_scaled_sum(host, indices, values, scale)
        assert apply_scaled_sum(ours, indices, values, scale, place.kernels) == expected
        np.testing.assert_array_equal(raw(ours), raw(as_tensor(host, dtype, "cpu")))

    examples()


def test_damaged_messages_write_nothing(place: Any) -> None:
    dense = torch.zeros(4, device=place.device)
    with pytest.raises(MessageError, match="index 4"):
        apply_scaled_sum(dense, np.array([1, 4]), np.ones(2), 1.0, place.kernels)
    with pytest.raises(MessageError, match="2 indices came with 1 values"):
        apply_scaled_sum(dense, np.array([1, 2]), np.ones(1), 1.0, place.kernels)
    with pytest.raises(MessageError, match="index -1"):
        apply_scaled_sum(dense, np.array([-1]), np.ones(1), 1.0, place.kernels)
    assert torch.count_nonzero(dense) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_elements", [1, 33, 3001, 70_000])
@pytest.mark.parametrize("code", [(0, 0), (0, 64), (1, 96), (7, 512), (127, 0)])
def test_quantizers_of_tensors_have_the_hosts_bits(
    code: tuple[int, int], num_elements: int, dtype: type
) -> None:
    how, key = Quantization(*code), 0x9123456789ABCDEF
    values = layered(np.random.default_rng(num_elements), (num_elements,)).astype(dtype)
    values[::7] = 0.0
    words = np.empty(how.num_words(num_elements, values.dtype), np.int32)
    rest = quantization.encode(values, how, key, words)
    written, left = plain_kernels.encode(torch.from_numpy(values), how, key)
    np.testing.assert_array_equal(written.numpy(), words)
    np.testing.assert_array_equal(left.numpy(), rest)
