"""The ranks of a launch, whichever framework carries their messages; frameworks are imported here at last."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_sparse.collectives import Synchronization, shared_lines
from horovod_sparse.errors import HorovodMissingError, HorovodSparseError, UnsupportedError
from horovod_sparse.planning.calibration.collectives import TrainingWork
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.topology import Topology
from horovod_sparse.training.collective_errors import raise_together
from horovod_sparse.training.host_topology import Ranks as Place
from horovod_sparse.training.host_topology import agreed_topology, own_place

FRAMEWORKS = ("torch", "tensorflow")


def bindings() -> dict[str, bool]:
    """Whether Horovod has been built for each framework; nothing is loaded."""
    spec = importlib.util.find_spec("horovod")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return {
        framework: any(list(Path(place, framework).glob("mpi_lib*.so")) for place in places)
        for framework in FRAMEWORKS
    }


def usable_framework(asked: str | None = None) -> str:
    """The framework to communicate through: the one asked for, or the first that Horovod was built for."""
    if asked is not None:
        return asked
    built = bindings()
    for framework in FRAMEWORKS:
        if built[framework] and importlib.util.find_spec(framework) is not None:
            return framework
    raise HorovodMissingError.explained("there is no Horovod here that was built for an installed framework")


class Ranks:
    """All ranks of a launch, started unless they were before."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.hvd: Any = importlib.import_module(f"horovod_sparse.{framework}")
        room = "driver" if framework == "torch" else "collectives"
        self._carry_out = importlib.import_module(f"horovod_sparse.{framework}.{room}").carry_out_together
        self._started = not self.hvd.is_initialized()
        if self._started:
            self.hvd.init()
        self.rank, self.size = int(self.hvd.rank()), int(self.hvd.size())

    def carry_out(
        self,
        coroutine: Synchronization[Any],
        name: str = "command",
        topology: Topology | None = None,
    ) -> Any:
        """What a coroutine returns that all ranks run together."""
        return self._carry_out(coroutine, self.hvd.global_process_set, name, topology=topology)

    @property
    def place(self) -> Place:
        return Place.of_horovod(self.hvd, self.hvd.global_process_set)

    def topology(self) -> Topology | None:
        """Which ranks share a host; None unless there are several hosts of several ranks, as many on each."""
        try:
            found: Topology = self.carry_out(agreed_topology(own_place(self.place)))
        except UnsupportedError:
            return None
        return found if found.num_hosts > 1 and found.per_host > 1 else None

    def gathered(self, value: Any) -> list[Any]:
        """A plain value of every rank, in rank order."""
        return list(self.carry_out(shared_lines(value)))

    def agreed(self, work: Callable[[], Any]) -> Any:
        """What a piece of work on this rank gives, once it has gone well on all."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except (HorovodSparseError, OSError) as error:
            failure = error
        self.carry_out(raise_together(failure))
        return result

    def where(self, device: str) -> ClusterFacts:
        """This rank's place, and what a profile says of the cluster."""
        everyone = self.hvd.global_process_set
        if self.framework == "tensorflow":
            return ClusterFacts.of(everyone, "tensorflow", self.hvd)
        where_of = importlib.import_module("horovod_sparse.torch.horovod_engine").where_of
        found: ClusterFacts = where_of(everyone, importlib.import_module("torch").device(device))
        return found

    def memory(self, device: str) -> Any:
        """Where buckets are while selection is timed: None for the host."""
        if device == "cpu":
            return None
        measuring = importlib.import_module("horovod_sparse.tensors.measuring")
        return measuring.bucket_memory(importlib.import_module("torch").device(device))

    def training(self, device: str) -> TrainingWork | None:
        """What a dense training does, to be timed; None with TensorFlow, where it is not."""
        if self.framework == "tensorflow":
            return None
        place = importlib.import_module("torch").device(device)
        calibration = importlib.import_module("horovod_sparse.torch.calibration")
        work: TrainingWork = calibration.DenseTraining(place, self.hvd.global_process_set)
        return work

    def end(self) -> None:
        if self._started:
            self.hvd.shutdown()


def start(framework: str | None) -> Ranks:
    return Ranks(usable_framework(framework))
