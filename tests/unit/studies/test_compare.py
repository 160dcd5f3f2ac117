"""What the demo says: seconds, the prediction, and that loopback is no network."""

import json
import sys

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("mlxtend")

import compare

from horovod_sparse.cost import AlphaBeta, Fit, assumed_profile
from horovod_sparse.merging import Plan

SIZES = {"first": 1000, "second": 4_000_000}


def runs(**changed):
    profile = assumed_profile(AlphaBeta(5e-5, 8e-9), 2, selection=Fit(1e-4, 1e-9)).to_json()
    saved = json.loads(profile)
    saved["backward_seconds"], saved["forward_seconds"] = [["first", 0.01], ["second", 0.01]], 0.02
    predicted = {
        "seconds": {"taken": 0.05, "all dense": 0.2},
        "profile": json.dumps(saved),
        "plan": Plan((("second", "first"),)).to_dict(),
        "sparsifier": "topk:density=0.01",
        "sizes": SIZES,
    }
    common = {"size": 2, "steps": 10, "num_parameters": 4_001_000, "accuracy": 0.96, "step_seconds": 0.1}
    curve = {"curve": [[1.0, 0.9], [2.0, 0.96]]}
    sparse = {**common, **curve, "compression": "topk", "bytes_per_step": 1e5, "settled_seconds": 0.05}
    dense = {**common, **curve, "compression": "none", "bytes_per_step": 16e6, "settled_seconds": 0.22}
    return {**sparse, "predicted": predicted, **changed}, dense


def test_on_hosts_seconds_stand_beside_their_prediction():
    faster, expected = compare.verdict(*runs(), "two hosts")
    assert "between two hosts" in faster and "4.4 times faster" in faster
    assert "4.0 times, 9% off" in expected and "50 ms sparse, 200 ms dense" in expected


def test_all_of_it_is_printed_and_drawn(tmp_path, capsys, monkeypatch):
    paths = [tmp_path / "sparse.json", tmp_path / "dense.json"]
    for path, run in zip(paths, runs(), strict=True):
        path.write_text(json.dumps(run))
    arguments = [*map(str, paths), "--network", "two hosts", "--picture", str(tmp_path / "demo.png")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, "--min-saving", "20"])
    assert compare.main() == 0
    out = capsys.readouterr().out
    assert "seconds of training" in out and "160.0 times less" in out
    assert (tmp_path / "demo.png").stat().st_size > 5000
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, "--min-saving", "200"])
    assert compare.main() == 1
