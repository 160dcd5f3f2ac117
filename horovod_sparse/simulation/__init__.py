"""P ranks in one process: the same coroutines, counted."""

from horovod_sparse.simulation.cluster import BucketTraffic as BucketTraffic
from horovod_sparse.simulation.cluster import SimulatedCluster as SimulatedCluster
from horovod_sparse.simulation.cluster import bucket_traffic as bucket_traffic
from horovod_sparse.simulation.lockstep import Recorder as Recorder
from horovod_sparse.simulation.lockstep import run_lockstep as run_lockstep
