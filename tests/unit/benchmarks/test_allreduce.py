"""What `scripts/bench allreduce` replays, and its tables."""

import numpy as np
import pytest

from benchmarks.allreduce.rank import recorded, replayed
from horovod_sparse.arrays import HostAccumulator
from horovod_sparse.collectives import Request
from horovod_sparse.feedback import Bucket, NoFeedback, Recipe, parse_recipe
from horovod_sparse.simulation import Recorder, run_lockstep
from horovod_sparse.sparsifiers import BucketInfo


@pytest.mark.parametrize(
    "text", ["topk", "gtopk", "oktopk", "topk_dsa", "spardl", "spardl:teams=2", "spardl:teams=3"]
)
def test_the_same_messages_once_more(text: str) -> None:
    size, n = 6, 600
    recipe = Recipe(
        parse_recipe(f"{text},density=0.05" if ":" in text else f"{text}:density=0.05").sparsifier
    )
    buckets = [Bucket(BucketInfo("b", n, rank, size), recipe, HostAccumulator(n)) for rank in range(size)]
    requests: list[list[Request]] = [[] for _ in buckets]
    gradients = np.random.default_rng(0).standard_normal((size, n)).astype(np.float32)
    first, second = Recorder(), Recorder()
    run_lockstep(
        [recorded(b.step(g), seen) for b, g, seen in zip(buckets, gradients, requests, strict=True)], first
    )
    run_lockstep([replayed(seen) for seen in requests], second)
    assert second.kinds == first.kinds and second.bytes_sent == first.bytes_sent
    assert sum(map(sum, second.bytes_sent)) > 0


def test_methods_sum_up_the_gradient_of_the_step_alone() -> None:
    """Without a residual every repetition is like the first."""
    memory = HostAccumulator(100)
    bucket = Bucket(
        BucketInfo("b", 100), Recipe(parse_recipe("spardl:density=0.1").sparsifier, NoFeedback()), memory
    )
    gradient = np.arange(100, dtype=np.float32)
    sums = [run_lockstep([bucket.step(gradient.copy())])[0] for _ in range(2)]
    assert sums[0].values.tolist() == sums[1].values.tolist() == list(range(90, 100))
