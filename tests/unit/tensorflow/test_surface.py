"""A script that swaps one import for the other: every public name of Horovod's is ours, too."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tensorflow

MODULES = ["", ".elastic", ".functions", ".mpi_ops", ".util", ".sync_batch_norm", ".compression"]
MODULES += [".gradient_aggregation", ".keras", ".keras.elastic", ".keras.callbacks"]


def _public(module):
    """Names that are Horovod's, not what it imports for itself."""
    return [
        name
        for name, item in vars(module).items()
        if name[0] != "_"
        and not (isinstance(item, ModuleType) and not item.__name__.startswith("horovod.tensorflow"))
    ]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_here(module):
    stock = importlib.import_module(f"horovod.tensorflow{module}")
    own = importlib.import_module(f"horovod_sparse.tensorflow{module}")
    used = {"keras", "tf", "ops", "K", "version", "np", "io", "cloudpickle", "warnings", "inspect"}
    names = set(_public(stock)) - used
    if module in (".elastic", ".functions", ".keras.elastic", ".sync_batch_norm", ".keras.callbacks"):
        # of these, what they define; they import the rest from others
        here = [n for n in names if getattr(getattr(stock, n), "__module__", None) == stock.__name__]
        names = set(getattr(stock, "__all__", here))
    assert names
    assert sorted(name for name in names if not hasattr(own, name)) == []


def test_no_module_of_horovods_stands_before_ours():
    """Also where Horovod's have been imported before: `keras` was Horovod's then, callbacks and all."""
    code = (
        "import horovod.tensorflow.keras, horovod_sparse.tensorflow as hvd\n"
        "import horovod_sparse.tensorflow.keras as k\n"
        "own = [hvd.keras, hvd.elastic, hvd.functions, hvd.sync_batch_norm, hvd.compression]\n"
        "own += [k.callbacks, k.elastic]\n"
        "print(all(module.__name__.startswith('horovod_sparse.') for module in own))\n"
        "import horovod_sparse.tensorflow.mpi_ops, horovod.tensorflow.mpi_ops\n"
        "print(horovod_sparse.tensorflow.mpi_ops is horovod.tensorflow.mpi_ops is hvd.mpi_ops)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True"], done.stderr[-2000:]
