"""What PyTorch over Horovod gives to a training: facts of parameters, parts, and messages between ranks."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import DeadlineError, StateMismatchError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.tensors.models import new_facts
from horovod_sparse.topology import ClusterFacts, Placement, Topology
from horovod_sparse.torch._horovod import hvd, present_start
from horovod_sparse.torch.driver import HorovodDriver, carry_out_together
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.engine import Facts, PartSpec

#: how long ranks that have waited in vain may differ in when they stopped
_ANSWER_SECONDS = 5.0

#: of optimizers and compressors
construction_errors = ConstructionErrors.of_horovod(hvd)


def _refuse_whole_gradients(names: Sequence[str], process_set: Any) -> None:
    """Finds out whether a rank that did not come sends whole gradients, and ends that.

    It waits for collectives of the parameters' names. Putting another type under such a name is an error of
    Horovod's on all ranks. Nothing goes on afterwards in any case, so it does not matter if nobody answers.
    """
    other = torch.float64
    handles = [
        hvd.allreduce_async(torch.zeros(1, dtype=other), name=name, process_set=process_set) for name in names
    ]
    until = time.monotonic() + _ANSWER_SECONDS
    while not all(map(hvd.poll, handles)) and time.monotonic() < until:
        time.sleep(0.01)
    for handle in handles:
        try:
            if hvd.poll(handle):
                hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            if "mismatched" in str(error).lower():
                raise StateMismatchError(
                    f"compression differs: another rank sends whole gradients ({error}); give all ranks the "
                    "same"
                ) from error


class HorovodEngine:
    """An `Engine` for the parameters that one optimizer trains.

    Args:
        binding: the training, which makes its parts.
    """

    name = "horovod_sparse.torch"
    start_token = staticmethod(present_start)

    def __init__(
        self,
        binding: Any,
        optimizer: Any,
        names: Mapping[torch.Tensor, str],
        recipe: Recipe,
        process_set: Any,
        deadline_seconds: float | None,
    ) -> None:
        self.optimizer, self.process_set = optimizer, process_set
        self._names, self._recipe, self._deadline_seconds = dict(names), recipe, deadline_seconds
        self.driver = HorovodDriver(process_set, deadline_seconds)
        self.binding = binding

    def rank_and_size(self) -> tuple[int, int]:
        return int(self.process_set.rank()), int(self.process_set.size())

    def ranks(self) -> Placement:
        return Placement.of_horovod(hvd, self.process_set)

    def facts(self, known: Facts) -> Facts:
        return new_facts(self.optimizer, known, self._names, self._recipe.rules)

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Any]:
        return self.binding.make_parts(specs, facts, place, topology)

    def carry_out(
        self, coroutine: Synchronization[Any], topology: Topology | None, name: str = "agreement"
    ) -> Any:
        """Carries out as `Engine.carry_out`, under one name: ranks that differ meet there."""
        try:
            return carry_out_together(
                *(coroutine, self.process_set, f"horovod_sparse.{name}"),
                deadline_seconds=self._deadline_seconds,
                meanwhile=construction_errors.looking(self.process_set),
                topology=topology,
            )
        except DeadlineError:
            _refuse_whole_gradients(sorted(self.binding.facts), self.process_set)
            raise

    def move_to(self, topology: Topology | None) -> None:
        self.driver.move_to(topology)

    def declared(self) -> Mapping[str, object]:
        ranks = self.process_set.ranks
        return {"process_set": "all" if ranks is None else list(ranks)}

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())


class OverHorovod:
    """Gives a training its driver, and connects it once ranks have agreed."""

    engine: HorovodEngine
    starter: Any = property(operator.attrgetter("engine.driver"))

    def agree(self: Any, **how: Any) -> None:
        is_due = not self.is_agreed
        super().agree(**how)  # type: ignore[misc]
        if is_due:
            self.engine.driver.begin(self)


def where_of(process_set: Any, device: torch.device) -> ClusterFacts:
    """Returns this rank's place, and the facts of the cluster for a profile."""
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return ClusterFacts.of(process_set, "torch", hvd, words)


def most_of(parameters: Sequence[ParameterFacts]) -> tuple[torch.device, str]:
    """Returns the device and type of most elements, which are measured for all."""
    elements: dict[tuple[str, str], int] = {}
    for parameter in parameters:
        key = parameter.device, parameter.dtype
        elements[key] = elements.get(key, 0) + parameter.num_elements
    name, dtype = max(elements, key=lambda key: elements[key])
    return torch.device(name), dtype
