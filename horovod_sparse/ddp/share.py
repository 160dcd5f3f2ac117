"""`network_share` with DistributedDataParallel: measured by its buckets, decided over its hook's group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horovod_sparse.ddp.distributed_engine import DistributedEngine
from horovod_sparse.planning import plan_request
from horovod_sparse.planning.request import Decision
from horovod_sparse.planning.share import Following
from horovod_sparse.planning.warmup import Decide
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.plans.plan import ParameterFacts
from horovod_sparse.tensors.adoption import SGDWithoutMomentum
from horovod_sparse.tensors.measuring import Stamped, bucket_memory
from horovod_sparse.topology import Topology
from horovod_sparse.training.training import Training


class Sharing(Stamped):
    """Measures and decides beside a hook; implements `planning.warmup.Measuring`."""

    def __init__(self, training: Training, engine: DistributedEngine) -> None:
        self._engine = engine
        recipe, settings = training.recipe, training.settings
        told: Any = {"recipe": recipe, "has_momentum": isinstance(engine.optimizer, SGDWithoutMomentum)}
        share = settings.network_share
        request, _ = plan_request(plan=settings.plan, density=recipe.auto, network_share=share, **told)
        self._training, parameters = training, training.parameters
        super().__init__(parameters)
        self._names = {parameter: name for name, (_, parameter) in training.facts.items()}
        self.following = Following(request, parameters, recipe.sparsifier, self, lambda: training.topology)

    @property
    def rank(self) -> int:
        return self._training.rank

    def decided(
        self, parameters: Sequence[ParameterFacts], topology: Topology | None, decide: Decide
    ) -> Decision:
        device, place = torch.device(parameters[0].device), self._training.rank_and_size
        cluster = ClusterFacts(*place, "torch", self._engine.backend, 0.0, str(device), topology=topology)
        coroutine = decide(cluster, memory=bucket_memory(device), dtype=parameters[0].dtype)
        decision: Decision = self._engine.carry_out(coroutine, topology)
        return decision

    def arrived(self, parameters: Iterable[torch.Tensor], entered: Any) -> None:
        """A bucket's gradients have come, and what they set off is done."""
        if self.following.recording:
            left = self.now()
            for parameter in parameters:
                self.following.arrived(self._names[parameter], entered, left)
                entered = left
