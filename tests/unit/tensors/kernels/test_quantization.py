"""Quantizers in PyTorch write and leave the same bits as in NumPy."""

import numpy as np
import pytest
import torch

from horovod_sparse.kernels import quantization
from horovod_sparse.kernels.quantization import Quantization
from horovod_sparse.tensors import plain_kernels
from support.gradients import layered


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_elements", [1, 33, 3001, 70_000])
@pytest.mark.parametrize(
    "code", [(0, 0, "mean"), (0, 64, "mean"), (1, 96, "max"), (7, 512, "max"), (127, 0, "l2")]
)
def test_torch_is_numpy(code: tuple[int, int, str], num_elements: int, dtype: type) -> None:
    how, key = Quantization(*code), 0x9123456789ABCDEF
    values = layered(np.random.default_rng(num_elements), (num_elements,)).astype(dtype)
    values[::7] = 0.0
    words = np.empty(how.num_words(num_elements, values.dtype), np.int32)
    rest = quantization.encode(values, how, key, words)
    written, left = plain_kernels.encode(torch.from_numpy(values), how, key)
    np.testing.assert_array_equal(written.numpy(), words)
    np.testing.assert_array_equal(left.numpy(), rest)
