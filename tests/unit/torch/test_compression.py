"""The namespace `Compression`: before hvd.init(), without ranks."""

import copy
import importlib
import inspect
import pickle
import sys

import horovod.torch
import pytest
import torch

from horovod_sparse.errors import UnknownNameError, UnsupportedError
from horovod_sparse.feedback import recipe
from horovod_sparse.sparsifiers import ALGORITHMS
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer
from horovod_sparse.torch import Compression, SparseCompressor
from support.jobs import ran


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_factory_with_its_arguments(name):
    factory = getattr(Compression, name)
    density = 1.0 if issubclass(ALGORITHMS[name], Quantizer) else 0.25
    compressor = factory(density=density, feedback="none")
    assert isinstance(compressor, horovod.torch.compression.Compressor)
    assert compressor.recipe == recipe(name, density=density, feedback="none")
    parameters = inspect.signature(factory).parameters
    assert parameters["density"].default == ALGORITHMS[name].density
    assert {"values", "feedback"} < set(parameters)
    assert inspect.getdoc(ALGORITHMS[name]).splitlines()[0] in factory.__doc__
    assert "dense_below" in factory.__doc__
    assert name in dir(Compression) and f"Compression.{name}" in factory.__qualname__


def test_parse_knows_horovods_own_and_what_is_misspelt():
    assert Compression.parse("none") is Compression.none
    assert Compression.parse("fp16") is Compression.fp16
    with pytest.raises(UnknownNameError, match=r"fp16.*none"):
        Compression.parse("topq:density=0.1")
    with pytest.raises(AttributeError, match="exdyna"):
        _ = Compression.topq
    with pytest.raises(TypeError):
        Compression.topk(0.1)  # what would the number mean?


def test_a_compressor_travels_as_its_recipe_and_hashes_by_identity():
    compressor = Compression.exdyna(density=0.02)
    for other in (pickle.loads(pickle.dumps(compressor)), copy.deepcopy(compressor)):
        assert isinstance(other, SparseCompressor) and other.recipe == compressor.recipe
        assert other != compressor
    assert len({compressor, Compression.exdyna(density=0.02)}) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_horovods_allreduce_gets_what_one_rank_would_send(dtype):
    topk = Compression.topk(density=0.5)
    for compressor, given, expected in (
        (topk, [[1.0, -4.0], [2.0, 0.5]], [[0.0, -4.0], [2.0, 0.0]]),
        (Compression.qsgd(), [3.0, 3.0], [3.0, 3.0]),
        (topk, [1.0, float("inf")], [1.0, float("inf")]),
        (topk, [], []),
    ):
        found, context = compressor.compress(torch.tensor(given, dtype=dtype))
        assert compressor.decompress(found, context).tolist() == expected and found.dtype == dtype
    assert topk.compress(whole := torch.arange(4))[0] is whole
    assert topk.compress(torch.tensor([[1, -4], [2, 0]], dtype=dtype).t())[0].tolist() == [[0, 2], [-4, 0]]
    with pytest.raises(UnsupportedError, match=r"give tensor\.detach\(\)"):
        topk.compress(torch.ones(2, dtype=dtype, requires_grad=True))


def test_without_horovod_the_error_says_how_to_get_it(tmp_path):
    program = "import sys\n"
    for name, broken in (("raises", "raise ImportError('no module')"), ("empty", "pass")):
        package = tmp_path / name / "horovod" / "torch"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text("")
        (package / "__init__.py").write_text(broken)
        program += f"sys.path.insert(0, {str(tmp_path / name)!r})\n"
        program += (
            "try:\n    import horovod_sparse.torch\nexcept Exception as error:\n    print(repr(error))\n"
            "for name in ('horovod', 'horovod.torch', 'horovod_sparse.torch'): sys.modules.pop(name, None)\n"
        )
    done = ran(sys.executable, "-c", program)
    told = done.stdout.splitlines()
    assert len(told) == 2, done.stderr
    for line in told:
        assert "HorovodMissingError" in line and "scripts/setup" in line and "docs/install.md" in line


def test_starting_horovod_gives_its_own_collectives_a_deadline_and_importing_us_does_not(monkeypatch):
    name = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    found = f"print(os.environ.get({name!r}))"
    program = f"import os, horovod_sparse.torch; {found}; import horovod.torch as hvd; hvd.init(); {found}"
    monkeypatch.delenv(name, raising=False)
    done = ran(sys.executable, "-c", program)
    assert done.stdout.split() == ["None", "330"], done.stderr


MODULES = "compression elastic elastic.sampler elastic.state functions mpi_ops optimizer sync_batch_norm"
OURS = {"Compression", "DistributedOptimizer", "compression", "optimizer"}


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in MODULES.split())])
def test_every_public_name_of_horovod_is_here(module):
    theirs = importlib.import_module(f"horovod.torch{module}")
    ours = importlib.import_module(f"horovod_sparse.torch{module}")
    for name, item in vars(theirs).items():
        if name.startswith("_"):
            continue
        found = getattr(ours, name)
        if name not in OURS or (module and module not in (".compression", ".optimizer")):
            assert found is item, name
