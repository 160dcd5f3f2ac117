"""The namespace `Compression`: before hvd.init(), without ranks."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import horovod.torch
import pytest
import torch

import horovod_sparse.torch
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.feedback import recipe
from horovod_sparse.sparsifiers import ALGORITHMS
from horovod_sparse.sparsifiers.rounds.quantized import Quantizer
from horovod_sparse.torch import Compression, SparseCompressor


def test_every_public_name_of_horovod_is_here():
    missing = [name for name in dir(horovod.torch) if not name.startswith("_")]
    missing = [name for name in missing if not hasattr(horovod_sparse.torch, name)]
    assert missing == []
    assert horovod_sparse.torch.allreduce is horovod.torch.allreduce
    assert horovod_sparse.torch.Compression is Compression
    assert Compression.none is horovod.torch.Compression.none
    assert Compression.fp16 is horovod.torch.Compression.fp16


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_factory_with_its_arguments(name):
    factory = getattr(Compression, name)
    density = 1.0 if issubclass(ALGORITHMS[name], Quantizer) else 0.25
    compressor = factory(density=density, feedback="none")
    assert isinstance(compressor, horovod.torch.compression.Compressor)
    assert compressor.recipe == recipe(name, density=density, feedback="none")
    parameters = inspect.signature(factory).parameters
    assert parameters["density"].default == ALGORITHMS[name].density
    assert {"quantum", "feedback", "named_parameters", "process_set"} < set(parameters)
    assert inspect.getdoc(ALGORITHMS[name]).splitlines()[0] in factory.__doc__
    assert "named_parameters" in factory.__doc__
    assert name in dir(Compression) and f"Compression.{name}" in factory.__qualname__


@pytest.mark.parametrize(
    "text",
    [
        "topk:density=0.01",
        "micro:density=0.01,threshold=paper",
        "exdyna:density=0.5,rebalance=none,num_blocks=64",
        "randomk:shared=False,seed=3",
        "topk:feedback=none",
    ],
)
def test_parse_and_repr_tell_the_same(text):
    compressor = Compression.parse(text)
    assert compressor.recipe == eval(repr(compressor)).recipe
    assert compressor.recipe != Compression.parse(text.partition(":")[0]).recipe


def test_parse_knows_horovods_own():
    assert Compression.parse("none") is Compression.none
    assert Compression.parse("fp16") is Compression.fp16


def test_what_is_misspelt_names_what_is_valid():
    with pytest.raises(UnknownNameError, match="density, feedback, indices, quantum, schedule, values"):
        Compression.topk(densty=0.1)
    with pytest.raises(UnknownNameError, match=r"fp16.*none"):
        Compression.parse("topq:density=0.1")
    with pytest.raises(AttributeError, match="exdyna"):
        _ = Compression.topq
    with pytest.raises(ArgumentError, match=r"density=1\.5"):
        Compression.exdyna(density=1.5)
    with pytest.raises(ArgumentError, match="NAME:ARGUMENT=VALUE"):
        Compression.parse("topk:0.1")
    with pytest.raises(TypeError):
        Compression.topk(0.1)  # what would the number mean?


@pytest.mark.parametrize(
    "wrong", [[torch.zeros(1)], [("a", 1)], [("a", torch.zeros(1)), ("a", torch.zeros(1))]]
)
def test_named_parameters_are_checked_at_once(wrong):
    with pytest.raises(ArgumentError, match="named_parameters"):
        Compression.topk(named_parameters=wrong)


def test_a_compressor_travels_as_its_recipe_and_hashes_by_identity():
    layer = torch.nn.Linear(3, 3)
    compressor = Compression.exdyna(density=0.02, named_parameters=layer.named_parameters())
    for other in (pickle.loads(pickle.dumps(compressor)), copy.deepcopy(compressor)):
        assert isinstance(other, SparseCompressor) and other.recipe == compressor.recipe
        assert other.parameters is None and other != compressor
    assert len({compressor, Compression.exdyna(density=0.02)}) == 2


def test_a_compressor_is_made_without_horovod_running():
    program = (
        "import pickle, horovod_sparse.torch as hvd\n"
        "print(pickle.loads(pickle.dumps(hvd.Compression.topk(density=0.1))), hvd.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Compression.topk(density=0.1) False"


@pytest.mark.parametrize(
    "broken", ["raise ImportError('no module')", "pass"], ids=["absent", "without torch"]
)
def test_without_horovod_the_error_says_how_to_get_it(broken, tmp_path):
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").write_text("")
    (package / "__init__.py").write_text(broken)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import horovod_sparse.torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "HorovodMissingError" in done.stderr
    assert "scripts/setup" in done.stderr and "CMAKE_CXX_STANDARD" in done.stderr
