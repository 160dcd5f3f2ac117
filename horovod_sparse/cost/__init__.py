"""What communication and selection cost: shapes of time models, fitting them, and keeping the result."""

from horovod_sparse.cost.assumed import assumed_cost
from horovod_sparse.cost.fitting import Fit, fit_selection, fit_time
from horovod_sparse.cost.formulas import (
    HOST_NETWORK,
    LevelChoice,
    assumed_profile,
    choose_levels,
    network_at,
    network_of,
    profile_at,
    with_levels,
)
from horovod_sparse.cost.model import COLLECTIVES, CostModel, communication_of, omgs_cost, starting_cost
from horovod_sparse.cost.profile import (
    ALLREDUCE,
    DENSE,
    PROFILE_VERSION,
    START,
    UPDATE,
    Levels,
    Profile,
    check_same_profile,
)
from horovod_sparse.cost.times import AffineTime, AlphaBeta, CollectiveCost, SortingTime, TimeModel

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
    "SortingTime",
    "TimeModel",
    "assumed_cost",
    "assumed_profile",
    "check_same_profile",
    "choose_levels",
    "communication_of",
    "fit_selection",
    "fit_time",
    "network_at",
    "network_of",
    "omgs_cost",
    "profile_at",
    "starting_cost",
    "with_levels",
]
