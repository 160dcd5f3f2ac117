"""Laws of sums that keep nothing, by the simulator, for the allreduces of every framework."""

from collections.abc import Callable
from typing import Any

import numpy as np

from horovod_sparse.feedback import NoFeedback, Recipe
from horovod_sparse.simulation import SimulatedCluster
from support.gradients import as_gradient, dyadic, wide

SHAPE = (31, 40)

#: sums a rank's array with a recipe under a name: in the array's dtype (bfloat16 as its bits)
Sum = Callable[[np.ndarray, Recipe, str], np.ndarray]


def given(rank: int, dtype: str = "float32") -> np.ndarray:
    return as_gradient(dyadic(np.random.default_rng(rank), SHAPE), dtype)


def simulated(recipe: Recipe, size: int, dtype: str, name: str, ranks: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum over some ranks' arrays, and of what they did not send."""
    stateless = Recipe(recipe.sparsifier, NoFeedback())
    cluster = SimulatedCluster(stateless, SHAPE[0] * SHAPE[1], size, dtype, name)
    total = cluster.step([given(rank, dtype).reshape(-1) for rank in ranks])
    return total.reshape(SHAPE), sum(cluster.residuals()).reshape(SHAPE)


def check_sum(case: Any, sum_: Sum, ranks: Any, own: int, dtype: str = "float32") -> None:
    """The sum is the simulator's, bit for bit, and it and what was left out are all that ranks gave."""
    recipe, ranks = case.recipe, list(ranks)
    found = sum_(given(own, dtype), recipe, "law")
    expected, left = simulated(recipe, len(ranks), dtype, "law", ranks)
    np.testing.assert_array_equal(wide(found), wide(as_gradient(expected, dtype)))  # but for the sign of 0
    if not case.loses_mass:
        whole = sum(wide(given(rank, dtype)) for rank in ranks)
        np.testing.assert_allclose(expected + left, whole, atol=1e-5)


def check_compressed(case: Any, sum_: Sum, size: int, own: int) -> None:
    """Horovod's own allreduce sums what each rank alone would send."""
    alone = [simulated(case.recipe, 1, "float32", "compressed.1", [rank])[0] for rank in range(size)]
    np.testing.assert_allclose(sum_(given(own), case.recipe, "law"), sum(alone), rtol=1e-6, atol=1e-6)
