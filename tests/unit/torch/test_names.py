"""A script that swaps `import horovod.torch` for ours must not notice: every name, in every module."""

import importlib

import pytest

hvd = pytest.importorskip("horovod_sparse.torch")

import horovod.torch as stock  # noqa: E402

MODULES = (
    "",
    ".compression",
    ".elastic",
    ".elastic.sampler",
    ".elastic.state",
    ".functions",
    ".mpi_ops",
    ".optimizer",
    ".sync_batch_norm",
)
OURS = {"Compression", "DistributedOptimizer", "compression", "optimizer"}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_horovod_is_here(module):
    theirs = importlib.import_module(f"horovod.torch{module}")
    ours = importlib.import_module(f"horovod_sparse.torch{module}")
    for name, item in vars(theirs).items():
        if name.startswith("_"):
            continue
        found = getattr(ours, name)
        if name not in OURS or (module and module not in (".compression", ".optimizer")):
            assert found is item, name


def test_modules_are_found_as_attributes_and_by_import():
    import horovod_sparse.torch.elastic
    import horovod_sparse.torch.functions
    import horovod_sparse.torch.mpi_ops
    import horovod_sparse.torch.sync_batch_norm
    from horovod_sparse.torch.elastic import TorchState, run

    assert horovod_sparse.torch.elastic is stock.elastic
    assert hvd.elastic.TorchState is TorchState is stock.elastic.TorchState
    assert hvd.elastic.run is run
    assert hvd.mpi_ops is stock.mpi_ops
    assert hvd.compression.FP16Compressor is stock.compression.FP16Compressor
    assert issubclass(hvd.SparseCompressor, hvd.compression.Compressor)
    assert hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd.optimizer._DistributedOptimizer is stock.optimizer._DistributedOptimizer
