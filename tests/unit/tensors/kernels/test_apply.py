"""Sums scattered into tensors: the bits of the host, whatever repeats and whatever cancels."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from horovod_sparse import kernels
from horovod_sparse.errors import MessageError
from horovod_sparse.tensors.device_memory import _stand_apart, apply_sum, clear_at
from support.gradients import DTYPES, as_gradient


def tensor_of(gradient: np.ndarray, dtype: str, device: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(gradient.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(gradient.copy()).to(device)


def raw(tensor: torch.Tensor) -> np.ndarray:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.cpu().view(kinds[tensor.element_size()]).numpy()


def check(place: Any, dtype: str, dense: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
    host = as_gradient(dense, dtype)
    ours = tensor_of(host, dtype, place.device)
    expected = kernels.apply_sum(host, indices, values)
    assert apply_sum(ours, indices, values, place.kernels) == expected
    np.testing.assert_array_equal(raw(ours), raw(tensor_of(host, dtype, "cpu")))
    clear_at(ours, indices)
    kernels.clear_at(host, indices)
    np.testing.assert_array_equal(raw(ours), raw(tensor_of(host, dtype, "cpu")))


def test_like_the_host(place: Any) -> None:
    @settings(
        max_examples=place.num_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
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


def test_exclusive_windows_stand_apart() -> None:
    # the last but one overlap: not known to be unique
    for indices, apart in (
        ([7, 8, 9, 0, 3, 4], 1),
        ([5], 1),
        ([0, 3, 4, 3, 9], 0),
        ([0, 5, 2, 7], 0),
        ([1, 1], 0),
    ):
        assert _stand_apart(np.array(indices, np.int32)) == apart


def test_damaged_messages_write_nothing(place: Any) -> None:
    dense = torch.zeros(4, device=place.device)
    with pytest.raises(MessageError, match="index 4"):
        apply_sum(dense, np.array([1, 4]), np.ones(2), place.kernels)
    with pytest.raises(MessageError, match="2 indices came with 1 values"):
        apply_sum(dense, np.array([1, 2]), np.ones(1), place.kernels)
    with pytest.raises(MessageError, match="index -1"):
        clear_at(dense, np.array([-1]))
    assert torch.count_nonzero(dense) == 0
