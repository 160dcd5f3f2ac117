"""Connects the ranks that Horovod or torchrun has launched, to run coroutines on all of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError, HorovodMissingError
from horovod_sparse.topology import ClusterFacts, Placement, cycle_seconds
from horovod_sparse.training.engine import carry_out

FRAMEWORKS = ("torch", "tensorflow")
#: variables that hold a rank: of horovodrun, Open MPI's mpirun, MPICH's, and srun
_OF_HOROVOD = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def launcher() -> str:
    """Returns "horovod" (also for mpirun and srun) or "torchrun"; "" if no launcher began this process."""
    if any(name in os.environ for name in _OF_HOROVOD):
        return "horovod"
    return "torchrun" if all(name in os.environ for name in _OF_TORCHRUN) else ""


def rank_prefix() -> str:
    """Returns "rank R: " for the beginning of an error line, or "" without a launcher."""
    names = (*_OF_HOROVOD, "RANK") if launcher() else ()
    return next((f"rank {os.environ[name]}: " for name in names if name in os.environ), "")


def bindings() -> dict[str, bool]:
    """Returns whether Horovod was built for each framework, without importing it."""
    spec = importlib.util.find_spec("horovod")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return {name: any(list(place.glob(f"{name}/mpi_lib*.so")) for place in places) for name in FRAMEWORKS}


def usable_framework(asked: str | None = None) -> str:
    """Returns the framework `asked` for, or by default the first for which Horovod was built."""
    built = bindings()
    usable = [name for name in FRAMEWORKS if built[name] and importlib.util.find_spec(name) is not None]
    if asked is None and not usable:
        raise HorovodMissingError.explained("Horovod was built for no installed framework")
    return asked or usable[0]


@dataclass(frozen=True)
class RankConnection:
    """A connection of this process to all ranks that a launcher started."""

    framework: str
    controller: str
    placement: Placement
    #: returns the result of a coroutine that all ranks run together
    carry_out: Callable[[Synchronization[Any]], Any]
    end: Callable[[], None]

    def cluster(self, device: str) -> ClusterFacts:
        """Returns the facts about the cluster, with this process's rank and device."""
        words = importlib.import_module("torch").cuda.get_device_name() if device == "cuda" else device
        cycle = 0.0 if launcher() == "torchrun" else cycle_seconds()
        facts = self.framework, self.controller, cycle, str(words)
        return ClusterFacts(self.placement.rank, self.placement.size, *facts)


def connect_ranks(framework: str | None) -> RankConnection:
    """Connects this process to the launched ranks: by torch.distributed under torchrun, else by Horovod."""
    if launcher() != "torchrun":
        return _connect_horovod(usable_framework(framework))
    if framework == "tensorflow":
        raise ArgumentError("--framework", framework, "torch: torchrun starts ranks of PyTorch")
    return _connect_torchrun()


def _connect_horovod(framework: str) -> RankConnection:
    hvd = importlib.import_module(f"horovod_sparse.{framework}")
    room = importlib.import_module(f"{hvd.__name__}.{'driver' if framework == 'torch' else 'collectives'}")
    started = not hvd.is_initialized()
    if started:
        hvd.init()
    everyone, controller = hvd.global_process_set, "mpi" if hvd.mpi_enabled() else "gloo"

    def run(coroutine: Synchronization[Any]) -> Any:
        return room.carry_out_together(coroutine, everyone, "command")

    placement = Placement.of_horovod(hvd, everyone)
    return RankConnection(framework, controller, placement, run, hvd.shutdown if started else lambda: None)


def _connect_torchrun() -> RankConnection:
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo")
    carrier = importlib.import_module("horovod_sparse.ddp.collectives").Carrier(None)

    def run(coroutine: Synchronization[Any]) -> Any:
        return carry_out(coroutine, carrier)

    placement = Placement.of_torchrun(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    return RankConnection("torch", "gloo", placement, run, dist.destroy_process_group)
