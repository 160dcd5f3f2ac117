"""What the doctor says: findings, each with what, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

from horovod_sparse.cli.console import show
from horovod_sparse.errors import ArgumentError

#: from bad to good, with the sign and the style of each
LEVELS = {"problem": ("x", "bold red"), "advice": ("!", "yellow"), "good": ("+", "green")}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: "problem" (something fails, or is slow for no reason), "advice" or "good".
        topic: a word or two: "cycle time".
        what: was found.
        why: it matters; empty for what is good.
        do: what to do; likewise.
    """

    level: str
    topic: str
    what: str
    why: str = ""
    do: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ArgumentError("level", self.level, f"one of {', '.join(LEVELS)}")
        if self.level != "good" and not (self.why and self.do):
            raise ArgumentError("why and do", (self.why, self.do), "both, for what is not good")


def good(topic: str, what: str) -> Finding:
    """What is as it should be."""
    return Finding("good", topic, what)


def advice(topic: str, what: str, why: str, do: str) -> Finding:
    """What could be better."""
    return Finding("advice", topic, what, why, do)


def problem(topic: str, what: str, why: str, do: str) -> Finding:
    """What is wrong."""
    return Finding("problem", topic, what, why, do)


def print_findings(to: Console, findings: Iterable[Finding]) -> None:
    """Problems first, then advice, then what is good; each with its reason and remedy.

    Args:
        to: where to.
        findings: in any order; the order within a level is kept.
    """
    found = sorted(findings, key=lambda finding: list(LEVELS).index(finding.level))
    for finding in found:
        sign, style = LEVELS[finding.level]
        show(to, f"{sign} {finding.topic}: {finding.what}", style)
        if finding.why:
            show(to, f"    why  {finding.why}")
            show(to, f"    do   {finding.do}")
    counts = {level: sum(finding.level == level for finding in found) for level in LEVELS}
    problems, advised = counts["problem"], counts["advice"]
    text = f"{problems} problem{'' if problems == 1 else 's'}, {advised} piece{'' if advised == 1 else 's'}"
    show(to, f"{text} of advice, {counts['good']} good", "bold")
