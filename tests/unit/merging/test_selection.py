"""Eq. (1) at its border, by hand, and the other rules."""

from __future__ import annotations

import dataclasses

import pytest

from horovod_sparse.cost import AffineTime, AlphaBeta, CostModel, starting_cost
from horovod_sparse.errors import ArgumentError, UnknownNameError
from horovod_sparse.merging import ParameterFacts, dense_of, min_elements, select_tensors


def chosen(rule, sizes, cost=None):
    facts = [ParameterFacts(f"p{size}", size) for size in sizes]
    return {int(choice.name[1:]): choice.dense for choice in select_tensors(rule, facts, cost)}


def test_equation_1_at_its_border() -> None:
    # T_comp = 1, T_spr = 2, T_full = 0.5 + 0.125 * 4 n: n = 5 gives exactly 3, which is no gain
    cost = CostModel(AffineTime(1.0), AffineTime(2.0), AffineTime(0.5, 0.125))
    assert chosen("cost", [4, 5, 6], cost) == {4: True, 5: True, 6: False}
    (choice,) = select_tensors("cost", [ParameterFacts("a", 6)], cost)
    assert (choice.compression_seconds, choice.sparse_seconds, choice.full_seconds) == (1.0, 2.0, 3.5)
    assert choice.reason == "1e+03 ms < 3.5e+03 - 2e+03 ms"
    # work for a dense parameter is part of T_full: 0.25 n, and 5 pays
    worked = dataclasses.replace(cost, dense_work=AffineTime(0.0, 0.25))
    assert chosen("cost", [1, 5], worked) == {1: True, 5: False}


def test_dragonns_formulas_by_hand() -> None:
    # P = 4, alpha = 1 ms, beta = 10 ns; A = 4, A' = 8, d = 0.01
    cost = starting_cost(AlphaBeta(1e-3, 1e-8), 4, 0.01, selection=AffineTime(5e-3, 1e-9))
    assert cost.dense.seconds(4 * 100_000) == pytest.approx(2 * 3 * (1e-3 + 4e5 / 4 * 1e-8))
    assert cost.communication.seconds(100_000) == pytest.approx(3 * (1e-3 + 0.01 * 1e5 * 8 * 1e-8))
    # T_full - T_spr - T_comp = 3 alpha - 5e-3 + n (6e-8 - 2.4e-9 - 1e-9): the gain begins at n = 35 336
    assert chosen("cost", [35_335, 35_336], cost) == {35_335: True, 35_336: False}


def test_sparse_messages_grow_with_ranks_and_dense_ones_do_not() -> None:
    # 2 / P of n A against d n A' each: at d = 0.25 with 8 bytes nothing is gained from P = 4 on
    for size, dense in ((3, False), (4, True), (64, True)):
        cost = starting_cost(AlphaBeta(0.0, 1e-8), size, 0.25, selection=AffineTime())
        assert chosen("cost", [10**6], cost) == {10**6: dense}


def test_float64_counts_double() -> None:
    cost = CostModel(AffineTime(), AffineTime(1.0), AffineTime(0.0, 0.125))
    facts = [ParameterFacts("a", 2, "float32"), ParameterFacts("b", 2, "float64")]
    assert dense_of(select_tensors("cost", facts, cost)) == {"a"}


def test_other_rules() -> None:
    assert chosen("all", [1, 10]) == {1: False, 10: False}
    assert chosen(min_elements(10), [9, 10]) == {9: True, 10: False}
    assert chosen(lambda parameter: parameter.name == "p3", [3, 4]) == {3: False, 4: True}
    (choice,) = select_tensors(min_elements(10), [ParameterFacts("a", 9)])
    assert choice.reason == "9 < 10 elements"


def test_bad_rules() -> None:
    facts = [ParameterFacts("a", 1)]
    with pytest.raises(UnknownNameError, match="costs"):
        select_tensors("costs", facts)
    with pytest.raises(ArgumentError, match="profile"):
        select_tensors("cost", facts)
    with pytest.raises(ArgumentError, match="tensor_selection=3"):
        select_tensors(3, facts)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="True or False for a"):
        select_tensors(lambda parameter: "yes", facts)  # type: ignore[arg-type,return-value]
    with pytest.raises(ArgumentError, match="min_elements=0"):
        min_elements(0)
