"""Checkpoints on disk: complete or not there, whatever happens while they are written."""

import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from horovod_sparse.errors import CheckpointError, HorovodSparseError, StateMismatchError
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.training import checkpoint, encoding

SIZE = 2


def an_entry(rank: int, size: int = SIZE, step: int = 0) -> dict[str, Any]:
    residual = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank + step
    return {
        "format": 3,
        "algorithm": "topk",
        "recipe": "topk:density=0.01",
        "plan": {"buckets": [], "dense": ["w"]},
        "rank": rank,
        "size": size,
        "step": step,
        "feedback": "error",
        "residuals": {"w": residual},
        "companions": [],
        "buckets": [],
    }


def ranks_of(roots: Path | list[Path], size: int) -> Any:
    return enumerate(roots if isinstance(roots, list) else [roots] * size)


def save(roots: Path | list[Path], step: int = 0, size: int = SIZE, keep: int = 2, **other: Any) -> list[Any]:
    given: Any = {"step": step, "digest": "d", "keep": keep}
    write, pairs = checkpoint.write_checkpoint, ranks_of(roots, size)
    ranks = [write(root, an_entry(rank, size, step), rank=rank, **given) for rank, root in pairs]
    return run_lockstep(ranks, **other)


def load(roots: Path | list[Path], size: int = SIZE, step: int | None = None, **other: Any) -> list[Any]:
    read, pairs = checkpoint.read_checkpoint, ranks_of(roots, size)
    return run_lockstep([read(root, rank=rank, size=size, step=step) for rank, root in pairs], **other)


def refused(ends: Any, words: str, kind: type = CheckpointError) -> None:
    assert all(isinstance(end, kind) and words in str(end) for end in ends), ends


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def assert_is(entry: dict[str, Any], rank: int, step: int) -> None:
    assert entry["rank"] == rank and entry["step"] == step
    np.testing.assert_array_equal(entry["residuals"]["w"], an_entry(rank, step=step)["residuals"]["w"])


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st_numpy.arrays(
        st.sampled_from([np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_]),
        st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(-3, 3), inner)
    ),
    max_leaves=10,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.text(), plain))
