"""Error feedback and momentum correction; the bucket that holds all of it."""

from horovod_sparse.feedback.auto_density import AutoDensity
from horovod_sparse.feedback.bucket import Bucket, Progress, resumed
from horovod_sparse.feedback.feedbacks import (
    FEEDBACKS,
    ErrorFeedback,
    Feedback,
    MomentumCorrection,
    NoFeedback,
)
from horovod_sparse.feedback.levels import HostBucket, shard_of
from horovod_sparse.feedback.recipe import ParameterRules, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.feedback.report import BucketStep, Member

__all__ = [
    "FEEDBACKS",
    "AutoDensity",
    "Bucket",
    "BucketStep",
    "ErrorFeedback",
    "Feedback",
    "HostBucket",
    "Member",
    "MomentumCorrection",
    "NoFeedback",
    "ParameterRules",
    "Progress",
    "Recipe",
    "parse_recipe",
    "recipe",
    "recipe_signature",
    "resumed",
    "shard_of",
]
