"""The studies themselves, at tiny sizes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from studies import convergence, feedback, levels, residuals, results, schedules, threshold
from studies.tasks import Task, digits_task, small_digits_task, text_task
from studies.training import train

from horovod_sparse.feedback import recipe
from horovod_sparse.sparsifiers import ALGORITHMS


@pytest.fixture(scope="module")
def tiny_digits() -> Task:
    return digits_task(width=4, batch_size=2)


def dense_by_hand(task: Task, size: int, num_steps: int, rates: list[float]) -> np.ndarray:
    """Plain SGD with momentum on the mean of all ranks' gradients."""
    torch.manual_seed(3)
    model = task.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=task.momentum)
    streams = [task.batches(rank, size, num_steps, 3) for rank in range(size)]
    losses = []
    for rate in rates[:num_steps]:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = sum(
            task.loss(model, *(torch.from_numpy(array) for array in next(stream))) for stream in streams
        )
        (loss / size).backward()
        optimizer.step()
        losses.append(float(loss.detach()) / size)
    return np.array(losses)


@pytest.mark.parametrize("make", [lambda: digits_task(4, 2), lambda: text_task(4, 2, 8, 4)])
def test_density_one_is_dense_training(make: Any) -> None:
    task, rates = make(), [0.1, 0.1, 0.01, 0.1]
    trace = train(
        task,
        recipe("topk", density=1.0),
        size=2,
        num_steps=4,
        learning_rate_at=rates.__getitem__,
        seed=3,
    )
    np.testing.assert_allclose(trace.losses, dense_by_hand(task, 2, 4, rates), rtol=1e-4)
    assert trace.counts == trace.targets == [trace.num_elements] * 4


def test_a_trace_tells_what_was_asked_and_achieved(tiny_digits: Task) -> None:
    setting = threshold.Setting(tiny_digits, 0.02, density=0.1, size=2, num_steps=12, warmup_steps=4)
    run = threshold.measure(setting, "exdyna sketch")
    n = run["num_elements"]
    # the warm-up by its formula: 0.25 * (0.1 / 0.25) ** (t / 4)
    assert run["targets"] == [
        round(n * (0.25 * 0.4 ** (t / 4) if t < 4 else 0.1)) for t in range(setting.num_steps)
    ]
    assert len(run["counts"]) == len(run["imbalance"]) == len(run["global_error"]) == 12
    assert all(value >= 1.0 for value in run["imbalance"])
    # nothing is held back before the first step
    assert run["global_error"][0] == 0.0 < run["global_error"][1]
    assert 0.0 <= run["score"] <= 1.0


def test_every_rule_of_the_threshold_study_runs(tiny_digits: Task) -> None:
    setting = threshold.Setting(tiny_digits, 0.02, density=0.1, size=2, num_steps=5)
    runs = {f"digits/{name}": threshold.measure(setting, name) for name in threshold.RULES}
    assert len(threshold.table({"runs": runs}).splitlines()) == 2 + len(threshold.RULES)
    names = {setting.recipe(name).describe() for name in threshold.RULES}
    assert len(names) == len(threshold.RULES)


def test_facts_by_hand() -> None:
    run = {"targets": [100] * 16, "counts": [300, 120, 100, 100, *[105, 95] * 5, 130, 100]}
    # from step 5 on: ten times 5 %, 30 % and 0 %; steps 3 to 12 are the first ten within 10 %
    assert threshold.facts(run) == {
        "factor": 3.0,
        "mean": pytest.approx((10 * 0.05 + 0.3) / 12),
        "worst": pytest.approx(0.3),
        "settled": 3,
    }
    assert threshold.facts({"targets": [100] * 12, "counts": [200] * 12})["settled"] is None


