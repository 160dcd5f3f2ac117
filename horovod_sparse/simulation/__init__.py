"""P ranks in one process: the same coroutines, counted."""

from horovod_sparse.simulation.cluster import BucketTraffic, SimulatedCluster, bucket_traffic
from horovod_sparse.simulation.lockstep import Recorder, run_lockstep

__all__ = ["BucketTraffic", "Recorder", "SimulatedCluster", "bucket_traffic", "run_lockstep"]
