"""`horovod-sparse calibrate` and `doctor` on all ranks of a launch."""

import horovod_sparse.torch as hvd
from horovod_sparse.cli.main import main
from horovod_sparse.merging import Profile

SMALL = ["--quick", "--repetitions", "2", "--budget", "2s", "--sparsifier", "topk", "--framework", "torch"]


def test_calibrate_writes_a_profile_of_this_launch(tmp_path, capsys, rank, size):
    path = tmp_path / "profile.json"
    assert main(["calibrate", *SMALL, "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert path.exists() == (rank == 0)
    if rank != 0:
        assert printed == ""
        return
    profile = Profile.load(path)
    assert (profile.size, profile.framework) == (size, "torch")
    assert profile.controller == ("mpi" if hvd.mpi_enabled() else "gloo")
    assert "exchange" in printed and profile.selection["topk"].num_points >= 3


def test_what_is_wrong_is_refused_on_all_ranks(tmp_path, capsys, rank):
    out = ["--out", str(tmp_path / "profile.json")]
    assert main(["calibrate", *SMALL, "--density", str(0.01 * (1 + rank)), *out]) == 2
    assert "give all ranks the same" in capsys.readouterr().err
    nowhere = tmp_path / "missing" / "profile.json"
    assert main(["calibrate", *SMALL, "--out", str(nowhere)]) == 2
    text = capsys.readouterr().err
    assert "--out" in text
    assert "Traceback" not in text


def test_doctor_prints_once_and_ends_alike_everywhere(capsys, rank, size, monkeypatch):
    code = main(["doctor"])
    printed = capsys.readouterr().out
    assert hvd.allgather_object(code) == [code] * size
    if rank == 0:
        assert f"{size} ranks, started by horovod" in printed
    else:
        assert printed == ""
    if rank == size - 1:
        monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "77")
    assert main(["doctor"]) == 1
    if rank == 0:
        assert f"77 on rank {size - 1}" in capsys.readouterr().out
