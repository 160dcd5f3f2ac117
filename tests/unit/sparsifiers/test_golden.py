"""Every row's sums are those of a recorded run, which was once held to the papers' algorithms by hand.

    PYTHONPATH=.:tests python tests/unit/sparsifiers/test_golden.py

records anew what a change is meant to change: look at the difference before you commit it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_sparse.errors import StateMismatchError
from horovod_sparse.feedback import Recipe, parse_recipe, recipe
from horovod_sparse.simulation import SimulatedCluster
from support.cases import CASES, case_id
from support.gradients import dyadic
from support.laws import Scenario, random_gradients, run

RECORDED = Path(__file__).with_name("golden.json")
SCENARIO = Scenario(4, 48, num_steps=5)
FEEDBACKS = [
    *("error(clip_norm=1.0)", "error(decay=0.9)", "momentum(momentum=0.5)", "none(clip_norm=1.0)"),
    *("momentum(momentum=0.5,nesterov=true)", "momentum(momentum=0.5,masking=false,clip_norm=1.0)"),
    *("adam(beta2=0.9)", "adam(beta2=0.9,whole_batch=false,clip_norm=1.0)", "rmsprop(beta2=0.9,eps=0.001)"),
]
#: beside the table: recipes as text, their numbers of ranks, elements and steps
MORE: list[tuple[str, tuple[int, int, int]]] = [
    # SparDL with any number of ranks and teams, both ways between teams, every kind of residual
    *(
        (f"spardl:density=0.13,teams={teams},between={way},residuals={mode}", (size, 20 + 7 * size, 3))
        for size in (2, 3, 6, 8, 12, 13)
        for teams in range(1, size + 1)
        for number, way in enumerate(("bruck", "recursive"))
        for mode in [("global", "partial", "local")[(size + teams + number) % 3]]
        if size % teams == 0 and (number == 0 or teams & (teams - 1) == 0)
    ),
    # Ok-Topk with thresholds found and regions cut every so many steps
    *(
        (f"oktopk:density=0.1,threshold_steps={exact},region_steps={regions}", (size, 16 * size, 9))
        for size, exact, regions in ((1, 1, 1), (2, 4, 3), (3, 32, 64), (6, 3, 2), (8, 2, 4), (13, 4, 3))
    ),
    # TopkDSA with and without indices
    *((f"topk_dsa:density={k}", (size, 50 * size, 3)) for size, k in ((3, 0.02), (6, 0.4), (13, 0.1))),
    # every feedback, at the rates below; velocities that are masked where values leave for good
    *((f"topk:density=0.1,feedback={feedback}", (3, 40, 8)) for feedback in FEEDBACKS),
    *(
        (f"{text},density=0.1,feedback=momentum(momentum=0.5,masking={masks})", (size, 60, 5))
        for text in (
            "gtopk:values=float16",
            "topk_dsa:values=exact",
            "oktopk:values=exact",
            "spardl:residuals=partial",
        )
        for size, masks in ((4, "true"), (6, "true"), (4, "false"))
    ),
    *(("spardl:teams=2,density=0.1,feedback=momentum(momentum=0.5)", (size, 60, 5)) for size in (4, 6)),
    (
        "topk:density=0.1,schedule=stairs(steps=1,densities=(1.0,0.7,0.4)),feedback=momentum(momentum=0.5)",
        (2, 40, 5),
    ),
    # ExDyna's algorithm 3, which moves blocks
    *(("exdyna:density=0.05,rebalance=paper", (size, 500, 12)) for size in (3, 5, 9)),
    # where few elements are wanted nobody sends in some steps, whose turns are not used up
    *((f"{name}:density=0.0025", (16, 400, 24)) for name in ("micro", "exdyna")),
]
#: of these the number of elements that were sent, and their sum
LONG = "sidco", "dgc:sample_fraction=0.05", "mstopk"
LONG += (
    "signsgd:group=96",
    "qsgd:levels=15,group=96",
    "qsgd:levels=127",
    "dragonn",
    "hard_threshold:threshold=2.0",
    "micro:threshold=paper",
    "exdyna:threshold=paper",
)
#: of a feedback's steps
RATES = [0.0, 0.05, 0.1, 0.1, 0.07, 0.003, 1e-5, 0.1]
ROWS: dict[str, tuple[Recipe, Scenario]] = {case_id(case): (case.recipe, SCENARIO) for case in CASES}
ROWS |= {f"{text} on {P}": (parse_recipe(text), Scenario(P, n, num_steps=T)) for text, (P, n, T) in MORE}
for _text in LONG:
    _density = 1.0 if _text.startswith(("sign", "qsgd")) else 0.05
    _made = parse_recipe(f"{_text}{',' if ':' in _text else ':'}density={_density}")
    ROWS[f"long {_text}"] = _made, Scenario(2, 6000, num_steps=16)


def uneven(generator: np.random.Generator, shape: Any) -> np.ndarray:
    """One part of a bucket has most of what is large, as layers do."""
    drawn = dyadic(generator, shape) ** 3
    drawn[..., : shape[-1] // 8] *= 8.0
    return drawn


def found(name: str) -> list[list[list[float]]]:
    """Returns of each step the sum's indices (of a whole sum none), its values, and its facts by name."""
    (made, scenario), is_long = ROWS[name], name.startswith("long ")
    gradients = random_gradients(scenario, dyadic if scenario is SCENARIO else uneven)
    rates = RATES if "feedback=" in name and scenario is not SCENARIO else None
    sums: list[Any] = [step.sums[0] for step in run(made, scenario, gradients, rates=rates).steps]
    return [
        [
            [one.indices.size] if is_long else [] if getattr(one, "whole", False) else one.indices.tolist(),
            [float(f"{value:.7g}") for value in ([one.values.sum()] if is_long else one.values)],
            [float(f"{one.facts[name]:.7g}") for name in sorted(one.facts)],
        ]
        for one in sums
    ]


@pytest.mark.parametrize("name", ROWS)
def test_sums_are_those_of_the_recorded_run(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert name in recorded, "a new row: record its run by the command above"
    for (indices, *numbers), (wanted, *expected) in zip(found(name), recorded[name], strict=True):
        assert indices == wanted
        for one, other in zip(numbers, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blocks", [(5, -5, 0), (0, 6, -6)])
def test_other_bounds_on_one_rank_are_found_out_by_all(blocks: tuple[int, ...]) -> None:
    found = 0
    for rank in range(3):
        cluster, generator = SimulatedCluster(recipe("exdyna", density=0.1), 600, 3), np.random.default_rng(1)
        steps = generator.standard_normal((5, 3, 600)).astype(np.float32)
        for step in steps[:4]:
            cluster.step(list(step))
        state = cluster.buckets[rank].state
        moved = state.partitions.num_blocks + np.array(blocks)
        partitions = replace(state.partitions, num_blocks=moved)
        cluster.buckets[rank].state = replace(state, partitions=partitions)
        ends = cluster.synchronize(list(steps[4]), keep_errors=True)
        errors = [end for end in ends if isinstance(end, StateMismatchError)]
        assert len(errors) in (0, 3)
        found += bool(errors)
        if not errors:
            assert np.unique(ends[0].indices).size == ends[0].indices.size
    assert found


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(found(name))}" for name in ROWS)
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
