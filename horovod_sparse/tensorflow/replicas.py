"""What of a TensorFlow training has to be equal on all ranks: its variables, and those of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.frontend.drift import DriftCheck, HostEntry
from horovod_sparse.tensorflow._horovod import is_elastic
from horovod_sparse.tensorflow.bucketing import Bucketing
from horovod_sparse.tensorflow.calibration import carry_out_together
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.tensors import as_variable, is_comparable
from horovod_sparse.tensorflow.waiting import Watch


class Replicas:
    """Compares variables with those of the other ranks, within the graph of a step.

    Args:
        make_check: of variables that are synchronized together.
        bucketing: knows the variables' names.
        process_set: the ranks that take part.
        host: keeps what graphs call.
        watch: ends what waits for too long.
        step: how many synchronizations are done.
        noted: is told of an error on the host.
    """

    def __init__(
        self,
        make_check: Callable[[], DriftCheck],
        bucketing: Bucketing,
        process_set: Any,
        host: HostFunctions,
        watch: Watch,
        step: Callable[[], int],
        noted: Callable[[BaseException], None],
    ) -> None:
        self._make_check, self._bucketing, self._process_set = make_check, bucketing, process_set
        self._host, self._watch, self._step, self._noted = host, watch, step, noted
        #: by names of the variables that are synchronized together: others may be changed meanwhile
        self._checks: dict[frozenset[str], DriftCheck] = {}

    def check_of(self, variables: Sequence[Any]) -> DriftCheck | None:
        """Of these variables; None where there is none, or nobody to compare with."""
        known = map(self._bucketing.name_of, variables)
        names = frozenset(name for name in known if name is not None)
        check = self._checks.get(names)
        if check is None:
            check = self._make_check()
            check.restart(self._step())
            self._checks[names] = check
        alone = self._bucketing.place()[1] == 1 and not is_elastic()
        return None if alone or not check.every else check

    def restart(self) -> None:
        """All ranks go on alike, from the step that is theirs now."""
        for check in self._checks.values():
            check.restart(self._step())

    def compared(
        self, due: tf.Tensor, check: DriftCheck, variables: Sequence[Any], also_equal: Sequence[Any]
    ) -> tf.Tensor:
        """Compares variables with those of the other ranks where that is due, before they change again.

        They are read in the graph, which knows what was to be written to them before.

        Args:
            due: bool [].
            check: of these variables.
            variables: of the model.
            also_equal: the optimizer's.

        Returns:
            int32 [], ready when all ranks have compared.
        """
        every = {self._bucketing.name_of(one) or f"variable {i}": one for i, one in enumerate(variables)}
        every |= {f"variable {i} of the optimizer": one for i, one in enumerate(also_equal)}
        named = {name: variable for name, one in every.items() if is_comparable(variable := as_variable(one))}

        def compare(*arrays: np.ndarray) -> np.ndarray:
            pairs = zip(named.items(), arrays, strict=True)
            entries = [HostEntry(name, array, variable.assign) for (name, variable), array in pairs]
            check_them = check.run(self._step() - 1, self._bucketing.place()[0], entries)
            name = f"{self._bucketing.label}.drift"
            try:
                with self._watch.together(name), tf.init_scope(), tf.device("/cpu:0"):
                    carry_out_together(check_them, self._process_set, name)
            except Exception as error:
                self._noted(error)
                raise
            return np.zeros((), np.int32)

        def checked() -> tf.Tensor:
            with tf.device(HOST):
                values = [variable.read_value() for variable in named.values()]
                done = self._host.run(compare, values, [tf.int32])[0]
            done.set_shape([])
            return done

        return tf.cond(due, checked, lambda: tf.zeros([], tf.int32))
