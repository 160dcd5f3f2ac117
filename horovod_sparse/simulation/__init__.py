"""P ranks in one process: the same coroutines, counted."""

from horovod_sparse.simulation.cluster import SimulatedCluster
from horovod_sparse.simulation.lockstep import run_lockstep
from horovod_sparse.simulation.recorder import Recorder

__all__ = ["Recorder", "SimulatedCluster", "run_lockstep"]
