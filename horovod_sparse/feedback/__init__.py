"""Feedbacks, optimizers' rules and recipes; the bucket that joins them with a sparsifier."""

from horovod_sparse.feedback.adam import AdamFeedback, RMSpropFeedback
from horovod_sparse.feedback.bucket import Bucket, Progress
from horovod_sparse.feedback.feedbacks import (
    BestFeedback,
    ErrorFeedback,
    Feedback,
    MomentumCorrection,
    NoFeedback,
)
from horovod_sparse.feedback.muon import MuonFeedback
from horovod_sparse.feedback.recipe import ParameterRules, Recipe, parse_recipe, recipe, recipe_signature
from horovod_sparse.feedback.rules import FEEDBACKS, RULES, kind_of, recipe_for
from horovod_sparse.feedback.sgd import VelocityFeedback
