"""What communication and selection cost: shapes of time models, fitting them, and keeping the result."""

from horovod_sparse.cost.fitting import Fit, fit_selection, fit_time
from horovod_sparse.cost.model import COLLECTIVES, CostModel, communication_of, omgs_cost, starting_cost
from horovod_sparse.cost.profile import (
    DENSE,
    PROFILE_VERSION,
    Profile,
    assumed_profile,
    check_same_profile,
    network_of,
    profile_at,
)
from horovod_sparse.cost.times import AffineTime, AlphaBeta, CollectiveCost, SortingTime, TimeModel

__all__ = [
    "COLLECTIVES",
    "DENSE",
    "PROFILE_VERSION",
    "AffineTime",
    "AlphaBeta",
    "CollectiveCost",
    "CostModel",
    "Fit",
    "Profile",
    "SortingTime",
    "TimeModel",
    "assumed_profile",
    "check_same_profile",
    "communication_of",
    "fit_selection",
    "fit_time",
    "network_of",
    "omgs_cost",
    "profile_at",
    "starting_cost",
]
