"""Measures the times that plans need, before a training: a graph's buckets are fixed once it is traced."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from horovod_sparse.checks import check_count
from horovod_sparse.collectives import Synchronization
from horovod_sparse.errors import ArgumentError
from horovod_sparse.tensorflow._horovod import hvd
from horovod_sparse.tensorflow.collectives import carry_out_together, construction_errors
from horovod_sparse.tensorflow.compression import SparseCompressor
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.tensors import as_variable, unique_names
from horovod_sparse.tensorflow.training import facts_of, is_sparsifiable
from horovod_sparse.topology import ClusterFacts
from horovod_sparse.training.agreement import common_names

if TYPE_CHECKING:
    from horovod_sparse.planning.profile import Profile


@construction_errors.publishing_errors
def measured_profile(
    loss: Callable[[], tf.Tensor],
    variables: Sequence[Any],
    compression: SparseCompressor,
    process_set: Any = hvd.global_process_set,
    *,
    num_steps: int = 5,
) -> Profile:
    """Measures a profile for ``merging="omgs"``, "optimal" and ``tensor_selection="cost"``, on all ranks.

    Nothing is trained, but what `loss` itself changes (statistics of batches). The cluster takes about two
    seconds.

    Args:
        loss: computes the loss of a batch; it is traced, and runs in `num_steps` + 1 steps.
        variables: the trained ones.
        compression: the sparsifier whose times are measured.
        process_set: the ranks that train.
        num_steps: steps whose backward pass is measured.

    Returns:
        A profile for ``profile=``, equal on all ranks; its `save` writes it for the next run.
    """
    from horovod_sparse.planning.backward import BackwardRecorder, with_times
    from horovod_sparse.planning.calibration import QUICK, calibration  # most trainings need none of it

    check_count("num_steps", num_steps)
    if not isinstance(compression, SparseCompressor):
        raise ArgumentError("compression", compression, "a sparsifier: Compression.topk(density=0.01)")
    own, host, found = [as_variable(one) for one in variables], HostFunctions(), dict[str, Any]()

    def stamp_of(name: str) -> Callable[[np.ndarray], list[int]]:
        def note_arrival(_gradient: np.ndarray) -> list[int]:
            recorder.arrived(name, time.perf_counter())
            return [0]

        return note_arrival

    @tf.function(autograph=False)
    def run_backward() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss()
        pairs = zip(tape.gradient(value, own), own, strict=True)
        if not (sent := [pair for pair in pairs if is_sparsifiable(*pair)]):
            raise ArgumentError("variables", variables, "variables of which loss() has dense gradients")
        gradients, chosen = zip(*sent, strict=True)
        found.update(zip(unique_names(chosen), chosen, strict=True))
        with tf.device(HOST):
            given = zip(found, gradients, strict=True)
            return [host.add_to_graph(stamp_of(name), [gradient], [tf.int64])[0] for name, gradient in given]

    run_backward.get_concrete_function()
    recorder = BackwardRecorder(list(found), 1, lambda start, stop: stop - start)
    for _ in range(1 + num_steps):
        recorder.begin(time.perf_counter())
        run_backward()
        recorder.end()
    facts = facts_of(list(found), list(found.values()), compression.recipe.rules)

    def measured_on_all() -> Synchronization[Profile]:
        parameters = [fact for fact, _ in facts.values()]
        _, names = yield from common_names("", parameters)
        where = ClusterFacts.of(process_set, "tensorflow", hvd)
        dtype = max(parameters, key=lambda fact: fact.num_elements).dtype
        given = [compression.recipe.sparsifier]
        profile = yield from calibration(where, given, extent=QUICK, dtype=dtype)
        times = recorder.times()
        if times is not None:
            backward = {names[name]: seconds for name, seconds in times.backward_seconds.items()}
            times = dataclasses.replace(times, backward_seconds=backward)
        return (yield from with_times(profile, times))

    name = "horovod_sparse.planning"
    profile: Profile = carry_out_together(measured_on_all(), process_set, name, looks=True)
    return profile
