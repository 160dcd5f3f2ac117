"""Error feedback and momentum correction; the bucket that holds all of it."""

from horovod_sparse.feedback.auto_density import AutoDensity
from horovod_sparse.feedback.bucket import Bucket, Progress, resumed
from horovod_sparse.feedback.feedbacks import (
    FEEDBACKS,
    AdamFeedback,
    BestFeedback,
    ErrorFeedback,
    Feedback,
    MomentumCorrection,
    NoFeedback,
    RMSpropFeedback,
)
from horovod_sparse.feedback.recipe import ParameterRules, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.feedback.state import BucketStep, Member
from horovod_sparse.feedback.two_level_bucket import TwoLevelBucket, shard_of

__all__ = [
    "FEEDBACKS",
    "AdamFeedback",
    "AutoDensity",
    "BestFeedback",
    "Bucket",
    "BucketStep",
    "ErrorFeedback",
    "Feedback",
    "Member",
    "MomentumCorrection",
    "NoFeedback",
    "ParameterRules",
    "Progress",
    "RMSpropFeedback",
    "Recipe",
    "TwoLevelBucket",
    "parse_recipe",
    "recipe",
    "recipe_signature",
    "resumed",
    "shard_of",
]
