"""What a user may say beside the sparsifier: one declaration, which every front end takes its share of."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import pytest

from horovod_sparse.cost import AlphaBeta, assumed_profile
from horovod_sparse.errors import (
    ArgumentError,
    EditedGradientError,
    NonFiniteGradientError,
    NonFiniteSumError,
    UnknownNameError,
    UnsupportedError,
)
from horovod_sparse.feedback import Recipe, parse_recipe
from horovod_sparse.merging import ParameterFacts, Timeline, Workload, predict
from horovod_sparse.planning import plan_request
from horovod_sparse.planning.share import PERIOD, Following
from horovod_sparse.plans.dense import ClusterFacts
from horovod_sparse.simulation import run_lockstep
from horovod_sparse.telemetry import Telemetry
from horovod_sparse.training.outcome import NonFinitePolicy, Outcome, Verdict
from horovod_sparse.training.settings import (
    CommonOptions,
    Settings,
    SettingsOptions,
    refuse_without_sparsifier,
)


def test_editors_show_what_there_is() -> None:
    assert set(SettingsOptions.__annotations__) == {field.name for field in dataclasses.fields(Settings)}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("lvels", "unknown argument of a front end 'lvels': did you mean levels? the known ones are"),
        ("op", "unknown argument of a front end 'op': the known ones are"),
        ("proces_set", "did you mean process_set?"),
        ("merging", "it is for other front ends. the known ones are check_every, levels, on_drift"),
        ("network_share", "it is for other front ends"),
    ],
)
def test_a_front_end_refuses_what_it_does_not_take(option: str, words: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Settings.of({option: 1}, "a front end", CommonOptions, ["process_set"])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("synchronize_at", "now"), ("max_grad_norm", 0.0), ("deadline_seconds", -1), ("on_nonfinite", "no")]
    + [("check_every", 1.5), ("on_drift", "no"), ("levels", "no")]
    + [("network_share", wrong) for wrong in (0.0, 1.0, True, "much", math.nan)],
)
def test_values_are_checked_and_named(option: str, wrong: object) -> None:
    with pytest.raises(ArgumentError, match=option):
        Settings(**{option: wrong})


def test_the_environment_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SPARSE_CHECK_EVERY", "7")
    monkeypatch.setenv("HOROVOD_SPARSE_ON_DRIFT", "warn")
    monkeypatch.setenv("HOROVOD_SPARSE_DEADLINE_SECONDS", "20")
    made = Settings()
    assert (made.check_every, made.on_drift, made.deadline_seconds) == (7, "warn", 20.0)
    assert dataclasses.replace(made, levels="host").check_every == 7
    assert Settings(deadline_seconds=0).deadline_seconds == 0
    assert Settings(network_share="auto").network_share == 0.05


def test_without_a_sparsifier_most_of_it_is_refused() -> None:
    refuse_without_sparsifier({"levels": "auto", "on_nonfinite": "raise", "plan": None}, "none")
    with pytest.raises(ArgumentError, match="a sparsifier, or leave levels, check_every out"):
        refuse_without_sparsifier({"levels": "host", "check_every": 5}, "none")


@pytest.mark.parametrize(
    ("policy", "end", "outcome"),
    [
        ("zero", "those of ranks [1] are left out of this step", Outcome.AGAIN),
        ("skip", "all ranks skip this step", Outcome.SKIPPED),
    ],
)
def test_the_log_says_what_was_seen_and_what_became_of_it(
    policy: str, end: str, outcome: Outcome, caplog
) -> None:
    """The error's own words would say that no rank applied a step that was applied without the bad rank."""
    rule = NonFinitePolicy(policy, Telemetry())
    errors = [NonFiniteGradientError("fc", {1: "fc.weight"})]
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        assert rule.judge(errors, [0], again=True).outcome is outcome
    seen = "the gradient of fc is not finite (rank 1: fc.weight)"
    assert caplog.messages == [f"{seen}; {end}, as on_nonfinite={policy!r} asks (1 so far)"]


def test_a_sum_that_overflows_is_skipped_by_zero_too(caplog) -> None:
    rule = NonFinitePolicy("zero", Telemetry())
    errors = [NonFiniteSumError("fc", {}, "fc.weight")]
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        verdict = rule.judge(errors, [0], again=True)
    assert verdict.outcome is Outcome.SKIPPED and verdict.drop
    assert "No rank applied" not in caplog.text and "fc.weight" in caplog.text


