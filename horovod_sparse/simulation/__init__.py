"""Simulates P ranks in one process, and counts their messages."""

from horovod_sparse.simulation.cluster import SimulatedCluster as SimulatedCluster
from horovod_sparse.simulation.lockstep import CollectiveCost as CollectiveCost
from horovod_sparse.simulation.lockstep import Recorder as Recorder
from horovod_sparse.simulation.lockstep import num_rounds as num_rounds
from horovod_sparse.simulation.lockstep import run_lockstep as run_lockstep
from horovod_sparse.simulation.lockstep import share_of_bytes as share_of_bytes
