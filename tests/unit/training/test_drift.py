"""Whether ranks are still equal: what is seen, at which price, and what is done about it."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from horovod_sparse.errors import DriftError
from horovod_sparse.simulation import Recorder, run_lockstep
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.tensors.layout import TensorEntry, device_sums, shared_entries
from horovod_sparse.training.drift import COLUMNS, DriftCheck, HostEntry, differing_entries, word_sums
from horovod_sparse.training.settings import Settings

RANKS = 3


def arrays(rank: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {
        "weight": generator.standard_normal((70, 90)).astype(np.float32),
        "half": generator.standard_normal(1000).astype(np.float16),
        "step": np.array(7, np.int64),
        "odd": np.arange(13, dtype=np.uint8),
    }


def entries_of(held: dict[str, np.ndarray]) -> list[HostEntry]:
    return [HostEntry(name, array, partial(np.copyto, array)) for name, array in held.items()]


def checked(everyone: list[dict[str, np.ndarray]], policy: str) -> tuple[list[Any], list[DriftCheck]]:
    checks = [DriftCheck(Settings(check_every=10, on_drift=policy), Telemetry()) for _ in everyone]
    runs = [
        check.run(20, rank, entries_of(held))
        for rank, (check, held) in enumerate(zip(checks, everyone, strict=True))
    ]
    return run_lockstep(runs, keep_errors=True), checks


def test_equal_ranks_send_one_message_of_eight_bytes() -> None:
    recorder = Recorder()
    run_lockstep([differing_entries(entries_of(arrays(r))) for r in range(RANKS)], recorder)
    assert recorder.bytes_sent == [[8] * RANKS]


@pytest.mark.parametrize("name", ["weight", "half", "step", "odd"])
def test_every_single_bit_counts(name: str) -> None:
    generator = np.random.default_rng(4)
    for _ in range(20):
        everyone = [arrays(rank) for rank in range(RANKS)]
        raw = everyone[1][name].reshape(-1).view(np.uint8)
        raw[generator.integers(raw.size)] ^= np.uint8(1 << generator.integers(8))
        found, _ = checked(everyone, "raise")
        for error in found:
            assert isinstance(error, DriftError)
            assert str(error).startswith(f"after step 20 {name} differs: ranks [0, 2] have ")
            assert ", ranks [1] " in str(error)


def test_rank_0_is_what_all_ranks_become() -> None:
    everyone = [arrays(rank) for rank in range(RANKS)]
    everyone[0]["half"][5] = 3.0
    everyone[2]["odd"][12] = 99
    everyone[1]["step"][...] = 8
    found, checks = checked(everyone, "resync")
    assert found == [None] * RANKS
    for held in everyone:
        assert all(held[name].tobytes() == everyone[0][name].tobytes() for name in held)
    assert everyone[2]["half"][5] == 3.0
    assert [check._telemetry.num_drifts for check in checks] == [1] * RANKS


def test_what_some_ranks_have_not_is_not_made_up() -> None:
    everyone = [arrays(rank) for rank in range(RANKS)]
    del everyone[2]["half"]
    found, _ = checked(everyone, "resync")
    assert all(isinstance(error, DriftError) and "half" in str(error) for error in found)
    assert "ranks [2] nothing" in str(found[0])
    everyone[2]["half"] = np.zeros(999, np.float16)
    found, _ = checked(everyone, "resync")
    assert all("not the same type and shape" in str(error) for error in found)


def test_ranks_that_join_later_compare_after_the_same_steps() -> None:
    survivor, newcomer = (DriftCheck(Settings(check_every=10), Telemetry()) for _ in range(2))
    survivor.postpone(10)  # compared
    for check in (survivor, newcomer):
        check.restart(17)  # Horovod has started again
        assert check.next_step == 18  # after the first step of these ranks
        check.postpone(18)
        assert check.next_step == 20
    assert DriftCheck(Settings(check_every=0), Telemetry()).next_step == float("inf")


@pytest.mark.parametrize("size", [0, 1, 7, 8 * COLUMNS, 8 * COLUMNS + 3, 50_001])
def test_a_device_finds_the_same_sums(size: int) -> None:
    values = torch.from_numpy(np.random.default_rng(2).integers(0, 256, size + 1).astype(np.uint8))
    for start in (0, 1):
        piece = values[start : start + size]
        assert (device_sums(piece) == word_sums(piece.numpy())).all()


def test_all_of_an_optimizers_state_is_looked_at() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    for optimizer, wanted in (
        (torch.optim.Adam([weight]), {"exp_avg of w", "exp_avg_sq of w", "step of w", "betas of group 0"}),
        (torch.optim.LBFGS([weight]), {"old_dirs of w[0]", "func_evals of w", "lr of group 0"}),
    ):
        for _ in range(2):

            def closure(optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (weight**4).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        assert wanted <= {entry.name for entry in shared_entries({"w": weight}, optimizer)}


def test_the_order_of_memory_does_not_matter() -> None:
    plain = torch.arange(2 * 3 * 4 * 5, dtype=torch.bfloat16).view(2, 3, 4, 5)
    other = plain.to(memory_format=torch.channels_last)
    one, two = TensorEntry("w", plain), TensorEntry("w", other)
    assert one.kind == two.kind == "bfloat16[2, 3, 4, 5]"
    assert (one.sums() == two.sums()).all()
    two.write(TensorEntry("w", plain + 1).read())
    assert torch.equal(other, plain + 1)
