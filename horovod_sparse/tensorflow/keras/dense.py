"""Dense reduction under Keras 3, by Horovod's own allreduce: there, Horovod's optimizer does none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_sparse.tensorflow._horovod import hvd, is_elastic
from horovod_sparse.tensorflow.collectives import known_to_elastic, not_folded
from horovod_sparse.tensorflow.driver import refuse_graphs
from horovod_sparse.tensorflow.eager import EagerCalls
from horovod_sparse.tensorflow.planning import label_of
from horovod_sparse.tensorflow.tensors import as_variable

__all__ = ["DenseReducer"]


class DenseReducer:
    """Sums or averages gradients over ranks, whole, compressed as Horovod's own compressors do.

    Args:
        compression: Horovod's: `Compression.none` or `Compression.fp16`, or one of the user.
        op: Average or Sum.
        gradient_predivide_factor: of the average, what is divided before the sum.
        groups: number of groups, or lists of variables that form one each; reduced together.
        process_set: the ranks that take part.
        sparse_as_dense: whether `tf.IndexedSlices` are made dense.
        device_dense: where dense gradients are reduced.
        device_sparse: where `tf.IndexedSlices` are.
    """

    def __init__(
        self,
        compression: Any,
        *,
        op: Any,
        gradient_predivide_factor: float,
        groups: Any,
        process_set: Any,
        sparse_as_dense: bool,
        device_dense: str,
        device_sparse: str,
    ) -> None:
        self.process_set = process_set
        self._compression, self._op, self._sparse_as_dense = compression, op, sparse_as_dense
        self._groups = groups
        if isinstance(groups, list):
            self._groups = [[as_variable(variable).ref() for variable in group] for group in groups]
        average = op == hvd.Average
        self._common = {
            "op": op,
            "compression": compression,
            "process_set": process_set,
            "device_dense": device_dense,
            "device_sparse": device_sparse,
            "prescale_factor": 1.0 / gradient_predivide_factor if average else 1.0,
            "postscale_factor": gradient_predivide_factor if average else 1.0,
            "ignore_name_scope": True,
        }
        self._name = ""
        self._eagerly = EagerCalls(self._build)

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to reduce with."""
        if not self.process_set.included():
            return False
        return is_elastic() or self.process_set.size() > 1

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], _learning_rate: Any) -> list[Any]:
        """Reduced gradients; None stays None.

        Raises:
            UnsupportedError: within ``tf.function(jit_compile=True)``.
        """
        refuse_graphs()
        if not self.is_needed:
            return list(gradients)
        variables = [as_variable(variable) for variable in variables]
        self._name = self._name or label_of("horovod_sparse.dense", self.process_set, variables)
        given = list(gradients)
        if self._sparse_as_dense:
            given = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in given]
        if not tf.executing_eagerly():
            return self._build(given, variables, tf.zeros([]))
        return self._eagerly(given, variables, tf.zeros([]))

    def _build(self, gradients: list[Any], variables: list[Any], _scalar: tf.Tensor) -> list[Any]:
        results = list(gradients)
        grouped: set[int] = set()
        for number, group in enumerate(self._positions(gradients, variables)):
            grouped.update(group)
            tensors = [not_folded(gradients[i]) for i in group]
            with known_to_elastic():
                sums = hvd.grouped_allreduce(tensors, name=f"{self._name}.group{number}", **self._common)
            for i, sum_ in zip(group, sums, strict=True):
                results[i] = sum_
        for i, gradient in enumerate(gradients):
            if gradient is not None and i not in grouped:
                with known_to_elastic():
                    given = not_folded(gradient)
                    results[i] = hvd.allreduce(given, name=f"{self._name}.{i}", **self._common)
        return results

    def _positions(self, gradients: list[Any], variables: list[Any]) -> list[list[int]]:
        """Positions of dense gradients of one dtype, group by group: what one call can reduce."""
        dense = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
        if self._groups is None:
            return []
        if isinstance(self._groups, int):
            per_group = -(-len(dense) // self._groups)
            asked = [dense[i : i + per_group] for i in range(0, len(dense), per_group)]
        else:
            at = {variables[i].ref(): i for i in dense}
            asked = [[at[ref] for ref in group if ref in at] for group in self._groups]
        return [
            [i for i in group if gradients[i].dtype == dtype]
            for group in asked
            for dtype in dict.fromkeys(gradients[i].dtype for i in group)
        ]
