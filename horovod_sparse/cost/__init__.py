"""What communication and selection cost."""

from horovod_sparse.cost.alpha_beta import AlphaBeta, CollectiveCost

__all__ = ["AlphaBeta", "CollectiveCost"]
