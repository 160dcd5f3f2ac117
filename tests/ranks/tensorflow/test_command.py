"""`horovod-sparse doctor` through TensorFlow, on all ranks of a launch."""

from horovod_sparse.cli.main import main


def test_doctor_looks_at_tensorflow(capsys, rank):
    assert main(["doctor", "--framework", "tensorflow"]) in (0, 1)
    if rank == 0:
        assert "started by horovod, controller" in capsys.readouterr().out
