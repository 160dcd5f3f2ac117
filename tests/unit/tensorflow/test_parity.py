"""The same gradients through NumPy, PyTorch and TensorFlow: the same sums and residuals, bit for bit."""

import numpy as np
import pytest

from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.simulation import SimulatedCluster, run_lockstep
from support.cases import CASES, case_id

tf = pytest.importorskip("tensorflow")
torch = pytest.importorskip("torch")

from horovod_sparse.tensorflow.parts import SparseBucket as TensorFlowBucket  # noqa: E402
from horovod_sparse.tensors.flat_gradient import host_view  # noqa: E402
from horovod_sparse.tensors.parts import SparseBucket as TorchBucket  # noqa: E402

pytestmark = pytest.mark.tensorflow

SIZE, SHAPES, NAME = 3, [(11, 13), (), (5, 3, 4), (101,)], "bucket"
NUM_ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)
RATES = [1.0, 1.0, 0.5, 0.5]


def _drawn(step: int) -> list[np.ndarray]:
    generator = np.random.default_rng(step)
    scales = np.exp(generator.standard_normal((SIZE, NUM_ELEMENTS)))
    return list((generator.standard_normal((SIZE, NUM_ELEMENTS)) * scales).astype(np.float32))


def _split(flat: np.ndarray) -> list[np.ndarray]:
    stops = np.cumsum([int(np.prod(shape)) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, stops[:-1]), SHAPES, strict=True)]


def _same(sums, others):
    for sum_, other in zip(sums, others, strict=True):
        assert np.array_equal(sum_.indices, other.indices)
        assert np.array_equal(sum_.values, other.values)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_three_memories_agree(case):
    names = [f"w{i}" for i in range(len(SHAPES))]
    facts = {
        name: (ParameterFacts(name, 1), tf.zeros(shape)) for name, shape in zip(names, SHAPES, strict=True)
    }
    cluster = SimulatedCluster(case.recipe, NUM_ELEMENTS, SIZE, name=NAME)
    tensorflow_ranks = [
        TensorFlowBucket(NAME, names, facts, case.recipe, (rank, SIZE), None, label=NAME)
        for rank in range(SIZE)
    ]
    parameters = [[torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES] for _ in range(SIZE)]
    torch_ranks = [
        TorchBucket(NAME, names, parameters[rank], case.recipe, lambda: None, (rank, SIZE))
        for rank in range(SIZE)
    ]
    for step, rate in enumerate(RATES):
        drawn = _drawn(step)
        expected = cluster.synchronize([array.copy() for array in drawn], rate)

        for rank, bucket in enumerate(torch_ranks):
            for parameter, array in zip(parameters[rank], _split(drawn[rank]), strict=True):
                parameter.grad = torch.tensor(array)
            bucket.gradient.gather()
        arrays = [host_view(bucket.gradient.flat) for bucket in torch_ranks]
        _same(
            run_lockstep([b.bucket.step(a, rate) for b, a in zip(torch_ranks, arrays, strict=True)]), expected
        )

        seen = []

        def all_ranks(*flat: np.ndarray, rate: float = rate, seen: list = seen) -> np.ndarray:
            given = [flat[i : i + len(SHAPES)] for i in range(0, len(flat), len(SHAPES))]
            steps = [bucket.begin(rate, own) for bucket, own in zip(tensorflow_ranks, given, strict=True)]
            seen.extend(run_lockstep(steps))
            return np.int32(0)

        tensors = [tf.constant(array) for flat in drawn for array in _split(flat)]
        tf.numpy_function(all_ranks, tensors, tf.int32)
        _same(seen, expected)
        assert all(
            np.array_equal(tensor.numpy().reshape(-1), array.reshape(-1))
            for tensor, array in zip(tensors, [a for flat in drawn for a in _split(flat)], strict=True)
        ), "TensorFlow's gradients were changed"

        for rank, residual in enumerate(cluster.residuals()):
            for bucket in (torch_ranks[rank], tensorflow_ranks[rank]):
                assert np.array_equal(bucket.bucket.accumulator.values(), residual)
