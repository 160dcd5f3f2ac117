"""What the doctor makes of Horovod's environment variables, and of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horovod_sparse.carriers.shared_memory import MEMORY_VARIABLE
from horovod_sparse.carriers.transport_choice import TRANSPORT_VARIABLE, WAYS
from horovod_sparse.checks import whole_number
from horovod_sparse.cli.doctor.facts import SETTINGS, Finding, advice, good, problem
from horovod_sparse.training.host_topology import RANKS_VARIABLE
from horovod_sparse.training.settings import EVERY_VARIABLE, POLICIES, POLICY_VARIABLE

Facts = Mapping[str, Any]

#: set by launchers for each rank
_OWN = (
    "RANK",
    "SIZE",
    "HOSTNAME",
    "GLOO",
    "CONTROLLER",
    "SECRET",
    "RENDEZVOUS",
    "LOCAL",
    "CROSS",
    "JOB",
    "NUM_PROC",
)


def is_own(name: str) -> bool:
    """Whether launchers set this variable, for every rank its own."""
    rest = name.removeprefix("HOROVOD_")
    return any(rest.startswith(word) for word in _OWN)


def check_settings(facts: Facts) -> Iterator[Finding]:
    """Horovod's environment variables, except cycle time and cache."""
    settings = facts["settings"]
    if _is_on(settings.get("HOROVOD_AUTOTUNE")):
        yield advice(
            "autotune",
            "HOROVOD_AUTOTUNE is on",
            "it counts the bytes of allreduces only, so with sparsified gradients it tunes for next to "
            "nothing, and changes cycle time and fusion while it tries",
            "unset HOROVOD_AUTOTUNE, and set HOROVOD_CYCLE_TIME yourself",
        )
    else:
        yield good("autotune", "off")
    if _is_on(settings.get("HOROVOD_STALL_CHECK_DISABLE")):
        yield advice(
            "stall check",
            "HOROVOD_STALL_CHECK_DISABLE is set",
            "a rank that fails leaves the others waiting, and nothing says for what",
            "unset it",
        )
    elif (after := _number(settings.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"), facts["gives_up"])) <= 0.0:
        warned = _number(settings.get("HOROVOD_STALL_CHECK_TIME_SECONDS"), 60.0)
        yield advice(
            "stall check",
            f"warns after {warned:g} s and never ends a run",
            "a collective that one rank does not join holds the others for ever",
            "set HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, to 300 for instance",
        )
    else:
        yield good("stall check", f"ends a run after {after:g} s")
    if settings.get("HOROVOD_FUSION_THRESHOLD") == "0":
        yield advice(
            "fusion",
            "HOROVOD_FUSION_THRESHOLD=0",
            "messages that wait together go one by one, and each pays the network's latency",
            "unset it (128 MiB), or set it to some MiB",
        )
    if settings.get("HOROVOD_TIMELINE"):
        yield advice(
            "timeline",
            f"HOROVOD_TIMELINE={settings['HOROVOD_TIMELINE']}",
            "writing it takes time in every cycle",
            "unset it once you have seen enough (horovod-sparse plan --timeline reads it)",
        )
    yield from _own_values(settings)
    for name in settings:
        near = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.88)
        if name not in SETTINGS and near and not is_own(name):
            yield advice(
                "settings", f"{name} is set", f"Horovod does not know it; it knows {near[0]}", "rename it"
            )


def _own_values(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Values of our own variables that an optimizer, or its first exchange, will refuse."""
    steps = settings.get(EVERY_VARIABLE, "").strip()
    ranks = settings.get(RANKS_VARIABLE, "").strip()
    allowed = {
        EVERY_VARIABLE: (
            not steps or whole_number(steps) >= 0,
            "replicas",
            "a number of steps, or 0 for never",
        ),
        POLICY_VARIABLE: (_one_of(settings, POLICY_VARIABLE, POLICIES), "replicas", ", ".join(POLICIES)),
        RANKS_VARIABLE: (not ranks or whole_number(ranks) > 0, "levels", "a number of ranks, from 1"),
        MEMORY_VARIABLE: (
            _one_of(settings, MEMORY_VARIABLE, ("0", "1")),
            "shared memory",
            "1, or 0 for messages within a host, too",
        ),
        TRANSPORT_VARIABLE: (_one_of(settings, TRANSPORT_VARIABLE, WAYS), "transport", ", ".join(WAYS)),
    }
    for name, (fine, topic, advised) in allowed.items():
        if not fine:
            yield problem(topic, f"{name}={settings[name]}", "the training will begin with an error", advised)


def _one_of(settings: Mapping[str, str], name: str, values: Sequence[str]) -> bool:
    return settings.get(name, "").strip() in ("", *values)


def _is_on(text: str | None) -> bool:
    return text is not None and text.strip().lower() not in ("", "0", "false")


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        return default