def test_scaling_the_residual_matters_from_the_drop_on(tiny_digits: Task) -> None:
    setting = {"learning_rate": 0.1, "density": 0.05, "size": 2, "num_steps": 12, "drop_at": 6}
    runs = {
        f"exdyna, {form}/seed 0": feedback.measure(tiny_digits, "exdyna", form, 0, setting)
        for form in feedback.FORMS
    }
    scaled, unscaled = (run["losses"] for run in runs.values())
    # the rate of step 7 is told with its gradient, and its update shows in the loss of step 8
    assert scaled[:7] == unscaled[:7]
    assert scaled[7:] != unscaled[7:]
    lines = feedback.table({"setting": setting, "runs": runs}).splitlines()
    assert [line.split(" |")[0] for line in lines[2:]] == ["| exdyna, scaled", "| exdyna, unscaled"]


def test_every_optimizer_schedule_and_remedy_runs() -> None:
    task, setting = small_digits_task(width=4, batch_size=2), {"density": 0.1, "size": 2, "num_steps": 12}
    wanted = [
        *(f"{schedule}/SGD/topk/seed 0" for schedule in schedules.SCHEDULES),
        *(f"warm restarts/{how}/dense/seed 0" for how in schedules.OPTIMIZERS),
        *(f"warm restarts/{how}/topk/seed 0" for how in schedules.OPTIMIZERS),
        *(f"warm restarts/{how}/exdyna/seed 0" for how in schedules.OPTIMIZERS),
        *(
            name
            for name in schedules.names()
            if name.split("/")[1] in schedules.REMEDIES and "topk/seed 0" in name
        ),
        "warm restarts/SGD/topk, scaled/seed 0",
    ]
    wanted = list(dict.fromkeys(wanted))
    runs = {name: schedules.measure(task, name, setting) for name in wanted}
    facts = {name: (run["final_loss"], run["largest_applied"]) for name, run in runs.items()}
    remedies = [name for name in wanted if name.split("/")[1] in schedules.REMEDIES]
    assert len(remedies) == len(schedules.REMEDIES) - 2
    for name in remedies:
        assert facts[name] != facts["warm restarts/momentum/topk/seed 0"], name
    assert all(np.isfinite(run["largest_applied"]) for run in runs.values())
    rows = schedules.table({"runs": runs}).splitlines()[2:]
    assert [row.split(" |")[0] for row in rows] == [
        f"| {optimizer}, warm restarts" for optimizer in schedules.OPTIMIZERS
    ]


def test_a_rate_ends_where_its_schedule_says() -> None:
    ends = {name: (rate(0.0), rate(1.0)) for name, rate in schedules.SCHEDULES.items()}
    assert ends == {
        "constant": (1.0, 1.0),
        "warm-up": (0.0, 1.0),
        "cosine to 0": (1.0, 0.0),
        "one-cycle": (0.0, pytest.approx(0.0, abs=1e-12)),
        "warm restarts": (1.0, 0.0),
    }


