"""Whole steps of real sparsifiers: on tensors as on the host, bit for bit, also after an abandoned step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.feedback import Bucket, parse_recipe
from horovod_sparse.kernels import apply_sum
from horovod_sparse.pytorch import gradients as gradients_of_torch
from horovod_sparse.pytorch.accumulator import TorchAccumulator
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import BucketInfo

_RANKS, _ELEMENTS = 3, 800


@pytest.mark.parametrize("name", ["topk", "micro", "exdyna"])
def test_steps(place: Any, name: str) -> None:
    recipe = parse_recipe(f"{name}:density=0.02")
    infos = [BucketInfo("w", _ELEMENTS, rank, _RANKS) for rank in range(_RANKS)]
    host = [Bucket(info, recipe, HostAccumulator(_ELEMENTS, density=0.02)) for info in infos]
    memory = {"device": place.device, "kernels": place.kernels}
    ours = [Bucket(info, recipe, TorchAccumulator(_ELEMENTS, density=0.02, **memory)) for info in infos]
    generator = np.random.default_rng(11)
    for step in range(3):
        gradients = generator.standard_normal((_RANKS, _ELEMENTS)).astype(np.float32)
        if step == 1:
            gradients[2, 77] = np.nan
        tensors = [torch.from_numpy(gradient.copy()).to(place.device) for gradient in gradients]
        expected = run_lockstep(
            [bucket.step(gradient) for bucket, gradient in zip(host, gradients, strict=True)],
            keep_errors=True,
        )
        found = run_lockstep(
            [bucket.step(tensor) for bucket, tensor in zip(ours, tensors, strict=True)], keep_errors=True
        )
        for bucket, reference in zip(ours, host, strict=True):
            np.testing.assert_array_equal(bucket.accumulator.values(), reference.accumulator.values())
        if step == 1:
            assert all(isinstance(error, NonFiniteGradientError) for error in found)
            continue
        for rank, (sum_, reference) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_array_equal(sum_.indices, reference.indices)
            touched = gradients_of_torch.apply_sum(tensors[rank], sum_.indices, sum_.values, place.kernels)
            assert touched == apply_sum(gradients[rank], reference.indices, reference.values)
            np.testing.assert_array_equal(tensors[rank].cpu().numpy(), gradients[rank])