def test_what_becomes_of_a_step() -> None:
    bad, edited = NonFiniteGradientError("fc", {1: "w"}), EditedGradientError("fc", {0: "w"})
    own, rule = UnsupportedError("of this rank"), NonFinitePolicy("raise", Telemetry())
    assert rule.judge([], [0]).outcome is Outcome.APPLIED
    assert rule.judge([bad], [1]) == Verdict(Outcome.RAISE, bad, True)
    assert rule.judge([bad], [0], scaled=True) == Verdict(Outcome.OVERFLOW, bad, True)
    assert rule.judge([bad, edited], [0], scaled=True) == Verdict(Outcome.RAISE, edited, False)
    assert rule.judge([bad, edited, own], [0]).error is own
    assert rule.judge([], [0], failure=own) == Verdict(Outcome.RAISE, own, False)
    assert NonFinitePolicy("skip", Telemetry()).judge([bad, own], [0]).outcome is Outcome.RAISE


FACTS = [ParameterFacts(f"p{number}", 400_000) for number in range(5)]
STEP = Workload(tuple(FACTS), (20e-3,) * 5, 100e-3)
RECIPE = parse_recipe("topk:density=auto(least=0.001,most=0.1)")
SIZE, MBIT, GBIT = 4, 1e6, 1e9


def link(bits: float):
    return dataclasses.replace(assumed_profile(AlphaBeta(5e-5, 8.0 / bits), SIZE), framework="torch")


class Fake:
    """A training whose steps take what the model says of a link; rank 0 of four that are alike."""

    rank, on_host = 0, True

    def __init__(
        self, share: float, bits: float, told: float, recipe: Recipe = RECIPE, work: float = 0.0
    ) -> None:
        self.bits, self.clock, self.step, self.changes = bits, 0.0, 0, []
        self.work = work  # for every sparse step, that no profile tells
        self.recipe = recipe
        request, _ = plan_request(
            profile=link(told), density=recipe.auto, network_share=share, recipe=recipe, merging="optimal"
        )
        self.plan = request.first_plan(FACTS)
        self.following = Following(request, FACTS, recipe.sparsifier, self)

    def now(self):
        return self.clock

    def seconds_between(self, start, stop):
        return stop - start

    def decided(self, parameters, topology, decide):
        ranks = [decide(ClusterFacts(rank, SIZE, "torch", "formulas", 0.0)) for rank in range(SIZE)]
        first, *others = run_lockstep(ranks)
        assert all(other.plan == first.plan for other in others)
        return first

    @property
    def share(self) -> float:
        """Of an iteration under the plan in use, in truth."""
        return self.predicted.network_share

    @property
    def predicted(self) -> Timeline:
        density = self.plan.density or self.recipe.sparsifier.density
        sent = self.recipe.sparsifier.sent_as(density, self.plan.values if self.plan.buckets else None)
        cost = link(self.bits).cost(sent, fuse_sparse=True)
        return predict(STEP.with_dense(self.plan.dense), self.plan, cost)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            begun, self.step = self.clock, self.step + 1
            self.clock += STEP.forward_seconds
            for fact, seconds in zip(STEP.backward, STEP.backward_seconds, strict=True):
                self.clock += seconds
                self.following.arrived(fact.name, self.clock, self.clock)
            made = self.predicted
            self.clock = begun + made.iteration_seconds + self.work * bool(self.plan.buckets)
            given = self.plan, self.step, made.visible_seconds
            if (plan := self.following.after_step(*given)) is not None:
                self.changes.append(self.step)
                self.plan = plan


