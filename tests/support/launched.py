"""Tests that every rank of a launch runs alike: the same tests, in the same order, with the same end.

Horovod is started once. After every test the ranks tell each other how it ended, so that all of them fail
together; a rank that fails stops Horovod, which frees the others from any collective they are in.

Import this before Horovod and before a framework: it sets what they read when they start.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# the models of tests are too small for a sparsifier to win
os.environ.setdefault("HOROVOD_SPARSE_TENSOR_SELECTION", "all")
# process sets that single tests make
os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
# a collective that some rank never starts ends the test, not the user's patience
os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "20")
os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60")


def measure_little() -> None:
    """Plans by times begin with a measurement of two seconds, which every test of them would take."""
    from horovod_sparse.planning import calibration

    sizes = (64, 1 << 12, 1 << 16), (1 << 8, 1 << 10, 1 << 12)
    calibration.QUICK = calibration.Extent(*sizes, 3, 0.2)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leaves to nights what one engine shows as well as another; see `conformance.engine.Engine`."""
    engine = item.callspec.params.get("engine") if hasattr(item, "callspec") else None
    # no engine has what some tests need
    if hasattr(engine, "is_by_day") and not engine.is_by_day(item.name):
        item.add_marker(pytest.mark.nightly)


def runtest_hook(hvd: Any, meet: Callable[[str], object], failures: tuple[type[BaseException], ...]) -> Any:
    """For `pytest_runtest_call`: `failures` is what `meet` raises where another rank has stopped Horovod."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
        try:
            result = yield
        except pytest.skip.Exception:  # decided by facts that all ranks share
            raise
        except BaseException:
            item.session.shouldfail = "Horovod was stopped, since a test failed"
            hvd.shutdown()
            raise
        try:
            meet(item.name)
        except failures:
            item.session.shouldfail = "Horovod was stopped, since a test failed on another rank"
            raise AssertionError("this test failed on another rank: look at that rank's output") from None
        return result

    return pytest_runtest_call


def fixtures(hvd: Any, broadcast: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any]:
    """What tests of ranks ask for; `broadcast` returns the first rank's object."""

    @pytest.fixture(name="rank")
    def rank() -> int:
        return int(hvd.rank())

    @pytest.fixture(name="size")
    def size() -> int:
        return int(hvd.size())

    @pytest.fixture(name="process_set")
    def process_set() -> Iterator[Callable[..., Any]]:
        made = []

        def make(ranks: Any) -> Any:
            if len(ranks) == hvd.size():
                return hvd.global_process_set
            made.append(hvd.add_process_set(list(ranks)))
            return made[-1]

        yield make
        for one in made:
            if hvd.is_initialized():  # not after a failed test
                hvd.remove_process_set(one)

    @pytest.fixture(name="folder")
    def folder() -> Iterator[Path]:
        """The same on all ranks."""
        made = Path(broadcast(tempfile.mkdtemp() if hvd.rank() == 0 else None))
        yield made
        if hvd.rank() == 0:  # all have ended the test
            shutil.rmtree(made, ignore_errors=True)

    return rank, size, process_set, folder
