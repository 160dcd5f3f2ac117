"""`horovod-sparse calibrate` and `doctor` through TensorFlow, on all ranks of a launch."""

import pytest

from horovod_sparse.cli.main import main
from horovod_sparse.merging import Profile


@pytest.mark.nightly  # what is TensorFlow's own in it every plan by times needs, too
def test_calibrate_measures_kinds_of_collectives(tmp_path, capsys, rank, size):
    path = tmp_path / "profile.json"
    small = ["--quick", "--repetitions", "1", "--budget", "100ms", "--sparsifier", "exdyna"]
    assert main(["calibrate", "--framework", "tensorflow", *small, "--out", str(path)]) == 0
    if rank != 0:
        return
    profile = Profile.load(path)
    assert (profile.size, profile.framework) == (size, "tensorflow")
    assert sorted(profile.collectives) == ["allgather", "allreduce", "broadcast", "exchange"]
    assert "exdyna" in profile.selection
    assert "controller" in capsys.readouterr().out


def test_doctor_looks_at_tensorflow(capsys, rank):
    assert main(["doctor", "--framework", "tensorflow"]) in (0, 1)
    if rank == 0:
        assert "started by horovod, controller" in capsys.readouterr().out