@pytest.mark.parametrize("told", [0.2, 1.0, 5.0], ids=lambda factor: f"profile-off-by-{factor:g}")
@pytest.mark.parametrize("bits", [2 * MBIT, 100 * MBIT, 1 * GBIT, 10 * GBIT, 1000 * GBIT])
def test_the_share_is_kept_or_it_is_said_what_would_keep_it(bits, told, caplog):
    caplog.set_level(logging.INFO, "horovod_sparse")
    fake = Fake(0.05, bits, told * bits)
    assert not fake.plan.buckets, "dense until times are known"
    fake.train(7 + 5 * PERIOD)
    words = str(fake.following.decision)
    fake.bits *= 0.9
    fake.train(4 * PERIOD)
    if "too much" in words:
        assert fake.plan.values == "2bit" and fake.plan.density < 1.5 * RECIPE.auto.least
        told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        line, _, _ = fake.following.decision.remedy.partition(": predicted")
        assert told[-1].startswith(f"no plan keeps to network_share=0.05: write {line}: predicted ")
        assert "LocalSteps(optimizer, model, every=" in told[-1]
        assert len(told) == len({one.partition(": predicted")[0] for one in told}), "each line once"
    else:
        assert fake.share <= 0.05 * 1.5
        assert not fake.plan.buckets or fake.share >= 0.02 or fake.plan.density == RECIPE.auto.most
    assert fake.following.decision.measured == pytest.approx(fake.share, abs=1e-6)
    assert len(fake.changes) <= 2, "and it stays"
    first = next(one.getMessage() for one in caplog.records if "network_share=0.05" in one.getMessage())
    lines = first.splitlines()
    assert lines[0].startswith("network_share=0.05: ") and lines[1].startswith("predicted: ")
    assert lines[2].startswith("accuracy: ")
    assert any("points to the prediction" in one.getMessage() for one in caplog.records)


def test_a_link_that_falls_and_comes_back_is_followed():
    fake = Fake(0.05, 0.3 * GBIT, 0.3 * GBIT)
    fake.train(7 + 2 * PERIOD)
    at_first, share = fake.plan.density, fake.share
    assert at_first is not None and share <= 0.075
    fake.bits = 0.03 * GBIT
    assert fake.share > 0.1
    fake.train(50)
    assert fake.share <= 0.075 and fake.plan.density < at_first / 3
    fake.bits = 0.3 * GBIT
    fake.train(50)
    assert fake.plan.density > at_first / 3 and fake.share <= 0.075
    assert all(later - sooner >= PERIOD for sooner, later in itertools.pairwise(fake.changes))


def test_work_that_no_faster_network_would_take_away_changes_no_plan():
    """It was told as the network's share: densities fell in vain, for what no density changes."""
    plans = []
    for work in (0.0, 0.03):
        fake = Fake(0.05, 0.3 * GBIT, 0.3 * GBIT, work=work)
        fake.train(7 + 4 * PERIOD)
        plans.append(fake.plan)
        assert len(fake.changes) == 1 and 0.02 < fake.following.decision.measured < 0.06
    assert plans[0] == plans[1]


def test_another_program_for_one_look_changes_no_plan():
    fake = Fake(0.05, 0.3 * GBIT, 0.3 * GBIT)
    fake.train(7 + PERIOD)
    fake.bits /= 2
    fake.train(PERIOD)
    fake.bits *= 2
    fake.train(2 * PERIOD)
    assert len(fake.changes) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topk:density=0.05", "every step sparse at density 0.05, values of 2 bits"),
        ("topk:density=0.05,values=float16", "every step sparse at density 0.05"),
        ("hard_threshold:threshold=0.1,density=0.05", "every step sparse, values of 2 bits"),
        ("signsgd", "every step sparse"),
    ],
)
def test_too_much_is_said_while_it_is(text, said):
    fake = Fake(0.05, 3 * MBIT, 3 * MBIT, parse_recipe(text))
    fake.train(7 + PERIOD)
    decision = fake.following.decision
    assert f"network_share=0.05: {said}, which is too much\n" in str(decision)
    assert ("density='auto' in place of 0.05, or LocalSteps" in decision.remedy) == ("topk" in text)
    assert (" density " in str(decision.plan)) == ("topk" in text)
    fake.bits = 30 * GBIT
    fake.train(100)
    assert "too much" not in str(fake.following.decision)
    assert not fake.following.decision.remedy


def test_steps_of_adam_are_sparse_on_every_link():
    """Dense, or at 0.1, they lose, as nothing waits that would be their first moment."""
    fake = Fake(0.05, 1000 * GBIT, 1000 * GBIT, parse_recipe("topk:density=auto,feedback=adam"))
    fake.train(7 + 2 * PERIOD)
    assert fake.plan.buckets and fake.plan.density == 0.01
    assert "at density 0.01; dense training would fit, too\n" in str(fake.following.decision)
