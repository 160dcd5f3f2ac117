"""Plans: which parameters are synchronized together, and which stay dense."""

from horovod_sparse.merging.fixed import DEFAULT_BUCKET_BYTES, explicit_groups, fixed_bytes, num_buckets
from horovod_sparse.merging.plan import ParameterFacts, Plan, same_kind

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "ParameterFacts",
    "Plan",
    "explicit_groups",
    "fixed_bytes",
    "num_buckets",
    "same_kind",
]
