"""What communication and selection cost: shapes of time models, fitting them, and keeping the result."""

from horovod_sparse.planning.cost_model import AffineTime as AffineTime
from horovod_sparse.planning.cost_model import CostModel as CostModel
from horovod_sparse.planning.cost_model import Fit as Fit
from horovod_sparse.planning.cost_model import TimeModel as TimeModel
from horovod_sparse.planning.cost_model import communication_of as communication_of
from horovod_sparse.planning.cost_model import fit_time as fit_time
from horovod_sparse.planning.profile import DENSE as DENSE
from horovod_sparse.planning.profile import PROFILE_VERSION as PROFILE_VERSION
from horovod_sparse.planning.profile import Levels as Levels
from horovod_sparse.planning.profile import Profile as Profile
from horovod_sparse.plans.dense import bytes_by_round as bytes_by_round
from horovod_sparse.plans.network import COLLECTIVES as COLLECTIVES
from horovod_sparse.plans.network import AlphaBeta as AlphaBeta
from horovod_sparse.plans.network import CollectiveCost as CollectiveCost
from horovod_sparse.plans.network import num_rounds as num_rounds
from horovod_sparse.plans.network import share_of_bytes as share_of_bytes
