"""What PyTorch over Horovod gives to a training: facts of parameters, parts, and messages between ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import Recipe
from horovod_sparse.plans import ParameterFacts
from horovod_sparse.tensors.parts import Part, facts_of, groups_of, make_parts
from horovod_sparse.topology import ClusterFacts, Placement, Topology
from horovod_sparse.torch._horovod import hvd, present_start
from horovod_sparse.torch.driver import HorovodDriver, carry_out_together
from horovod_sparse.training.collective_errors import ConstructionErrors
from horovod_sparse.training.engine import Facts, PartSpec

#: how long ranks that have waited in vain may differ in when they stopped
_ANSWER_SECONDS = 5.0

#: of optimizers and compressors
construction_errors = ConstructionErrors.of_horovod(hvd)


def arguments_of(optimizer: Any) -> dict[str, object]:
    """What of Horovod's own arguments, of its optimizer or ours, has to be equal on all ranks."""
    ranks = optimizer.process_set.ranks
    return {
        "op": {hvd.Average: "Average", hvd.Sum: "Sum"}.get(optimizer.op, "Adasum"),
        "gradient_predivide_factor": float(optimizer.gradient_predivide_factor),
        "backward_passes_per_step": optimizer.backward_passes_per_step,
        "sparse_as_dense": bool(optimizer.sparse_as_dense),
        "process_set": "all" if ranks is None else list(ranks),
    }


def compare_with_ranks(
    coroutine: Synchronization[Any],
    process_set: Any,
    deadline_seconds: float | None = None,
    topology: Topology | None = None,
) -> Any:
    """Runs what ranks begin with, under one name whatever they go on with: see `compared`."""
    return carry_out_together(
        *(coroutine, process_set, "horovod_sparse.agreement"),
        deadline_seconds=deadline_seconds,
        meanwhile=construction_errors.looking(process_set),
        topology=topology,
    )


def refuse_whole_gradients(names: Sequence[str], process_set: Any) -> None:
    """After ranks have been waited for in vain: finds out whether one sends whole gradients, and ends that.

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


_ADVICE = "; give such parameters an optimizer of their own"


class HorovodEngine:
    """An `Engine` for the parameters of one optimizer."""

    name = "horovod_sparse.torch"
    start_token = staticmethod(present_start)

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        recipe: Recipe,
        deadline_seconds: float | None,
    ) -> None:
        self.optimizer, self._recipe = optimizer, recipe
        if optimizer._adopted:  # buckets have other names then, so ranks have to be of one kind
            self.name = "horovod.torch with a sparsifier"
        #: until facts were asked for first
        self._named: list[tuple[str, torch.Tensor]] | None = list(named_parameters)
        self.process_set, self._deadline_seconds = optimizer.process_set, deadline_seconds
        self.driver = HorovodDriver(self.process_set, deadline_seconds)

    def rank_and_size(self) -> tuple[int, int]:
        return int(self.process_set.rank()), int(self.process_set.size())

    def ranks(self) -> Placement:
        return Placement.of_horovod(hvd, self.process_set)

    def facts(self, known: Facts) -> Facts:
        """At first the model's parameters that are trained; then those that have joined, by their place."""
        groups, names = groups_of(self.optimizer), self.optimizer._parameter_names
        if self._named is not None:
            named = [(name, parameter) for name, parameter in self._named if parameter in groups]
            self._named = None
        else:
            have = {id(parameter) for _, parameter in known.values()}
            named = [
                (names.get(parameter, f"allreduce.noname.{i}.{j}"), parameter)
                for i, group in enumerate(self.optimizer.param_groups)
                for j, parameter in enumerate(group["params"])
                if id(parameter) not in have
            ]
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        return facts_of(trained, groups, self._recipe.rules, _ADVICE)

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Part]:
        """See `Engine`. Behind stock Horovod a bucket is one parameter, and has its name."""
        if self.optimizer._adopted:
            specs = [dataclasses.replace(spec, label=spec.names[0]) for spec in specs]
        return make_parts(specs, facts, place, topology, self.optimizer)

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None) -> Any:
        """See `Engine`; under one name whatever it is about, so that ranks which differ meet there."""
        seconds = self._deadline_seconds
        return compare_with_ranks(coroutine, self.process_set, deadline_seconds=seconds, topology=topology)

    def move_to(self, topology: Topology | None) -> None:
        self.driver.move_to(topology)

    def declared(self) -> Mapping[str, object]:
        return arguments_of(self.optimizer)

    def to_array(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy())


def where_of(process_set: Any, device: torch.device) -> ClusterFacts:
    """This rank's place, and what a profile says of the cluster."""
    words = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return ClusterFacts.of(process_set, "torch", hvd, words)


def most_of(parameters: Sequence[ParameterFacts]) -> tuple[torch.device, str]:
    """Where most elements are, and of which type: what is measured stands for all."""
    elements: dict[tuple[str, str], int] = {}
    for parameter in parameters:
        key = parameter.device, parameter.dtype
        elements[key] = elements.get(key, 0) + parameter.num_elements
    name, dtype = max(elements, key=lambda key: elements[key])
    return torch.device(name), dtype
