"""The ranks of a launch by Horovod or by torchrun, which run coroutines together."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_sparse.cli.launcher import launcher
from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import ArgumentError, HorovodMissingError, HorovodSparseError
from horovod_sparse.plans.dense import ClusterFacts, cycle_seconds
from horovod_sparse.topology import Topology
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.engine import carry_out
from horovod_sparse.training.host_topology import Ranks as Placement
from horovod_sparse.training.host_topology import own_place

FRAMEWORKS = ("torch", "tensorflow")


def bindings() -> dict[str, bool]:
    """Returns whether Horovod was built for each framework, without loading it."""
    spec = importlib.util.find_spec("horovod")
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    return {name: any(list(place.glob(f"{name}/mpi_lib*.so")) for place in places) for name in FRAMEWORKS}


def usable_framework(asked: str | None = None) -> str:
    """Returns the framework that is asked for, or the first that Horovod was built for."""
    built = bindings()
    usable = [name for name in FRAMEWORKS if built[name] and importlib.util.find_spec(name) is not None]
    if asked is None and not usable:
        raise HorovodMissingError.explained("there is no Horovod that was built for an installed framework")
    return asked or usable[0]


class Launch:
    """The ranks of a launch, of which this process is one."""

    def __init__(self, framework: str, controller: str, placement: Placement) -> None:
        self.framework, self.controller, self.placement = framework, controller, placement
        self.rank, self.size = placement.rank, placement.size

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None = None) -> Any:
        """Returns the result of a coroutine that all ranks run together."""
        raise NotImplementedError

    def cluster(self, device: str) -> ClusterFacts:
        """Returns this rank's place, and what a profile says of the cluster."""
        words = importlib.import_module("torch").cuda.get_device_name() if device == "cuda" else device
        cycle = cycle_seconds() if isinstance(self, HorovodLaunch) else 0.0
        return ClusterFacts(self.rank, self.size, self.framework, self.controller, cycle, str(words))

    def topology(self) -> Topology | None:
        """Returns which ranks share a host; None unless several hosts have as many ranks, from 2."""
        places = [(host, local) for host, local in self.gathered(own_place(self.placement))]
        counts = Counter(host for host, _ in places)
        alike = len(counts) > 1 and len(set(counts.values())) == 1 and len(places) > len(counts)
        return Topology.of(places) if alike else None

    def gathered(self, value: Any) -> list[Any]:
        """Returns a plain value of every rank, in rank order."""
        return list(self.carry_out(shared_lines(value)))

    def agreed(self, work: Callable[[], Any]) -> Any:
        """Returns the result of work on this rank; raises the error of any rank on all of them."""
        result, failure = None, None
        try:
            result = work()
        except (HorovodSparseError, OSError) as error:
            failure = error
        self.carry_out(raise_together(failure))
        return result


class HorovodLaunch(Launch):
    """Ranks that Horovod connects; starts Horovod unless it runs."""

    def __init__(self, framework: str) -> None:
        hvd = self._hvd = importlib.import_module(f"horovod_sparse.{framework}")
        room = "driver" if framework == "torch" else "collectives"
        self._carry_out = importlib.import_module(f"horovod_sparse.{framework}.{room}").carry_out_together
        self._started = not hvd.is_initialized()
        if self._started:
            hvd.init()
        self._process_set = hvd.global_process_set
        placement = Placement.of_horovod(hvd, self._process_set)
        super().__init__(framework, "mpi" if hvd.mpi_enabled() else "gloo", placement)

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None = None) -> Any:
        return self._carry_out(coroutine, self._process_set, "command", topology=topology)

    def end(self) -> None:
        if self._started:
            self._hvd.shutdown()


class TorchrunLaunch(Launch):
    """Ranks that torch.distributed connects by Gloo."""

    def __init__(self) -> None:
        dist = self._dist = importlib.import_module("torch.distributed")
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        host = os.environ.get("GROUP_RANK", platform.node())
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        super().__init__("torch", "gloo", Placement(rank, size, rank, size, host, *local))
        self._carrier = importlib.import_module("horovod_sparse.ddp.collectives").Carrier(None)

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None = None) -> Any:
        self._carrier.topology = topology
        return carry_out(coroutine, self._carrier)

    def end(self) -> None:
        self._dist.destroy_process_group()


def start(framework: str | None) -> HorovodLaunch | TorchrunLaunch:
    """Connects the ranks of this launch: by torch.distributed under torchrun, else by Horovod."""
    if launcher() != "torchrun":
        return HorovodLaunch(usable_framework(framework))
    if framework == "tensorflow":
        raise ArgumentError("--framework", framework, "torch: torchrun starts ranks of PyTorch")
    return TorchrunLaunch()
