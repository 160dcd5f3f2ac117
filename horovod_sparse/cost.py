"""What communication and selection cost: shapes of time models, fitting them, and keeping the result."""

from horovod_sparse.planning.cost_model import (
    AffineTime,
    CostModel,
    Fit,
    TimeModel,
    communication_of,
    fit_selection,
    fit_time,
)
from horovod_sparse.planning.formulas import (
    LevelChoice,
    assumed_profile,
    choose_levels,
    network_of,
    profile_at,
    with_levels,
)
from horovod_sparse.planning.profile import (
    ALLREDUCE,
    DENSE,
    PROFILE_VERSION,
    START,
    UPDATE,
    Levels,
    Profile,
)
from horovod_sparse.plans.network import COLLECTIVES, HOST_NETWORK, AlphaBeta, CollectiveCost, network_at
from horovod_sparse.training.first_plan import check_same_profile

__all__ = [
    "ALLREDUCE",
    "COLLECTIVES",
    "DENSE",
    "HOST_NETWORK",
    "PROFILE_VERSION",
    "START",
    "UPDATE",
    "AffineTime",
    "AlphaBeta",
    "CollectiveCost",
    "CostModel",
    "Fit",
    "LevelChoice",
    "Levels",
    "Profile",
    "TimeModel",
    "assumed_profile",
    "check_same_profile",
    "choose_levels",
    "communication_of",
    "fit_selection",
    "fit_time",
    "network_at",
    "network_of",
    "profile_at",
    "with_levels",
]