def test_every_algorithm_has_a_row() -> None:
    rows = convergence.variants()
    assert set(ALGORITHMS) | {"none", "fp16"} <= set(rows)
    command = convergence.command("exdyna, drop-in", 2, "out.json")
    assert command[:4] == ["horovodrun", "--gloo", "--log-level", "ERROR"]
    assert command[-9:] == [
        *("--compression", "exdyna", "--density", "0.01", "--stock"),
        *("--seed", "2", "--json", "out.json"),
    ]
    behind = convergence.command("powersgd rank 4, DDP, no warm-up", 1, "out.json")
    assert behind[:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    assert Path(behind[4]).name == "ddp_digits.py"
    assert behind[5:9] == ["--compression", "powersgd:rank=4", "--warmup-epochs", "0"]


def test_accuracies_are_compared_with_dense() -> None:
    def run(accuracy: float, num_bytes: float, union: float | None) -> dict[str, Any]:
        return {"accuracy": accuracy, "bytes_per_step": num_bytes, "density_union": union}

    result = {
        "runs": {
            "none/seed 0": run(0.97, 4000, None),
            "none/seed 1": run(0.99, 4000, None),
            "topk/seed 0": run(0.96, 100, 0.02),
        }
    }
    dense, topk = convergence.table(result).splitlines()[2:]
    assert dense == "| none | 98.00% | 97.0% to 99.0% | 2 | +0.00 | 4.0 | 1x | 100.00% |"
    assert topk == "| topk | 96.00% | 96.0% to 96.0% | 1 | -2.00 | 0.1 | 40x | 2.00% |"


def test_accuracies_by_levels_are_compared_with_each_other() -> None:
    accuracies = {"flat": (0.97, 0.96), "4 x 1": (0.97, 0.96), "2 x 2": (0.955, 0.963)}
    runs = {
        f"topk/{topology}/seed {seed}": {"accuracy": accuracy}
        for topology, each in accuracies.items()
        for seed, accuracy in enumerate(each)
    }
    runs |= {"exdyna/flat/seed 0": {"diverged": True}, "none/flat/seed 0": {"accuracy": 0.99}}
    rows = levels.table({"runs": runs}).splitlines()[2:]
    assert rows[0] == "| topk | flat | 96.50 | 97.0, 96.0 | 0.60, **missed** |"
    assert rows[2] == "| topk | 2 x 2 | 95.90 | 95.5, 96.3 | 0.60, **missed** |"
    assert rows[3:] == ["| exdyna | flat | 0.00 | 0.0 |  |", "| none | flat | 99.00 | 99.0 |  |"]
    command = levels.command("topk", "2 x 2", 1, 8, "out.json")
    assert command[:6] == ["horovodrun", "--gloo", "--log-level", "ERROR", "-np", "4"]
    assert command[command.index("--levels") :][:2] == ["--levels", "host"]
    assert "--levels" not in levels.command("none", "flat", 1, 8, "out.json")


def test_residual_modes_share_their_first_step_only(tiny_digits: Task) -> None:
    setting = {"density": 0.05, "size": 6, "num_steps": 12}
    runs = {
        f"digits/{mode}/{0.2:g}/seed 0": residuals.measure(tiny_digits, setting, mode, 0.2, 0)
        for mode in residuals.MODES
    }
    losses = [run["losses"] for run in runs.values()]
    # what is lost in step 1 is missed in step 2, whose update shows in the loss of step 3
    assert losses[0][:2] == losses[1][:2] == losses[2][:2]
    assert losses[0] != losses[1] != losses[2] != losses[0]
    rows = residuals.table({"settings": {"digits": setting}, "runs": runs}).splitlines()[2:]
    assert [row.split(" |")[0] for row in rows] == [f"| digits, {mode}" for mode in residuals.MODES]


def test_a_mode_is_shown_at_the_rate_that_suits_it() -> None:
    def run(name: str, score: float) -> dict[str, Any]:
        return {"score_name": name, "score": score, "losses": [1.0]}

    scores = {"0.1": (0.9, 0.92), "0.2": (0.95, 0.8)}  # means 0.91 and 0.875
    runs = {
        f"digits/global/{rate}/seed {seed}": run("test accuracy", score)
        for rate, pair in scores.items()
        for seed, score in enumerate(pair)
    }
    runs |= {f"text/global/{rate}/seed 0": run("bits", bits) for rate, bits in (("1", 3.0), ("2", 2.5))}
    assert residuals.best({"runs": runs}, "digits", "global")[0] == 0.1
    assert residuals.best({"runs": runs}, "text", "global") == (2.0, [run("bits", 2.5)])


def test_measurements_survive_the_file(tmp_path: Path) -> None:
    result = {"command": "x", "runs": {"a/seed 0": {"losses": [1.5, 2.0]}, "b": {"score": None}}}
    results.save(tmp_path / "new" / "file.json", result)
    assert results.load(tmp_path / "new" / "file.json") == result
    assert results.load(tmp_path / "missing.json") == {}


def test_tasks_are_frozen(tiny_digits: Task) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_digits.momentum = 0.0  # type: ignore[misc]
