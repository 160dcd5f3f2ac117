"""Error feedback and momentum correction; the bucket that holds all of it."""

from horovod_sparse.feedback.bucket import Bucket, Member, Progress
from horovod_sparse.feedback.feedbacks import (
    FEEDBACKS,
    AdamFeedback,
    BestFeedback,
    ErrorFeedback,
    Feedback,
    MomentumCorrection,
    NoFeedback,
    RMSpropFeedback,
    VelocityFeedback,
)
from horovod_sparse.feedback.recipe import ParameterRules, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.feedback.two_level_bucket import TwoLevelBucket, shard_of
