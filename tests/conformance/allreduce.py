"""What our allreduce, and Horovod's with our compressor, promise in every framework."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import ArgumentError, NonFiniteGradientError, StateMismatchError, UnsupportedError
from horovod_sparse.feedback import NoFeedback, Recipe
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, on_ranks
from support.gradients import as_gradient, dyadic, wide

SHAPE = (31, 40)
TOP, ALL = "topk:density=0.25", "topk:density=1.0"


@dataclass(frozen=True)
class Front:
    """A framework's tensors, and its allreduces: Horovod's module, and ours in its place.

    Attributes:
        tensor: of an array; of bfloat16 from its bits.
        array: the counterpart.
        ways: in which an operation may be carried out, such as within a graph.
    """

    stock: Any
    hvd: Any
    tensor: Callable[[np.ndarray], Any]
    array: Callable[[Any], np.ndarray]
    ways: Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]] = (lambda operation: operation,)

    def sums(self, module: Any, recipe: Recipe, given: np.ndarray, **more: Any) -> list[np.ndarray]:
        """Of all ranks, in every way."""
        found = []
        for way in self.ways:
            more |= {"name": "law", "op": self.stock.Sum, "compression": self.hvd.SparseCompressor(recipe)}
            operation = way(functools.partial(module.allreduce, **more))
            found.append(self.array(operation(self.tensor(given))))
        return found


@pytest.fixture
def front(request: pytest.FixtureRequest) -> Front:
    found: Front = request.module.FRONT
    return found


def given(rank: int, dtype: str = "float32") -> np.ndarray:
    return as_gradient(dyadic(np.random.default_rng(rank), SHAPE), dtype)


def simulated(recipe: Recipe, dtype: str, name: str, ranks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum over some ranks' arrays, and of what they did not send."""
    stateless = Recipe(recipe.sparsifier, NoFeedback())
    cluster = SimulatedCluster(stateless, SHAPE[0] * SHAPE[1], len(ranks), dtype, name)
    total = cluster.step([given(rank, dtype).reshape(-1) for rank in ranks])
    return total.reshape(SHAPE), sum(cluster.residuals()).reshape(SHAPE)


def check_sums(front: Front, case: Any, ranks: Sequence[int], own: int, dtype: str, **more: Any) -> None:
    """Sums are the simulator's, bit for bit, and they and what was left out are all that ranks gave."""
    expected, left = simulated(case.recipe, dtype, "law", ranks)
    for found in front.sums(front.hvd, case.recipe, given(own, dtype), **more):
        np.testing.assert_array_equal(
            wide(found), wide(as_gradient(expected, dtype))
        )  # but for the sign of 0
    if not case.loses_mass:
        np.testing.assert_allclose(
            expected + left, sum(wide(given(rank, dtype)) for rank in ranks), atol=1e-5
        )


@pytest.mark.parametrize("case", on_ranks())
def test_a_sum_is_the_simulators_and_loses_only_what_is_not_sent(front, rank, size, case):
    check_sums(front, case, range(size), rank, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_dtype_is_summed_as_the_simulator_does(front, rank, size, dtype):
    check_sums(front, CASES[0], range(size), rank, dtype)


def test_the_ranks_of_a_process_set_sum_among_themselves(front, rank, size, process_set):
    some = process_set(range(1, size))
    if rank == 0:
        with pytest.raises(ArgumentError, match="process_set"):
            front.hvd.allreduce(front.tensor(given(0)), compression=TOP, process_set=some)
    else:
        check_sums(front, CASES[0], range(1, size), rank, "float32", process_set=some)


@pytest.mark.parametrize("case", on_ranks())
def test_horovods_allreduce_sums_what_each_rank_would_send(front, rank, size, case):
    alone = sum(simulated(case.recipe, "float32", "compressed.1", [one])[0] for one in range(size))
    for found in front.sums(front.stock, case.recipe, given(rank)):
        np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6)


def test_shapes_factors_and_what_is_not_sparsified(front, rank, size):
    hvd, stock = front.hvd, front.stock
    for shape in ((), (2, 3), (0, 3)):
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        factors = {"prescale_factor": 2.0, "postscale_factor": 0.25}
        total = front.array(hvd.allreduce(front.tensor(array), compression=ALL, **factors))
        assert total.shape == shape and (total == 0.5 * array).all()
    whole, pair = front.tensor(np.full(3, 2)), [np.arange(4, dtype=np.float32), np.ones(3, np.float32)]
    for name, compression in (("whole", hvd.Compression.parse(TOP)), ("none", hvd.Compression.none)):
        total = hvd.allreduce(whole, name=name, op=hvd.Sum, compression=compression)
        assert front.array(total).tolist() == [2 * size] * 3
        more = {"name": "both", "op": stock.Sum, "compression": compression}
        totals = stock.grouped_allreduce([front.tensor(one) for one in pair], **more)
        assert front.array(totals[0])[3] == 3 * size and front.array(totals[1])[0] == size


def test_what_goes_wrong_is_named(front, rank, size):
    hvd, array = front.hvd, np.ones(4, np.float32)
    with pytest.raises(ArgumentError, match="op='Min' is not allowed: give Average or Sum"):
        hvd.allreduce(front.tensor(array), compression=TOP, op=hvd.Min)
    with pytest.raises(UnsupportedError, match="op=Adasum cannot"):
        hvd.allreduce(front.tensor(array), compression=TOP, op=hvd.Adasum)
    with pytest.raises(StateMismatchError, match=r"shape differs: .*ranks \[0\] have \[4\]"):
        hvd.allreduce(front.tensor(np.ones(4 + rank, np.float32)), compression=TOP)
    if rank == size - 1:
        array[1] = np.nan
    with pytest.raises(NonFiniteGradientError, match=f"rank {size - 1}: "):
        hvd.allreduce(front.tensor(array), compression=TOP)
    compression = hvd.Compression.parse(TOP)
    found = front.stock.allreduce(front.tensor(array), name="nan", compression=compression)
    assert np.isnan(front.array(found)).tolist() == [0, 1, 0, 0]
