"""Gradients that are not finite and errors of one rank, by tapes and in graphs: all ranks learn of them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import horovod_sparse.tensorflow as hvd
from horovod_sparse.errors import NonFiniteGradientError

pytestmark = pytest.mark.tensorflow


def test_the_error_keeps_its_name_its_text_and_its_type(rank, size):
    variable = tf.Variable(tf.zeros([4]), name="layer/kernel")
    compression = hvd.Compression.topk(density=0.5)
    synchronizer = compression.bind(process_set=hvd.global_process_set)
    sick = tf.constant([0.0, np.inf, 0.0, 0.0]) if rank == 0 else tf.zeros([4])
    text = r"rank 0: layer/kernel"
    with pytest.raises(NonFiniteGradientError, match=text):
        synchronizer.synchronize([sick], [variable])
    in_graph = tf.function(lambda gradient: synchronizer.synchronize([gradient], [variable]))
    with pytest.raises(tf.errors.OpError, match=f"NonFiniteGradientError.*{text}"):
        in_graph(sick)
    assert isinstance(synchronizer.last_error, NonFiniteGradientError)
    in_graph(tf.ones([4]))
    assert synchronizer.last_error is None


@pytest.mark.controllers
def test_an_error_on_one_rank_alone_reaches_all_and_hangs_none(rank, size, monkeypatch):
    variable = tf.Variable(tf.zeros([40]))
    compression = hvd.Compression.exdyna(density=0.2)
    synchronizer = compression.bind(process_set=hvd.global_process_set)
    synchronizer.synchronize([tf.ones([40])], [variable])
    bucket = synchronizer.sparse[0].bucket
    if rank == 0:
        monkeypatch.setattr(bucket.accumulator, "at_least", None)  # not callable: TypeError in round 0
    with pytest.raises(Exception) as caught:  # ranks see different ends of it
        synchronizer.synchronize([tf.ones([40])], [variable])
    assert (type(caught.value) is TypeError) == (rank == 0)
    monkeypatch.undo()
    total = synchronizer.synchronize([tf.ones([40])], [variable])[0]
    assert np.isfinite(total.numpy()).all()
