"""P ranks in one process: the same coroutines, counted."""

from horovod_sparse.simulation.cluster import SimulatedCluster as SimulatedCluster
from horovod_sparse.simulation.lockstep import Recorder as Recorder
from horovod_sparse.simulation.lockstep import run_lockstep as run_lockstep
