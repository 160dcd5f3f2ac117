"""P ranks in one process: the same coroutines, counted."""

from horovod_sparse.simulation.cluster import SimulatedCluster
from horovod_sparse.simulation.lockstep import Recorder, run_lockstep
from horovod_sparse.simulation.scaling import (
    ScalePoint,
    SimulatedCost,
    SimulatedTraffic,
    break_even,
    crossings,
    scale_point,
    scaling_curve,
    simulate_traffic,
    simulated_cost,
)
from horovod_sparse.simulation.traffic import BucketTraffic, bucket_traffic

__all__ = [
    "BucketTraffic",
    "Recorder",
    "ScalePoint",
    "SimulatedCluster",
    "SimulatedCost",
    "SimulatedTraffic",
    "break_even",
    "bucket_traffic",
    "crossings",
    "run_lockstep",
    "scale_point",
    "scaling_curve",
    "simulate_traffic",
    "simulated_cost",
]
