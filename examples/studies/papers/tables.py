"""Tables of docs/papers and of docs/reproduced.md, between their marks."""

from __future__ import annotations

from typing import Any

import numpy as np

from studies import results
from studies.papers import counts, sixteen, trainings

DOCS = results.DOCUMENT.parent


def ranks(result: dict[str, Any]) -> str:
    """ExDyna's Fig. 8: scores on the way, and the union."""
    setting, rows = result["setting"], []
    for name, run in result["runs"].items():
        label = "dense" if name == "dense" else f"P = {name.partition('/')[2]}"
        places = [len(run["scores"]) // 3, 2 * len(run["scores"]) // 3, -1]
        scores = [f"{run['scores'][place]:.1%}" for place in places]
        rows.append([label, *scores, "-" if name == "dense" else f"{run['union'] / setting['density']:.3f}"])
    steps = next(iter(result["runs"].values()))["steps"]
    shown = [f"step {steps[place]}" for place in (len(steps) // 3, 2 * len(steps) // 3, -1)]
    return results.markdown(["ExDyna", *shown, "union / asked"], rows)


def workers(result: dict[str, Any]) -> str:
    """SparDL's Fig. 12: words and predicted times at three numbers of workers."""
    sizes, shown, rows = result["setting"]["sizes"], (5, 8, 14), []
    for name, found in result["sizes"].items():
        cells = [found[sizes.index(size)] for size in shown]
        rows.append(
            [
                f"`{name}`",
                *(f"{cell['received']:.2f}" if cell else "-" for cell in cells),
                *(f"{1e3 * cell['seconds']:.0f}" if cell else "-" for cell in cells),
            ]
        )
    head = [*(f"words / k, P = {size}" for size in shown), *(f"ms, P = {size}" for size in shown)]
    return results.markdown(["counted and predicted", *head], rows)


def teams(result: dict[str, Any]) -> str:
    """SparDL's Figs. 13 to 15: every number of teams."""
    rows = [
        [
            f"P = {size}, {'one team' if name == '1' else name}",
            f"{row['rounds']} ({row['formula_rounds']})",
            f"{row['received']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}" if name[0] == "B" else f"{row['least']:.2f}",
            f"{1e3 * row['seconds']:.1f}",
        ]
        for size, found in result["teams"].items()
        for name, row in found.items()
    ]
    head = ["teams", "rounds (formula)", "words / k, counted", "by the paper's formula", "ms, predicted"]
    return results.markdown(head, rows)


def residuals(result: dict[str, Any]) -> str:
    """SparDL's Fig. 17: score at the end and loss of the last steps, mean and range over the seeds."""
    rows = []
    for number, way in ((2, "2 teams, R-SAG"), (7, "7 teams, B-SAG")):
        for mode in result["setting"]["modes"]:
            found = [run for key, run in result["runs"].items() if key.startswith(f"{number}/{mode}/")]
            scores = [run["scores"][-1] for run in found]
            losses = [float(np.mean(run["losses"][-20:])) for run in found]
            rows.append(
                [
                    f"{way}, {mode}",
                    str(len(found)),
                    f"{np.mean(scores):.2%} ({min(scores):.1%} to {max(scores):.1%})",
                    f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
                ]
            )
    return results.markdown(["residuals", "seeds", "test accuracy", "loss, last 20 steps"], rows)


def merging(result: dict[str, Any]) -> str:
    """OMGS-SGD's rule with nothing selected, beside its sparse plans."""
    tables = results.load(results.MEASUREMENTS / "merging.json")["tables"]
    sparse = {row["model"]: row["strategies"] for row in tables if row["size"] == 16}
    rows = []
    for model, plans in result["merging"].items():
        found = [*plans.values(), sparse[model]["omgs"], sparse[model]["optimal"]]
        rows.append([model, *(f"{plan['seconds']:.2f} ({plan['buckets']})" for plan in found)])
    head = ["seconds (buckets)", "WFBP, dense", "MG-WFBP, dense", "dense, one bucket", "OMGS", "optimal"]
    return results.markdown(head, rows)


#: page, mark, where the numbers are, and what makes the table
FILLED = (
    ("reproduced.md", "papers", sixteen.FILE, sixteen.tables),
    ("papers/exdyna.md", "ranks", trainings.RANKS_FILE, ranks),
    ("papers/omgs.md", "merging", counts.FILE, merging),
    ("papers/spardl.md", "workers", counts.FILE, workers),
    ("papers/spardl.md", "teams", counts.FILE, teams),
    ("papers/spardl.md", "residuals", trainings.TEAMS_FILE, residuals),
)


def fill() -> None:
    """Writes every table."""
    for page, name, file, make in FILLED:
        path = DOCS / page
        text = results.with_table(path.read_text("utf-8"), name, make(results.load(file)))
        path.write_text(text, "utf-8")
