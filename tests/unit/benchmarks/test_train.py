"""What `scripts/bench train` measures beside what front ends do."""

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.train.torch_rank import densely
from horovod_sparse.arrays import GradientParts, HostAccumulator
from horovod_sparse.feedback import Bucket, Recipe
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.sparsifiers import DGC, DRAGONN, BucketInfo


@pytest.mark.parametrize("sparsifier", [DGC(density=0.1), DRAGONN(density=0.1)])
def test_decoding_each_message_densely_gives_the_same_sum(sparsifier):
    size, n, generator = 3, 500, np.random.default_rng(0)
    gradients = generator.standard_normal((4, size, n)).astype(np.float32)

    def sums(made):
        buckets = [
            Bucket(BucketInfo("w", n, rank, size), Recipe(made), HostAccumulator(n)) for rank in range(size)
        ]
        for step in gradients:
            coroutines = [
                bucket.step(GradientParts([part.copy()])) for bucket, part in zip(buckets, step, strict=True)
            ]
            yield run_lockstep(coroutines)[0]

    for plain, dense in zip(sums(sparsifier), sums(densely(sparsifier)), strict=True):
        expected = np.zeros(n, np.float32)
        np.add.at(expected, plain.indices, plain.values)
        assert dense.whole and np.count_nonzero(expected)
        assert dense.values.tobytes() == expected.tobytes()
