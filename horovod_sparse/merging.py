"""Plans: which parameters are synchronized together, and which stay dense."""

from horovod_sparse.planning.optimal import optimal
from horovod_sparse.planning.request import STRATEGIES, needs_times, strategy_named
from horovod_sparse.planning.selection import (
    Choice,
    DensityChoice,
    MinElements,
    TensorSelection,
    dense_of,
    densest_plan,
    joint,
    min_elements,
    select_tensors,
)
from horovod_sparse.planning.strategies import Fixed, Kept, Strategy, fixed, layerwise, omgs, single
from horovod_sparse.planning.timeline import UPDATE, Span, Timeline, predict
from horovod_sparse.planning.workload import (
    DEVICES,
    LAYER_TABLES,
    LayerTable,
    StepTime,
    Workload,
    layer_table,
    plan_of_segments,
)
from horovod_sparse.plans.plan import (
    DEFAULT_BUCKET_BYTES,
    ParameterFacts,
    Plan,
    explicit_groups,
    fixed_bytes,
    fixed_elements,
    num_buckets,
    same_kind,
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
