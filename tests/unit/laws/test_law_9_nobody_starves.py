"""Law 9: with k >= 1 every element whose residual keeps growing is sent in finitely many steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.feedback import parse_recipe
from horovod_sparse.simulation import SimulatedCluster
from horovod_sparse.sparsifiers.spardl.teams import TeamLayout
from support import laws
from support.cases import CASES, Case, case_id
from support.sampling import rows_by

_KEEP = [case for case in CASES if not case.loses_mass]
_PATTERNS = ("equal", "all", "some", "one", "one among others")


def starve(case: Case, size: int, num_elements: int, k: int, pattern: str, seed: int = 0) -> int:
    """Runs until everything that grows was sent twice; steps that it took."""
    random, shape = np.random.default_rng(seed), (size, num_elements)
    growth, swing = random.integers(1, 5, shape), np.zeros(shape)
    if pattern == "equal":
        growth[:] = 1
    elif pattern == "some":  # a fifth
        growth[random.random(shape) > 0.2] = 0
    elif pattern == "cancelling":  # a third grows fast on all ranks and adds up to 0
        fast = random.random(num_elements) < 1 / 3
        growth[:, fast] *= 8
        growth[-1, fast] = -growth[:-1, fast].sum(0)
    elif pattern != "all":  # one element, or a tenth slowly while all else swings widely
        some = random.random(shape) < (0.1 if pattern == "one among others" else 0.0)
        some[random.integers(size), random.integers(num_elements)] = True
        growth = some.astype(int)
        if pattern == "one among others":
            swing = np.where(some, 0.0, random.integers(0, 9, shape))
    growth = (growth * random.choice([-1, 1], num_elements)).astype(np.float32)
    cluster = SimulatedCluster(case.at(k / num_elements), num_elements, size)
    # P: what only one rank holds may have to wait for its turn
    most_steps = 200 + 60 * size * num_elements // k
    return laws.nobody_starves(cluster, growth, swing.astype(np.float32), most_steps)


#: P, n, k and pattern at which some did
_FOUND = [
    *((8, 10, 1, "all"), (1, 47, 1, "equal"), (3, 24, 2, "one among others")),
    *((16, 12, 5, "some"), (3, 12, 2, "cancelling")),
]


@rows_by("case,shape", _KEEP, _FOUND, ids=case_id)
def test_shapes_at_which_some_did(case: Case, shape: tuple[int, int, int, str]) -> None:
    starve(case, *shape)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """P, n, k; k around 1 or around P."""
    size, num_elements = draw(st.integers(1, 16)), draw(st.integers(1, 64))
    k = draw(st.sampled_from((1, 2, 3, size // 2, size - 1, size, size + 1)))
    return size, num_elements, min(max(k, 1), num_elements)


@pytest.mark.nightly
@pytest.mark.parametrize("case", _KEEP, ids=case_id)
@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(shape=shapes(), pattern=st.sampled_from(_PATTERNS), seed=st.integers(0, 99))
def test_nobody_starves_at_any_shape(
    case: Case, shape: tuple[int, int, int], pattern: str, seed: int
) -> None:
    starve(case, *shape, pattern, seed)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.loses_mass and not case.quantizes], ids=case_id
)
def test_without_feedback_somebody_does(case: Case) -> None:
    """Nothing is carried on, so nothing grows: the declared exception."""
    with pytest.raises(AssertionError, match="not sent twice"):
        starve(case, 2, 6, 1, "all")


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 64), st.integers(1, 16), st.data())
def test_blocks_of_spardl_take_turns_fairly(num_elements: int, team_size: int, data: st.DataObject) -> None:
    """In any n steps a block of m elements may keep m k of them in all, whatever divides what."""
    k = data.draw(st.one_of(st.integers(1, min(3, num_elements)), st.integers(1, num_elements)))
    first = data.draw(st.integers(0, 1000))
    kept = np.zeros(team_size, int)
    for step in range(first, first + num_elements):
        layout = TeamLayout(team_size, 1, num_elements, k, step)
        quotas = [layout.quota(block) for block in range(team_size)]
        assert sum(quotas) == k
        kept += quotas
    lengths = [stop - start for start, stop in map(layout.window, range(team_size))]
    assert (kept == np.array(lengths) * k).all()
    assert all(quota <= length for quota, length in zip(quotas, lengths, strict=True))


@pytest.mark.parametrize(
    ("text", "growth", "most_steps"),
    [
        # bounds that moved in step with the turns kept element 1 out of rank 0's part
        ("exdyna:density=0.3,rebalance=paper", [[0, 4, 0], [0, 0, 4], [4, 0, 0], [1, 0, 0]], 400),
        # one slot for two hits: the higher index won every time
        ("dragonn:density=0.25,slots_per_selected=0.5", [[4, 1, 1, 1, 1, 1, 1, 4]], 400),
    ],
)
def test_turns_that_never_came(text: str, growth: list[list[int]], most_steps: int) -> None:
    grows = np.array(growth, np.float32)
    cluster = SimulatedCluster(parse_recipe(text), grows.shape[1], grows.shape[0])
    laws.nobody_starves(cluster, grows, np.zeros_like(grows), most_steps)
