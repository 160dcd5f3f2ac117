"""Measurements as tables in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table, whose first column holds words, the others numbers.

    Example:
        >>> print(markdown(["", "ms"], [["fold", "9.5"]]))
        |  | ms |
        |---|---:|
        | fold | 9.5 |
    """
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(head) - 1))
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """Returns milliseconds as text with three digits, at most one after the point."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def circumstances(result: Mapping[str, Any]) -> str:
    """Returns a line with the command, and the machine on which it ran."""
    machine = result.get("machine", {})
    where = (
        f"{machine['cores']} cores, {machine['memory_gib']} GiB"
        if isinstance(machine, dict)
        else str(machine)
    )
    return f"`{result['command']}`; {where}." if "command" in result else f"{where}."


def timings_table(result: Mapping[str, Any]) -> str:
    """Returns a table for one rank: every work beside the baseline, and the memory of a step."""
    baseline, memory = result.get("baseline", "baseline"), result.get("extra_memory")
    facts = f"n = {result['elements']:,}, density {result['density']}, {result['rounds']} rounds"
    facts += f", {result['clock']} clock; " if "clock" in result else "; "
    facts += circumstances(result)
    if memory is not None:
        facts += f" Memory beyond residual and gradient: {memory:.1%} (budget 5 %)."
    for name, count in result.get("bytes_per_parameter", {}).items():
        facts += f"\n{name} keeps {count} bytes per parameter."
    rows = []
    for item in result["timings"]:
        budget = item.get("budget")
        low, high = item["quartiles_ms"]
        verdict = "" if budget is None else ("met" if item["ratio"] <= budget else "**missed**")
        times = f"{low:.2f} to {high:.2f}"
        limit = "" if budget is None else f"{budget:g}"
        rows.append([item["name"], f"{item['median_ms']:.2f}", times, f"{item['ratio']:.2f}", limit, verdict])
    table = markdown(["", "median ms", "quartiles", f"by {baseline}", "budget", ""], rows)
    return f"{facts}\n\n{table}"


def launch_tables(result: Mapping[str, Any]) -> str:
    """Returns a table per launch of `scripts/bench sync` or `train`."""
    blocks = [circumstances(result)]
    for launch in result["launches"]:
        blocks.append(
            f"**{launch['ranks']} hosts, {launch['rate']}, {launch['network']}**, "
            f"load {launch['load_before']} before."
        )
        blocks.append(_launch_table(launch))
    return "\n\n".join(blocks)


def _launch_table(launch: Mapping[str, Any]) -> str:
    by_name = {item["method"]: item["seconds"]["median"] for item in launch["results"]}
    parts = [name for name in launch["results"][-1]["parts"] if name != "other"]
    references = [name for name in ("dense", "naive") if name in by_name]
    rows = []
    for item in launch["results"]:
        seconds = item["seconds"]
        rows.append(
            [
                item["method"],
                milliseconds(seconds["median"]),
                f"{milliseconds(seconds['low'])} to {milliseconds(seconds['high'])}",
                *(milliseconds(item["parts"].get(name, 0.0)) for name in parts),
                milliseconds(item["cpu_seconds"]["median"]),
                milliseconds(item["own_cpu_seconds"]["median"]),
                f"{item['bytes_sent'] / 1e3:,.0f}",
                f"{item['facts'].get('density_union', 1.0):.5f}",
                milliseconds(item["facts"]["waited_seconds"]) if "waited_seconds" in item["facts"] else "",
                *(f"{by_name[name] / seconds['median']:.1f}" for name in references),
            ]
        )
    header = ["", "ms", "quartiles", *parts, "CPU", "own CPU", "kB sent", "union", "waited"]
    return markdown([*header, *(f"{name} / it" for name in references)], rows)


def hosts_table(result: Mapping[str, Any]) -> str:
    """Returns a table of predicted and measured iterations, for `scripts/bench merging`."""
    rows = []
    for row in result["results"]:
        times = row["seconds"]
        rows.append(
            [
                row["method"],
                str(row["buckets"]),
                str(row["dense"]),
                f"{1e3 * row['predicted_seconds']:.1f}",
                f"{1e3 * times['median']:.1f}",
                f"{1e3 * times['low']:.1f} to {1e3 * times['high']:.1f}",
                f"{row['error']:+.1%}",
            ]
        )
    header = ["plan", "buckets", "dense", "predicted ms", "measured ms", "quartiles", "prediction off by"]
    return markdown(header, rows)


def matrix_table(result: Mapping[str, Any]) -> str:
    """Versions that `scripts/check matrix` installed, and what passed with them."""
    columns, rows = ("python", "torch", "tensorflow", "keras", "numpy", "numba", "horovod"), []
    for name, corner in result["corners"].items():
        tests = ", ".join(f"`{test}` {count}" for test, count in corner.get("passed", {}).items())
        versions = [corner["versions"].get(column, "-") for column in columns]
        rows.append([name, *versions, str(corner.get("install_seconds", "-")), tests or "**failed**"])
    return markdown(["corner", *columns, "install, s", "tests passed on two ranks"], rows)
