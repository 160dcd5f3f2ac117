"""Error feedback, plain and filtered, and momentum correction; the bucket that holds all of it."""

from horovod_sparse.feedback.base import ErrorFeedback, Feedback, NoFeedback
from horovod_sparse.feedback.bucket import Bucket, BucketStep, Member
from horovod_sparse.feedback.lowpass import LowPass
from horovod_sparse.feedback.momentum import MomentumCorrection
from horovod_sparse.feedback.named import FEEDBACKS
from horovod_sparse.feedback.progress import Progress, progress_of, resumed
from horovod_sparse.feedback.recipe import Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.feedback.rules import ParameterRules

__all__ = [
    "FEEDBACKS",
    "Bucket",
    "BucketStep",
    "ErrorFeedback",
    "Feedback",
    "LowPass",
    "Member",
    "MomentumCorrection",
    "NoFeedback",
    "ParameterRules",
    "Progress",
    "Recipe",
    "parse_recipe",
    "progress_of",
    "recipe",
    "recipe_signature",
    "resumed",
]
