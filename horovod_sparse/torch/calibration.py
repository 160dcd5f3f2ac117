"""Measuring the first steps of a PyTorch training over Horovod."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from horovod_sparse.planning.request import Decision
from horovod_sparse.planning.warmup import Decide
from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.tensors.measuring import Stamped, bucket_memory
from horovod_sparse.topology import Topology
from horovod_sparse.torch.driver import carry_out_together
from horovod_sparse.torch.horovod_engine import most_of, where_of


class HorovodMeasuring(Stamped):
    """Measures by PyTorch's stamps, and decides over Horovod; implements `planning.warmup.Measuring`."""

    def __init__(self, parameters: Sequence[ParameterFacts], process_set: Any) -> None:
        super().__init__(parameters)
        self._process_set = process_set

    @property
    def rank(self) -> int:
        return int(self._process_set.rank())

    def decided(
        self, parameters: Sequence[ParameterFacts], topology: Topology | None, decide: Decide
    ) -> Decision:
        device, dtype = most_of(parameters)
        cluster = dataclasses.replace(where_of(self._process_set, device), topology=topology)
        starts, name = [0.0], "horovod_sparse.planning"
        coroutine = decide(
            cluster, memory=bucket_memory(device), dtype=dtype, starting_seconds=lambda: starts[-1]
        )
        with torch.no_grad():
            decision: Decision = carry_out_together(
                coroutine, self._process_set, name, starts.append, topology=topology
            )
        return decision
