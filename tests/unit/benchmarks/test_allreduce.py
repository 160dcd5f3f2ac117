"""What `scripts/bench allreduce` replays, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.allreduce.main import tables, with_tables
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


def a_launch(**seconds: float) -> dict[str, Any]:
    def spread(median: float) -> dict[str, float]:
        return {"median": median, "low": median / 2, "high": median * 2}

    results = [
        {
            "method": name.replace("_teams_", ":teams="),
            "step": {"seconds": spread(0.5), "facts": {"rounds": 3.0, "density_union": 0.01}},
            "communication": {"seconds": spread(median), "bytes_sent": 12_345.0},
        }
        for name, median in seconds.items()
    ]
    facts = {"ranks": 8, "rate": "1gbit", "network": "gloo", "transport": "words", "elements": 10**6}
    return facts | {"density": 0.01, "results": results}


def test_tables_compare_with_spardl_at_its_best() -> None:
    text = tables({"launches": [a_launch(topk=0.012, spardl_teams_1=0.005, spardl_teams_2=0.004)]})
    assert text.startswith("8 hosts at 1gbit, Gloo, n = 1 million, density 0.01; pairs by words:\n")
    rows = text.splitlines()[4:7]
    assert rows == [
        "| `topk` | 12.0 (6.0 to 24.0) | 3.00 | 500 | 3 | 12 | 1.00% |",
        "| `spardl:teams=1` | 5.0 (2.5 to 10.0) | 1.25 | 500 | 3 | 12 | 1.00% |",
        "| **`spardl:teams=2`** | 4.0 (2.0 to 8.0) | 1.00 | 500 | 3 | 12 | 1.00% |",
    ]


def test_a_document_keeps_everything_else() -> None:
    document = "before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n"
    new = with_tables(document, {"launches": [a_launch(topk=0.1)]})
    assert new.startswith("before\n<!-- measured: begin -->\n8 hosts") and new.endswith(
        "<!-- measured: end -->\nafter\n"
    )
    assert "old" not in new
    with pytest.raises(ValueError, match="no place"):
        with_tables("nothing", {"launches": []})


def test_the_page_shows_what_was_measured() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "sparse_allreduce.md").read_text()
    assert (
        with_tables(page, json.loads((docs / "measurements" / "sparse_allreduce.json").read_text())) == page
    )
