"""What TensorFlow over Horovod gives to a training: parts of variables, and messages between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_sparse.collectives import Synchronization
from horovod_sparse.feedback import Recipe
from horovod_sparse.tensorflow._horovod import hvd, is_elastic, present_start
from horovod_sparse.tensorflow.agreement import carry_out_together, ranks_of
from horovod_sparse.tensorflow.parts import DenseVariable, Part, SparseBucket
from horovod_sparse.topology import Topology
from horovod_sparse.training.engine import Facts, PartSpec
from horovod_sparse.training.host_topology import Ranks


class VariablesEngine:
    """An `Engine` for the variables of one tape or optimizer."""

    start_token = staticmethod(present_start)

    def __init__(self, process_set: Any, levels: str, **arguments: object) -> None:
        self.name, self.process_set, self._levels = "horovod_sparse.tensorflow", process_set, levels
        #: that change what is applied; and those of the tape or optimizer, which may say more of the same
        self._arguments: Mapping[str, object] = arguments
        self.given: Mapping[str, object] = {}
        #: of collectives, known with the first gradients; part i communicates as ``{label}.{i}``
        self.label, self._num_parts = "", 0
        self._topology: Topology | None = None

    def rank_and_size(self) -> tuple[int, int]:
        return int(self.process_set.rank()), int(self.process_set.size())

    def ranks(self) -> Ranks:
        return Ranks.of_horovod(hvd, self.process_set)

    def facts(self, known: Facts) -> Facts:
        """None: variables come with their first gradients."""
        return {}

    def make_parts(
        self, specs: Sequence[PartSpec], facts: Facts, place: tuple[int, int], topology: Topology | None
    ) -> list[Part]:
        """Parts that go on at any place: a graph refers to them as long as their plan is the same."""
        parts: list[Part] = []
        for spec in specs:
            if spec.recipe is not None and not spec.dense:
                parts.append(self._bucket(spec.label, spec.names, facts, spec.recipe))
                continue
            for name in spec.names:
                fact, variable = facts[name]
                if spec.recipe is not None:
                    parts.append(self._bucket(f"dense.{name}", [name], facts, spec.recipe, dense=True))
                else:
                    shape, collective = tuple(variable.shape), self._collective()
                    parts.append(DenseVariable(name, collective, shape, fact.dtype, self.rank_and_size))
        return parts

    def _bucket(
        self, label: str, names: Sequence[str], facts: Facts, recipe: Recipe, *, dense: bool = False
    ) -> SparseBucket:
        shapes, dtype = [tuple(facts[name][1].shape) for name in names], facts[names[0]][0].dtype
        own = label, self._collective(), names, shapes, dtype, recipe, self.rank_and_size
        return SparseBucket(*own, dense=dense, hosts=lambda: self.hosts)

    def _collective(self) -> str:
        """A name that no part has had before: another plan's requests are of other kinds."""
        self._num_parts += 1
        return f"{self.label}.{self._num_parts - 1}"

    @property
    def hosts(self) -> Topology | None:
        """As parts are made for it: in elastic training graphs are traced once, with two levels or one."""
        if self._topology is None and self._levels != "flat" and is_elastic():
            return Topology.regular(self.rank_and_size()[1], 1)
        return self._topology

    def move_to(self, topology: Topology | None) -> None:
        self._topology = topology

    def carry_out(self, coroutine: Synchronization[Any], topology: Topology | None) -> Any:
        return carry_out_together(coroutine, self.process_set, f"{self.label}.start", topology, looks=True)

    def to_array(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def declared(self) -> dict[str, object]:
        return {"process_set": ranks_of(self.process_set), **self._arguments, **self.given}
