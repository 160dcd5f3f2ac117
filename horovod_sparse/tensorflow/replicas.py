"""What of a TensorFlow training has to be equal on all ranks: its variables, and those of its optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_sparse.tensorflow._horovod import is_elastic
from horovod_sparse.tensorflow.agreement import carry_out_together
from horovod_sparse.tensorflow.graph import HOST, HostFunctions
from horovod_sparse.tensorflow.tensors import as_variable, is_comparable
from horovod_sparse.tensorflow.training import VariablesTraining
from horovod_sparse.tensorflow.waiting import Watch
from horovod_sparse.training.drift import DriftCheck, HostEntry


class Replicas:
    """Compares variables with those of the other ranks, within the graph of a step."""

    def __init__(self, training: VariablesTraining, host: HostFunctions, watch: Watch) -> None:
        self._training, self._host, self._watch = training, host, watch
        #: by names of the variables that are synchronized together: others may be changed meanwhile
        self._checks: dict[frozenset[str], DriftCheck] = {}

    def check_of(self, variables: Sequence[Any]) -> DriftCheck | None:
        """Of these variables; None where there is none, or nobody to compare with."""
        known = map(self._training.name_of, variables)
        names = frozenset(name for name in known if name is not None)
        check = self._checks.get(names)
        if check is None:
            check = DriftCheck(self._training.settings, self._training.telemetry)
            check.restart(self._training.step)
            self._checks[names] = check
        alone = self._training.size == 1 and not is_elastic()
        return None if alone or not check.every else check

    def restart(self) -> None:
        """All ranks go on alike, from the step that is theirs now."""
        for check in self._checks.values():
            check.restart(self._training.step)

    def compared(
        self, due: tf.Tensor, check: DriftCheck, variables: Sequence[Any], also_equal: Sequence[Any]
    ) -> tf.Tensor:
        """Compares variables with those of the other ranks where that is due, before they change again.

        They are read in the graph, which knows what was to be written to them before.
        """
        every = {self._training.name_of(one) or f"variable {i}": one for i, one in enumerate(variables)}
        every |= {f"variable {i} of the optimizer": one for i, one in enumerate(also_equal)}
        named = {name: variable for name, one in every.items() if is_comparable(variable := as_variable(one))}

        def compare(*arrays: np.ndarray) -> np.ndarray:
            pairs = zip(named.items(), arrays, strict=True)
            entries = [HostEntry(name, array, variable.assign) for (name, variable), array in pairs]
            check_them = check.run(self._training.step - 1, self._training.rank, entries)
            name = f"{self._training.engine.label}.drift"
            try:
                with self._watch.together(name):
                    carry_out_together(check_them, self._training.process_set, name)
            except Exception as error:
                self._training.last_error = error
                raise
            return np.zeros((), np.int32)

        def checked() -> tf.Tensor:
            with tf.device(HOST):
                values = [variable.read_value() for variable in named.values()]
                done = self._host.run(compare, values, [tf.int32])[0]
            done.set_shape([])
            return done

        return tf.cond(due, checked, lambda: tf.zeros([], tf.int32))