def test_an_entry_comes_back_bit_for_bit(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = tmp_path / "one.npz"
    checkpoint._write_file(path, entry)
    with open(path, "rb") as file:
        assert same(encoding.read_tree(file), entry)


def test_the_newest_complete_one_is_loaded_and_the_last_few_stay(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert folders(tmp_path) == ["step-0000000010.1", "step-0000000015.1"]
    for rank, entry in enumerate(load(tmp_path)):
        assert_is(entry, rank, 15)
    for rank, entry in enumerate(load(tmp_path, step=10)):
        assert_is(entry, rank, 10)


def test_a_save_after_going_back_is_the_newest(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    assert_is(load(tmp_path, step=5)[0], 0, 5)
    save(tmp_path, 7)
    assert folders(tmp_path) == ["step-0000000007.2", "step-0000000010.1"]
    assert_is(load(tmp_path)[0], 0, 7)
    save(tmp_path, 9)
    save(tmp_path, 11)
    assert folders(tmp_path) == ["step-0000000009.2", "step-0000000011.2"]
    assert_is(load(tmp_path)[1], 1, 11)
    save(tmp_path, 10, keep=1)
    assert folders(tmp_path) == ["step-0000000010.3"]


class Training:
    def __init__(self, value: float = 0.0, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.value, self.ranks = value, ranks

    def save(self, roots: Any, step: int) -> list[Any]:
        def rank(number: int, root: Any, world_rank: int) -> Any:
            entry = an_entry(number, step=step) | {"residuals": {"w": np.full(3, self.value)}}
            who: Any = {"rank": number, "world_rank": world_rank, "owner": self}
            return checkpoint.save_together(root, lambda: entry, keep=2, **who)

        ranks = [rank(*one, world) for one, world in zip(ranks_of(roots, SIZE), self.ranks, strict=True)]
        return run_lockstep(ranks, keep_errors=True)

    def load(self, root: Any) -> list[Any]:
        ranks = [
            checkpoint.load_together(root, lambda _: None, rank=rank, size=SIZE, step=None, owner=self)
            for rank in range(SIZE)
        ]
        return run_lockstep(ranks, keep_errors=True)


def test_two_optimizers_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = Training(1.0), Training(2.0)
    assert first.save(tmp_path, 1) == [1, 1]
    refused(second.save(tmp_path, 1), "a directory of its own")
    assert first.save(tmp_path, 2) == [2, 2]
    assert second.load(tmp_path)[0]["residuals"]["w"][0] == 1.0
    assert second.save(tmp_path, 3) == [3, 3]  # it goes on with it
    del second
    assert Training(3.0).save(tmp_path, 4) == [4, 4]  # nobody else has it any more


def test_two_process_sets_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Training(1.0), Training(2.0, ranks=(2, 3))
    assert first.save(tmp_path, 1) == [1, 1]
    monkeypatch.setattr(checkpoint, "_owners", {})
    refused(second.save(tmp_path, 2), "other ranks than [2, 3]")
    assert second.load(tmp_path)[0]["residuals"]["w"][0] == 1.0
    assert second.save(tmp_path, 2) == [2, 2]
    monkeypatch.setattr(checkpoint, "_owners", {})
    assert Training(ranks=(1, 2)).save(tmp_path, 3) == [3, 3]  # at another size, say


def test_no_rank_is_left_alone_by_what_another_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save(tmp_path / "good", 1)
    for wrong in (tmp_path / "file", None, "a\0b"):
        for ends in (
            load([tmp_path / "good", wrong], keep_errors=True),  # type: ignore[list-item]
            save([tmp_path / "good", wrong], 2, keep_errors=True),  # type: ignore[list-item]
            Training().save([tmp_path / "good", wrong], 2),
        ):
            refused(ends, "", HorovodSparseError)
            assert "on rank 1" in str(ends[0])

    def entry() -> dict[str, Any]:
        raise MemoryError("no room")

    ranks = [
        checkpoint.save_together(tmp_path / "good", how, rank=rank, keep=1, owner=Training, world_rank=rank)
        for rank, how in enumerate((lambda: an_entry(0), entry))
    ]
    ends = run_lockstep(ranks, keep_errors=True)
    assert "no room" in str(ends[0]) and isinstance(ends[1], MemoryError)
    assert folders(tmp_path / "good") == ["step-0000000001.1"]


def test_hosts_may_have_disks_of_their_own(tmp_path: Path) -> None:
    roots = [tmp_path / "here", tmp_path / "here", tmp_path / "there"]
    save(roots, 1, size=3)
    assert folders(roots[0]) == folders(roots[2]) == ["step-0000000001.1"]
    for rank, entry in enumerate(load(roots, size=3)):
        assert_is(entry, rank, 1)
    # at another size a rank needs what the other disk has
    ends = load(roots[1:], size=2, keep_errors=True)
    refused(ends, "")
    assert "does not see it" in str(ends[0])


def test_ranks_at_different_steps_do_not_save_and_all_load_the_same(tmp_path: Path) -> None:
    ranks = [
        checkpoint.write_checkpoint(tmp_path, an_entry(rank), step=rank, digest="d", rank=rank, keep=1)
        for rank in range(SIZE)
    ]
    refused(run_lockstep(ranks, keep_errors=True), "steps [0, 1]", StateMismatchError)
    assert folders(tmp_path) == []
    save(tmp_path, 1)
    save(tmp_path, 2)
    for asked in ([{"step": 1}, {"step": 2}], [{"step": None, "loaded": words} for words in ("", "a model")]):
        ranks = [
            checkpoint.load_together(tmp_path, lambda _: None, rank=rank, size=SIZE, owner=save, **one)
            for rank, one in enumerate(asked)
        ]
        refused(run_lockstep(ranks, keep_errors=True), "ranks [0] have", StateMismatchError)


def test_incomplete_and_mixed_checkpoints_are_not_loaded(tmp_path: Path) -> None:
    roots = [tmp_path / "here", tmp_path / "there"]
    for step in (1, 2):
        save(roots, step)
        save(tmp_path / "one", step)
    shutil.rmtree(roots[1] / "step-0000000002.1")
    assert_is(load(roots)[1], 1, 1)
    first, second = (tmp_path / "one" / f"step-000000000{step}.1" for step in (1, 2))
    shutil.copy(first / "rank-00001.npz", second)
    refused(load(tmp_path / "one", keep_errors=True), "rank-00001.npz")
    assert_is(load(tmp_path / "one", step=1)[1], 1, 1)
    shutil.rmtree(second)
    (first / "rank-00000.npz").unlink()
    refused(load(tmp_path / "one", keep_errors=True), "missing")
    refused(load(tmp_path / "nowhere", keep_errors=True), "no complete checkpoint")


@pytest.mark.parametrize("name", ["rank-00001.npz", "manifest.json"])
def test_changed_and_truncated_files_are_named_errors(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-0000000001.1" / name
    good, draw, num_refused = path.read_bytes(), random.Random(0), 0
    for trial in range(200):
        bad = bytearray(good)
        if trial % 2:
            bit = draw.randrange(8 * len(bad))
            bad[bit // 8] ^= 1 << bit % 8
        else:
            del bad[draw.randrange(len(bad)) :]
        path.write_bytes(bad)
        try:
            entries = load(tmp_path)
        except CheckpointError:
            num_refused += 1
            continue
        # white space of the manifest and dates in a zip may differ without any difference
        assert name != "manifest.json" or json.loads(bytes(bad)) == json.loads(good)
        assert same(entries[1], an_entry(1, step=1))
    assert num_refused >= 150
    path.write_bytes(good)
    assert_is(load(tmp_path)[1], 1, 1)


def test_a_file_of_another_rank_or_save_is_refused(tmp_path: Path) -> None:
    for directory in ("one", "other"):
        for step in (1, 2):
            save(tmp_path / directory, step)
    save(tmp_path / "three", 2, size=3)
    own = tmp_path / "one" / "step-0000000002.1"
    good = (own / "rank-00001.npz").read_bytes()
    others = [own / "rank-00000.npz", tmp_path / "one" / "step-0000000001.1" / "rank-00001.npz"]
    others += [tmp_path / name / "step-0000000002.1" / "rank-00001.npz" for name in ("other", "three")]
    for other in others:
        (own / "rank-00001.npz").write_bytes(other.read_bytes())
        refused(load(tmp_path / "one", keep_errors=True), "rank-00001.npz")
        refused(load(tmp_path / "one", size=1, keep_errors=True), "rank-00001.npz")
    (own / "rank-00001.npz").write_bytes(good)
    (own / "manifest.json").write_bytes((tmp_path / "other" / own.name / "manifest.json").read_bytes())
    refused(load(tmp_path / "one", keep_errors=True), "another save")
    (own / "manifest.json").write_bytes((others[1].parent / "manifest.json").read_bytes())
    refused(load(tmp_path / "one", keep_errors=True), "step 1")
    assert_is(load(tmp_path / "one", step=1)[1], 1, 1)


@pytest.mark.parametrize(
    "forged",
    [
        *({"size": size} for size in (0, 1, 2**26, "2", True, None)),
        *({"save": "another"}, {"save": []}, {"ranks": [5, 6]}, {"format": None}, {"step": {}}, {"step": 2}),
    ],
    ids=str,
)
def test_a_forged_manifest_is_refused_before_anything_is_made_of_it(tmp_path: Path, forged: Any) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-0000000001.1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | forged))
    tracemalloc.start()
    ends = load(tmp_path, size=1, keep_errors=True)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(type(end) is CheckpointError for end in ends) and most < 2**22


def test_whenever_a_save_is_killed_the_last_complete_one_loads(tmp_path: Path, monkeypatch: Any) -> None:
    """What lies on the disk before each call by which a save waits for it, renames or removes."""
    root, found, step = tmp_path / "saved", list[tuple[Path, int]](), 0

    def noting(call: Any) -> Any:
        def noted(*given: Any, **how: Any) -> Any:
            found.append((tmp_path / str(len(found)), step - 1))
            shutil.copytree(root, found[-1][0])
            return call(*given, **how)

        return noted

    with monkeypatch.context() as patch:
        for where, name in ((checkpoint, "_fsync"), (os, "rename"), (shutil, "rmtree")):
            patch.setattr(where, name, noting(getattr(where, name)))
        for step in range(1, 5):
            save(root, step)
    for frozen, done in found:
        newest = max((int(name[5:15]) for name in folders(frozen) if name.startswith("step-")), default=0)
        assert newest in (done, done + 1)
        for rank, entry in enumerate(load(frozen) if newest else []):
            assert_is(entry, rank, newest)
    assert sum(len(folders(frozen)) > 2 for frozen, _ in found) > 10, "with parts of another save"
