"""DRAGONN's hashing against the statistics of its paper's appendix, over many seeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from horovod_sparse.sparsifiers.dragonn import HashFunction, survivors

_SEEDS = 400
_N = 1024


def consecutive(generator: np.random.Generator) -> np.ndarray:
    return int(generator.integers(10**6)) + np.arange(_N)


def clustered(generator: np.random.Generator) -> np.ndarray:
    """Runs of neighbours, as layers with large gradients give them."""
    starts = np.sort(generator.choice(10**6, _N // 16, replace=False)) * 64
    return (starts[:, None] + np.arange(16)).reshape(-1)


def strided(generator: np.random.Generator) -> np.ndarray:
    return np.arange(_N) * 2 ** int(generator.integers(1, 20))


def scattered(generator: np.random.Generator) -> np.ndarray:
    return np.sort(generator.choice(2**31 - 1, _N))


KINDS = pytest.mark.parametrize("draw", [consecutive, clustered, strided, scattered])


def empty_shares(draw: Callable[..., np.ndarray], num_slots: int) -> np.ndarray:
    """Share of empty slots for each seed."""
    shares = []
    for seed in range(_SEEDS):
        generator = np.random.default_rng([seed, num_slots])
        indices = draw(generator).astype(np.int32)
        slots = HashFunction.draw(generator, num_slots).slots(indices)
        assert ((slots >= 0) & (slots < num_slots)).all()
        shares.append(1 - np.unique(slots).size / num_slots)
    return np.array(shares)


@KINDS
@pytest.mark.parametrize(("num_slots", "low", "high"), [(1024, 0.36, 0.38), (512, 0.13, 0.14)])
def test_memory_coverage(draw: Callable[..., np.ndarray], num_slots: int, low: float, high: float) -> None:
    """Appendix A.2.2: the share is (1 - 1 / m) ** n, 0.3677 and 0.1350; and it varies as chance has it."""
    shares = empty_shares(draw, num_slots)
    expected = (1 - 1 / num_slots) ** _N
    assert low < shares.mean() < high
    # the variance of empty bins: m p2 + m p - m^2 p^2 over m^2, p2 the chance that two given ones are empty
    both = (1 - 2 / num_slots) ** _N
    deviation = np.sqrt(expected / num_slots + (1 - 1 / num_slots) * both - expected**2)
    assert abs(shares.mean() - expected) < 4 * deviation / np.sqrt(_SEEDS)
    assert 0.8 < shares.std() / deviation < 1.25, "neither more even than chance, nor less"


@KINDS
def test_survival(draw: Callable[..., np.ndarray]) -> None:
    """Lemma A.5: hit i of n is not overwritten with a probability of ((m - 1) / m) ** (n - i)."""
    m = 512
    survived = np.zeros(_N)
    for seed in range(_SEEDS):
        generator = np.random.default_rng([seed, 7])
        indices = np.unique(draw(generator).astype(np.int32))[:_N]
        left = survivors(indices, HashFunction.draw(generator, m).slots(indices), m)
        survived[: indices.size] += np.isin(indices, left)
    expected = ((m - 1) / m) ** (_N - np.arange(1, _N + 1))
    # groups of 64 neighbours: few enough to see the slope, enough to average over
    found = (survived / _SEEDS).reshape(16, 64).mean(1)
    np.testing.assert_allclose(found, expected.reshape(16, 64).mean(1), atol=0.012)


def test_two_indices_collide_as_seldom_as_promised() -> None:
    """Definition A.4: Pr[h(x) = h(y)] <= 1 / m, for neighbours and for any distance."""
    m, trials = 64, 8000
    generator = np.random.default_rng(3)
    for distance in (1, 2, 64, 4096, 12_345_678):
        pair = np.array([77, 77 + distance], np.int32)
        hits = sum(int(np.ptp(HashFunction.draw(generator, m).slots(pair)) == 0) for _ in range(trials))
        deviation = np.sqrt(trials / m)
        assert hits < trials / m + 4 * deviation
        assert hits > trials / m - 4 * deviation


def test_a_linear_function_would_be_too_even() -> None:
    """Why there is a mix: ((a i + b) mod p) mod m of indices in a row is no chance at all."""
    prime, m = 2**31 - 1, 1024
    shares = []
    for seed in range(_SEEDS):
        generator = np.random.default_rng(seed)
        a, b = generator.integers(1, prime), generator.integers(prime)
        slots = (np.arange(_N) * a + b) % prime % m
        shares.append(1 - np.unique(slots).size / m)
    assert np.std(shares) > 5 * empty_shares(consecutive, m).std()


def test_the_last_write_stays() -> None:
    indices = np.array([2, 4, 6, 8, 10], np.int32)
    # slot 0: 2, then 6, then 10; slot 1: 4, then 8
    assert survivors(indices, np.array([0, 1, 0, 1, 0]), 2).tolist() == [8, 10]
    assert survivors(indices, np.arange(5), 5).tolist() == indices.tolist()
    assert survivors(indices[:0], np.empty(0, np.int64), 3).size == 0


@pytest.mark.parametrize("num_slots", [1, 2, 1000, 2**31 - 1])
def test_any_number_of_slots(num_slots: int) -> None:
    slots = HashFunction.draw(np.random.default_rng(0), num_slots).slots(np.array([0, 2**31 - 1], np.int32))
    assert ((slots >= 0) & (slots < num_slots)).all()
