"""Plans: which parameters are synchronized together, and which stay dense."""

from horovod_sparse.merging.density import DensityChoice, densest_plan
from horovod_sparse.merging.fixed import (
    DEFAULT_BUCKET_BYTES,
    Fixed,
    Kept,
    Strategy,
    explicit_groups,
    fixed,
    fixed_bytes,
    fixed_elements,
    layerwise,
    num_buckets,
    single,
)
from horovod_sparse.merging.greedy import omgs
from horovod_sparse.merging.named import STRATEGIES, needs_times, strategy_named
from horovod_sparse.merging.optimal import optimal
from horovod_sparse.merging.plan import ParameterFacts, Plan, same_kind
from horovod_sparse.merging.selection import (
    Choice,
    MinElements,
    TensorSelection,
    dense_of,
    joint,
    leave_losing_buckets,
    min_elements,
    select_tensors,
)
from horovod_sparse.merging.timeline import UPDATE, Span, Timeline, predict
from horovod_sparse.merging.workload import (
    DEVICES,
    LAYER_TABLES,
    LayerTable,
    StepTime,
    Workload,
    layer_table,
    plan_of_segments,
)

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEVICES",
    "LAYER_TABLES",
    "STRATEGIES",
    "UPDATE",
    "Choice",
    "DensityChoice",
    "Fixed",
    "Kept",
    "LayerTable",
    "MinElements",
    "ParameterFacts",
    "Plan",
    "Span",
    "StepTime",
    "Strategy",
    "TensorSelection",
    "Timeline",
    "Workload",
    "dense_of",
    "densest_plan",
    "explicit_groups",
    "fixed",
    "fixed_bytes",
    "fixed_elements",
    "joint",
    "layer_table",
    "layerwise",
    "leave_losing_buckets",
    "min_elements",
    "needs_times",
    "num_buckets",
    "omgs",
    "optimal",
    "plan_of_segments",
    "predict",
    "same_kind",
    "select_tensors",
    "single",
    "strategy_named",
]
