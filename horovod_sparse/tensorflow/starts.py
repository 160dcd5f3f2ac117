"""After every start of Horovod: all ranks say where they stand, and go on alike.

Whoever comes first to a bucket after a start does so for all buckets of a synchronizer: a rank that traces a
function for the first time before its buckets are in the graph, so that they may still become those of the
others; any other rank in the first host function of its next step. Both wait for each other: what is traced
needs no collective otherwise in elastic training, where the others may have been traced long ago.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from horovod_sparse.feedback.state import shared_digest
from horovod_sparse.frontend.agreement import Standing, agreed_start
from horovod_sparse.tensorflow._horovod import present_start
from horovod_sparse.tensorflow.buckets import Buckets
from horovod_sparse.tensorflow.calibration import carry_out_together
from horovod_sparse.tensorflow.replanning import Replanning
from horovod_sparse.tensorflow.steps import Steps

__all__ = ["Starts"]

_log = logging.getLogger("horovod_sparse")


class Starts:
    """What a synchronizer does when Horovod has been started.

    Args:
        buckets: of the synchronizer.
        steps: of the synchronizer: their number is that of the training.
        replanning: of the synchronizer.
        settings: what has to be equal on all ranks, in words, by argument.
        process_set: the ranks.
    """

    def __init__(
        self,
        buckets: Buckets,
        steps: Steps,
        replanning: Replanning,
        settings: Mapping[str, str],
        process_set: Any,
    ) -> None:
        self._buckets, self._steps, self._replanning = buckets, steps, replanning
        self._settings, self._process_set = settings, process_set
        self._agreed: object = None
        self._lock = threading.Lock()
        #: called when buckets have become others
        self.on_replanned: Callable[[], None] = lambda: None

    def agree(self) -> None:
        """Exchanges where all ranks stand, unless that has been done since Horovod's start. A collective.

        Raises:
            StateMismatchError: on every rank alike: they do not train the same.
        """
        if self._agreed is present_start():
            return
        with self._lock:  # several buckets may come at the same time
            if self._agreed is present_start():
                return
            for part in self._buckets.parts:
                part.close()
            # a graph that is being traced, or none in a host function's thread
            with tf.init_scope(), tf.device("/cpu:0"):
                start = carry_out_together(
                    agreed_start(self._standing()), self._process_set, f"{self._buckets.label}.start"
                )
            if start.anew:
                self._start_anew(start.step, start.plan, start.reason)
            self._agreed = present_start()

    def _standing(self) -> Standing:
        sparse = self._buckets.sparse
        return Standing(
            self._steps.number,
            shared_digest({part.names[0]: part.bucket.state for part in sparse}),
            sparse[0].made_for if sparse else self._buckets.place(),
            self._buckets.plan,
            self._buckets.parameters,
            self._settings,
        )

    def _start_anew(self, step: int, plan: Any, reason: str) -> None:
        if plan != self._buckets.plan:
            self._buckets.replan(plan)
            self.on_replanned()
        for part in self._buckets.parts:
            part.start_anew(step)
        if self._steps.number != step:
            self._steps.number = step
        self._replanning.stop()
        _log.info("Horovod has started: sparsifiers start anew at step %d, since %s", step, reason)
