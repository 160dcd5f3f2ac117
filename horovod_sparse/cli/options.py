"""Quantities that subcommands read from the command line: times, bandwidths, counts."""

from __future__ import annotations

import argparse
import math
import re
from functools import partial

from horovod_sparse.checks import whole_number

_MOST = 10**9
_POWERS = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BITS = {f"{prefix}{word}": 10.0**power for word in ("bit", "bps") for prefix, power in _POWERS.items()}
_COUNTS = {"b": 1e9, **{prefix: 10.0**power for prefix, power in _POWERS.items()}}


def _quantity(text: str, units: dict[str, float], what: str) -> float:
    """Reads a number with its unit, which is never guessed."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", text.lower())
    try:
        value = float(match[1]) * units[match[2]] if match else -1.0
    except (KeyError, ValueError):
        value = -1.0
    if not 0.0 < value < math.inf:
        wrong = "has no unit" if match and not match[2] and "" not in units else "is no number above 0"
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}, with {what}")
    return value


positive = partial(_quantity, units={"": 1.0}, what="no unit")
time = partial(_quantity, units=_SECONDS, what="s, ms, us or ns behind it, as in 50us")
num_parameters = partial(_quantity, units=_COUNTS, what="k, M or B behind it, as in 124M, or nothing")


def bits_per_second(text: str) -> float:
    if re.search(r"[0-9]\s*[kMGTmgt]?B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is in bytes: write bits, as in 25gbit or 25Gbps")
    return _quantity(text, _BITS, "kbit, mbit, gbit or tbit behind it, as in 25gbit or 25Gbps")


def count(text: str) -> int:
    if not 1 <= whole_number(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no whole number from 1 to {_MOST:,}")
    return whole_number(text)
