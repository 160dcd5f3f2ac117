"""Whole steps of real sparsifiers: on tensors as on the host, bit for bit, also after an abandoned step."""

from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.errors import NonFiniteGradientError
from horovod_sparse.feedback import Bucket, parse_recipe
from horovod_sparse.kernels import apply_scaled_sum
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import BucketInfo
from horovod_sparse.tensors import device_memory
from horovod_sparse.tensors.accumulator import TorchAccumulator

_RANKS, _ELEMENTS = 3, 800


_QUANTIZERS = ["signsgd", "signsgd:group=96", "signsgd:vote=majority,feedback=none"]
_QUANTIZERS += ["qsgd:group=96", "qsgd:levels=1,norm=l2,group=0,feedback=none"]


@pytest.mark.parametrize(
    "text", ["topk:density=0.02", "micro:density=0.02", "exdyna:density=0.02", *_QUANTIZERS]
)
def test_steps(place: Any, text: str) -> None:
    recipe = parse_recipe(text)
    more: Any = {"density": 0.02, "companions": recipe.feedback.num_companions}
    infos = [BucketInfo("w", _ELEMENTS, rank, _RANKS) for rank in range(_RANKS)]
    host = [Bucket(info, recipe, HostAccumulator(_ELEMENTS, **more)) for info in infos]
    memory = {"device": place.device, "kernels": place.kernels}
    ours = [Bucket(info, recipe, TorchAccumulator(_ELEMENTS, **more, **memory)) for info in infos]
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
            assert bucket.last.residual_norm == pytest.approx(reference.last.residual_norm, rel=1e-4)
        if step == 1:
            assert all(isinstance(error, NonFiniteGradientError) for error in found)
            continue
        for rank, (sum_, reference) in enumerate(zip(found, expected, strict=True)):
            assert sum_.whole == reference.whole
            places = None if sum_.whole else sum_.indices
            if places is not None:
                np.testing.assert_array_equal(places, reference.indices)
            touched = device_memory.apply_scaled_sum(tensors[rank], places, sum_.values, 0.5, place.kernels)
            assert touched == apply_scaled_sum(gradients[rank], places, reference.values, 0.5)
            np.testing.assert_array_equal(tensors[rank].cpu().numpy(), gradients[rank])
