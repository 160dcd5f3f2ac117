"""The two queues of a step: cases worked out by hand."""

import dataclasses

import pytest

from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.merging import (
    AffineTime,
    CostModel,
    ParameterFacts,
    Plan,
    Span,
    Workload,
    layerwise,
    predict,
)
from horovod_sparse.planning.strategies import segment_tables

A, B, C = (ParameterFacts(name, size) for name, size in (("a", 10), ("b", 20), ("c", 30)))


def kinds_and_ends(spans: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    return [(span.kind, round(span.start, 9), round(span.end, 9)) for span in spans]


def test_what_stays_dense_is_worked_for_before_it_is_sent() -> None:
    # b stays dense: packing 1 + 0.1 n, allreduce 2 + 0.025 n of its 80 bytes
    workload = Workload((A, B, C), (3.0, 2.0, 1.0), dense=frozenset("b"))
    cost = CostModel(AffineTime(1.0), AffineTime(2.0), AffineTime(2.0, 0.025), AffineTime(1.0, 0.1))
    plan = layerwise(workload)
    timeline = predict(workload, plan, cost)
    assert kinds_and_ends(timeline.computation) == [
        ("backward", 0.0, 1.0),
        ("selection", 1.0, 2.0),
        ("backward", 2.0, 4.0),
        ("packing", 4.0, 7.0),
        ("backward", 7.0, 10.0),
        ("selection", 10.0, 11.0),
    ]
    assert kinds_and_ends(timeline.communication) == [
        ("sparse", 2.0, 4.0),
        ("dense", 7.0, 11.0),
        ("sparse", 11.0, 13.0),
    ]
    # what the exact search stands on says the same
    tables = segment_tables(workload, cost)
    assert tables.seconds([1, 2]) == pytest.approx(timeline.iteration_seconds)


def test_three_layers_by_hand() -> None:
    # selection 1 + 0.1 n, communication 2 + 0.05 n; backward c 1, b 2, a 3 after a forward of 4
    workload = Workload((A, B, C), (3.0, 2.0, 1.0), forward_seconds=4.0)
    cost = CostModel(AffineTime(1.0, 0.1), AffineTime(2.0, 0.05))
    timeline = predict(workload, layerwise(workload), cost)
    assert kinds_and_ends(timeline.computation) == [
        ("forward", 0.0, 4.0),
        ("backward", 4.0, 5.0),
        ("selection", 5.0, 9.0),  # 1 + 3
        ("backward", 9.0, 11.0),
        ("selection", 11.0, 14.0),  # 1 + 2
        ("backward", 14.0, 17.0),
        ("selection", 17.0, 19.0),
    ]
    assert kinds_and_ends(timeline.communication) == [
        ("sparse", 9.0, 12.5),
        ("sparse", 14.0, 17.0),
        ("sparse", 19.0, 21.5),
    ]
    assert timeline.iteration_seconds == 21.5


DENSE = CostModel(AffineTime(), AffineTime(5.0), AffineTime(2.0, 0.025))  # 0.1 s an element


@pytest.mark.parametrize(
    ("fuse", "threshold", "expected"),
    [
        # c is sent from 1 to 6; b and a wait: 2 + 2 + 1 together
        (True, 2**20, [("sparse", 1.0, 6.0), ("dense", 6.0, 11.0)]),
        (False, 2**20, [("sparse", 1.0, 6.0), ("dense", 6.0, 10.0), ("dense", 10.0, 13.0)]),
        # 120 bytes do not fit
        (True, 119, [("sparse", 1.0, 6.0), ("dense", 6.0, 10.0), ("dense", 10.0, 13.0)]),
        (True, 120, [("sparse", 1.0, 6.0), ("dense", 6.0, 11.0)]),
    ],
)
def test_dense_parameters_that_wait_together_go_together(fuse, threshold, expected) -> None:
    cost = dataclasses.replace(DENSE, fuse_dense=fuse, fusion_bytes=threshold)
    workload = Workload((A, B, C), (1.0, 1.0, 1.0), dense=frozenset("ab"))
    timeline = predict(workload, layerwise(workload), cost)
    assert kinds_and_ends(timeline.communication) == expected


def test_steps_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="1 times for 2 parameters"):
        Workload((A, B), (1.0,))
    with pytest.raises(ArgumentError, match="backward_seconds of b"):
        Workload((A, B), (1.0, -1.0))
    with pytest.raises(ProfileMismatchError, match="no time for any parameter"):
        Workload((A, B), (0.0, 0.0))
    with pytest.raises(ArgumentError, match="names of parameters"):
        Workload((A, B), (1.0, 1.0), dense=frozenset("x"))
    with pytest.raises(ArgumentError, match="nothing for"):
        predict(Workload((A, B), (1.0, 1.0)), Plan((("a",),)), DENSE)
