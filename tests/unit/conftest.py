"""What unit tests of several folders share."""

import os
import sys

import pytest

from support.memories import choose_memory

# the models of tests are small, and would stay dense
os.environ.setdefault("HOROVOD_SPARSE_TENSOR_SELECTION", "all")
# over MPI the binding that ends first may finalize it under the thread of the other: a segmentation fault
os.environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


@pytest.fixture(params=["host", "device"])
def memory(request, monkeypatch):
    """Runs a test with CPU tensors twice: once served as the host's, once as if a GPU held them."""
    choose_memory(monkeypatch, request.param)
    return request.param


@pytest.fixture(autouse=True)
def horovod_of_both_frameworks():
    """Starts both of Horovod's bindings where a process has both: whichever test comes first.

    They keep one record of process sets, filled by the binding that was imported last, whichever is
    started. While that one is not, the record is empty, and no rank belongs to the global process set.
    """
    bindings = [sys.modules.get(f"horovod.{framework}") for framework in ("torch", "tensorflow")]
    if all(bindings):
        for binding in bindings:
            if not binding.is_initialized():
                binding.init()
