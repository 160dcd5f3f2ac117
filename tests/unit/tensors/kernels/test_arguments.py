"""What a tensor's accumulator refuses, and what it makes of odd gradients."""

import logging
import sys
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.arrays import FoldRule
from horovod_sparse.errors import ArgumentError, MessageError
from horovod_sparse.tensors import accumulator as torch_backend
from horovod_sparse.tensors import plain_kernels as torch_plain
from horovod_sparse.tensors.accumulator import TorchAccumulator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_elements": 4, "density": 0.0}, "density=0.0"),
        ({"num_elements": 2**31}, r"fewer than 2\*\*31"),
        ({"num_elements": 4, "dtype": "int32"}, "dtype='int32'"),
    ],
)
def test_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TorchAccumulator(device="cpu", **arguments)


@pytest.mark.parametrize(
    ("gradient", "arguments", "message"),
    [
        (torch.zeros(3), {}, "4 elements"),
        (torch.zeros(4, dtype=torch.float64), {}, "accumulates in"),
        (torch.zeros(4, device="meta"), {}, "a tensor on cpu"),
        (torch.zeros(4), {"momentum": 0.9}, "companions=1"),
        (torch.zeros(4), {"moment": 0.9}, "companions=1"),
        (torch.zeros(4), {"moment": 1.0}, "between 0 and 1"),
        (torch.zeros(4), {"moment": 0.9, "momentum": 0.9}, "no momentum"),
        (torch.zeros(4), {"moment": 0.9, "eps": 0.0}, "eps above 0"),
        (torch.zeros(4), {"moment": 0.9, "rate": float("nan")}, "finite rate"),
        (torch.zeros(4), {"decay": float("nan")}, "decay"),
    ],
)
def test_gradients_that_do_not_fit(gradient: torch.Tensor, arguments: dict[str, Any], message: str) -> None:
    accumulator = TorchAccumulator(4, device="cpu", companions="eps" in message or "rate" in message)
    with pytest.raises(ArgumentError, match=message):
        accumulator.fold(gradient, FoldRule(**arguments))


def test_selections_that_do_not_fit() -> None:
    accumulator = TorchAccumulator(4, device="cpu")
    for wrong in (lambda: accumulator.kth_magnitude(0), lambda: accumulator.kth_magnitude(3, 2, 4)):
        with pytest.raises(ArgumentError, match="a rank from 1"):
            wrong()
    with pytest.raises(ArgumentError, match="0 or more"):
        accumulator.largest(-1)
    with pytest.raises(ArgumentError, match="a window within"):
        accumulator.at_least(1.0, 3, 5)
    with pytest.raises(ArgumentError, match="threshold"):
        accumulator.at_least(float("nan"))
    with pytest.raises(MessageError, match="index 4"):
        accumulator.clear(np.array([4], np.int32))
    with pytest.raises(ArgumentError, match="one for each"):
        accumulator.add(np.array([1], np.int32), np.ones(2, np.float32))


def test_strided_gradients_are_folded_and_cleared(place: Any) -> None:
    matrix = torch.arange(12.0, device=place.device).view(3, 4)
    accumulator = TorchAccumulator(12, device=place.device, kernels=place.kernels)
    expected = matrix.t().reshape(-1).cpu().numpy()
    accumulator.fold(matrix.t())
    np.testing.assert_array_equal(accumulator.values(), expected)
    assert torch.count_nonzero(matrix) == 0


def test_values_stay_finite(place: Any) -> None:
    """As on the host: what would not stay finite adds nothing, and NaN and Inf are not loaded."""
    top = float(np.finfo(np.float32).max)
    accumulator = TorchAccumulator(5, device=place.device, kernels=place.kernels)
    accumulator.fold(torch.tensor([1.0, 2.0, top, 4.0, 5.0], device=place.device))
    added = np.array([1, np.nan, top, np.inf, -1], np.float32)
    accumulator.add(np.arange(5, dtype=np.int32), added)
    np.testing.assert_array_equal(accumulator.values(), np.array([2, 2, top, 4, 4], np.float32))
    for wrong in (np.nan, -np.inf, 1e39):
        with pytest.raises(ArgumentError, match="finite numbers"):
            accumulator.assign(np.array([1, wrong, 2, 3, 4]))
    assert accumulator.values()[0] == 2.0
    accumulator.abandon()
    np.testing.assert_array_equal(accumulator.values(), np.array([1, 2, top, 4, 5], np.float32))


def test_cuda_without_triton_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    torch_backend._triton.cache_clear()
    with caplog.at_level(logging.WARNING, logger="horovod_sparse"):
        chosen = [torch_backend.kernels_for(torch.device("cuda", 0)) for _ in range(2)]
    torch_backend._triton.cache_clear()
    assert chosen == [torch_plain, torch_plain]
    assert [record.message for record in caplog.records if "Triton" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
