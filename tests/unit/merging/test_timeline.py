"""The two queues of a step: cases worked out by hand."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given

from horovod_sparse.cost import AffineTime, CostModel
from horovod_sparse.errors import ArgumentError, ProfileMismatchError
from horovod_sparse.merging import ParameterFacts, Plan, Span, Workload, layerwise, predict
from horovod_sparse.merging.optimal import segment_tables
from support.merging_models import costs, workloads

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
    assert kinds_and_ends(timeline.computation) == (
        [
            ("forward", 0.0, 4.0),
            ("backward", 4.0, 5.0),
            ("selection", 5.0, 9.0),  # 1 + 3
            ("backward", 9.0, 11.0),
            ("selection", 11.0, 14.0),  # 1 + 2
            ("backward", 14.0, 17.0),
            ("selection", 17.0, 19.0),
        ]
    )
    assert kinds_and_ends(timeline.communication) == [
        ("sparse", 9.0, 12.5),
        ("sparse", 14.0, 17.0),
        ("sparse", 19.0, 21.5),
    ]
    assert timeline.iteration_seconds == 21.5
    # Eq. (9) as meant: the end of communication minus the end of computation
    assert timeline.visible_seconds == 21.5 - 19.0
    assert timeline.bucket_spans(1)["sparse"].start == 14.0
    assert timeline.bucket_spans(1)["selection"].names == ("b",)


def test_a_busy_network_makes_messages_wait() -> None:
    workload = Workload((A, B), (1.0, 1.0))
    cost = CostModel(AffineTime(), AffineTime(10.0))
    timeline = predict(workload, layerwise(workload), cost)
    assert [(span.start, span.end) for span in timeline.communication] == [(1.0, 11.0), (11.0, 21.0)]


def test_a_bucket_is_selected_when_its_last_gradient_is_there() -> None:
    # c and a in one bucket around b's own
    plan = Plan((("c", "a"), ("b",)))
    timeline = predict(
        Workload((A, B, C), (1.0, 1.0, 1.0)), plan, CostModel(AffineTime(0.5), AffineTime(1.0))
    )
    assert [span.buckets for span in timeline.communication] == [(1,), (0,)]
    assert [span.start for span in timeline.communication] == [2.5, 4.0]


DENSE = CostModel(AffineTime(), AffineTime(5.0), AffineTime(2.0, 0.025))  # 0.1 s an element


@pytest.mark.parametrize(
    ("fuse", "threshold", "expected"),
    [
        # c is sent from 1 to 6; b and a wait: 2 + 2 + 1 together
        (True, 2**20, [("sparse", 1.0, 6.0), ("dense", 6.0, 11.0)]),
        (False, 2**20, [("sparse", 1.0, 6.0), ("dense", 6.0, 10.0), ("dense", 10.0, 13.0)]),
        # 120 bytes do not fit
        (True, 100, [("sparse", 1.0, 6.0), ("dense", 6.0, 10.0), ("dense", 10.0, 13.0)]),
        (True, 120, [("sparse", 1.0, 6.0), ("dense", 6.0, 11.0)]),
    ],
)
def test_dense_parameters_that_wait_together_go_together(fuse, threshold, expected) -> None:
    cost = dataclasses.replace(DENSE, fuse_dense=fuse, fusion_bytes=threshold)
    workload = Workload((A, B, C), (1.0, 1.0, 1.0), dense=frozenset("ab"))
    timeline = predict(workload, layerwise(workload), cost)
    assert kinds_and_ends(timeline.communication) == expected


def test_what_is_not_ready_is_not_fused() -> None:
    workload = Workload((A, B), (10.0, 1.0), dense=frozenset("ab"))
    timeline = predict(workload, layerwise(workload), DENSE)
    assert [(span.start, span.names) for span in timeline.communication] == [(1.0, ("b",)), (11.0, ("a",))]


def test_sparse_messages_are_fused_where_asked() -> None:
    workload = Workload((A, B, C), (1.0, 1.0, 1.0))
    cost = CostModel(AffineTime(), AffineTime(5.0, 0.1), fuse_sparse=True)
    (first, second) = predict(workload, layerwise(workload), cost).communication
    assert (first.start, first.end, first.buckets) == (1.0, 9.0, (0,))
    assert (second.start, second.end, second.buckets) == (9.0, 17.0, (1, 2))  # 7 + 6 - 5


def test_measured_communication_replaces_the_model() -> None:
    workload = Workload((A, B), (1.0, 1.0))
    timeline = predict(workload, layerwise(workload), DENSE, communication_seconds=[0.25, 0.5])
    assert [span.end - span.start for span in timeline.communication] == [0.25, 0.5]


@given(workloads(kinds=3, dense=True), costs())
def test_queues_never_overlap_and_nothing_starts_early(workload, cost) -> None:
    timeline = predict(workload, layerwise(workload), cost)
    for queue in (timeline.computation, timeline.communication):
        for one, other in pairwise(queue):
            assert one.end <= other.start
    for number in range(len(layerwise(workload).buckets)):
        spans = timeline.bucket_spans(number)
        assert spans["sparse"].start >= spans["selection"].end
    names = [name for span in timeline.communication for name in span.names]
    assert sorted(names) == sorted(parameter.name for parameter in workload.parameters)


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


def test_the_optimizer_updates_once_everything_has_been_summed() -> None:
    cost = CostModel(AffineTime(1.0, 0.1), AffineTime(2.0, 0.05))
    before = predict(
        Workload((A, B, C), (3.0, 2.0, 1.0)), layerwise(Workload((A, B, C), (3.0, 2.0, 1.0))), cost
    )
    workload = Workload((A, B, C), (3.0, 2.0, 1.0), update_seconds=4.0)
    timeline = predict(workload, layerwise(workload), cost)
    assert kinds_and_ends(timeline.computation)[-1] == ("update", 17.5, 21.5)
    assert timeline.iteration_seconds == before.iteration_seconds + 4.0 == 21.5
    # computing ends where the last bucket is selected, and what communication adds stays what it was
    assert (timeline.computation_end, timeline.visible_seconds) == (15.0, before.visible_seconds)
    longer = workload.lasting(12.0).with_dense(["a"])
    assert (longer.update_seconds, longer.step_seconds) == (4.0, 12.0)
