"""Error feedback and momentum correction; the bucket that holds all of it."""

from horovod_sparse.feedback.bucket import Bucket as Bucket
from horovod_sparse.feedback.bucket import Member as Member
from horovod_sparse.feedback.bucket import Progress as Progress
from horovod_sparse.feedback.feedbacks import FEEDBACKS as FEEDBACKS
from horovod_sparse.feedback.feedbacks import AdamFeedback as AdamFeedback
from horovod_sparse.feedback.feedbacks import BestFeedback as BestFeedback
from horovod_sparse.feedback.feedbacks import ErrorFeedback as ErrorFeedback
from horovod_sparse.feedback.feedbacks import Feedback as Feedback
from horovod_sparse.feedback.feedbacks import MomentumCorrection as MomentumCorrection
from horovod_sparse.feedback.feedbacks import NoFeedback as NoFeedback
from horovod_sparse.feedback.feedbacks import RMSpropFeedback as RMSpropFeedback
from horovod_sparse.feedback.feedbacks import VelocityFeedback as VelocityFeedback
from horovod_sparse.feedback.recipe import ParameterRules as ParameterRules
from horovod_sparse.feedback.recipe import Recipe as Recipe
from horovod_sparse.feedback.recipe import parse_recipe as parse_recipe
from horovod_sparse.feedback.recipe import recipe as recipe
from horovod_sparse.feedback.recipe import recipe_signature as recipe_signature
from horovod_sparse.feedback.two_level_bucket import TwoLevelBucket as TwoLevelBucket
from horovod_sparse.feedback.two_level_bucket import shard_of as shard_of
