"""`horovod-sparse calibrate`: arguments and tables; the measuring itself is tested under a launch."""

from __future__ import annotations

import pytest

from horovod_sparse.cli import calibrate
from horovod_sparse.cli.calibrate import (
    collective_table,
    growth_table,
    notes_of,
    sparsifier_table,
)
from horovod_sparse.cli.main import main
from horovod_sparse.cost import Fit, Profile
from horovod_sparse.errors import ArgumentError

PROFILE = Profile(
    4,
    "torch",
    "mpi",
    0.001,
    {
        "allgather": Fit(0.002, 2e-9, num_points=8, r_squared=0.9876, median_error=0.012, largest_error=0.34),
        "exchange": Fit(0.0001, 0.0, median_error=0.5),
    },
    {"topk": Fit(1e-4, 3e-10, 2e-8)},
    {"topk": Fit(5e-5, 0.0, 1e-8, notes=("decoding of topk: cut",))},
)


def rows(table) -> list[list[str]]:
    return list(map(list, zip(*(column.cells for column in table.columns), strict=True)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sparsifier", "topq"], "topk"),
        (["--sparsifier", "topk", "--sparsifier", "topk:indices=gaps"], "every name once"),
        (["--collectives", "allgather,reduce"], "allreduce"),
        (["--device", "cuda", "--framework", "tensorflow"], "cpu"),
    ],
)
def test_wrong_values_are_refused_before_horovod_is_started(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "start", lambda framework: pytest.fail("Horovod was started"))
    assert main(["calibrate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_tables_show_what_was_fitted_and_how_well():
    gather, exchange = rows(collective_table(PROFILE))
    assert gather == ["allgather", "2.000", "2", "500 MB", "8", "0.9876", "1.2%", "34.0%"]
    assert exchange[:4] == ["exchange", "0.100", "0", "-"]
    selection, decoding = rows(sparsifier_table(PROFILE))
    assert selection[:5] == ["topk", "selection", "100.0", "0.3", "20"]
    assert decoding[:5] == ["", "decoding", "50.0", "0", "10"]


def test_the_table_of_growth_has_formulas_and_measurements():
    two = Profile(2, "torch", "mpi", 0.001, {"allgather": Fit(0.0014, 1e-9)})
    gather, exchange = rows(growth_table(PROFILE, {2: two}, [16]))
    # a wait of 0.5 ms and 1.5 ms for 2 rounds: 1 round at P = 2, 4 at P = 16
    assert gather == ["allgather", "1.250 (1.400)", "2.000", "3.500"]
    assert exchange == ["exchange", "0.100", "0.100", "0.100"]


def test_bad_fits_are_noted():
    notes = notes_of(PROFILE)
    assert "decoding of topk: cut" in notes
    assert any("exchange" in note and "50%" in note for note in notes)
    assert not any("allgather" in note for note in notes)


def test_ranks_with_different_arguments_are_refused():
    with pytest.raises(ArgumentError, match="ranks 0 and 1"):
        calibrate._same([{"kinds": 1, "device": "cpu"}, {"kinds": 1, "device": "cuda"}])
    calibrate._same([{"kinds": None}] * 3)


def test_progress_without_a_terminal_is_a_line_for_every_tenth(capsys):
    with calibrate.progress_of(0) as tell:
        for done in range(1, 41):
            tell(done, 40, "work")
    assert len(capsys.readouterr().err.splitlines()) == 10
    with calibrate.progress_of(1) as tell:
        tell(1, 1, "work")
    assert capsys.readouterr().err == ""
