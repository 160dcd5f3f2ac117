"""Public names of plans: which parameters are synchronized together, which stay dense, at what cost."""

from horovod_sparse.planning.model import CostModel as CostModel
from horovod_sparse.planning.model import Timeline as Timeline
from horovod_sparse.planning.model import Workload as Workload
from horovod_sparse.planning.model import bytes_by_round as bytes_by_round
from horovod_sparse.planning.model import predict as predict
from horovod_sparse.planning.profile import Profile as Profile
from horovod_sparse.planning.request import min_elements as min_elements
from horovod_sparse.planning.strategies import fixed as fixed
from horovod_sparse.plans import ParameterFacts as ParameterFacts
from horovod_sparse.plans import Plan as Plan
