"""The command `horovod-sparse`, which runs `worth-it`, `calibrate` or `doctor`."""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from horovod_sparse import __version__
from horovod_sparse.checks import whole_number
from horovod_sparse.errors import HorovodSparseError

#: name -> (module, one line); a module is imported only if it is the one that runs
SUBCOMMANDS = {
    "calibrate": ("calibrate", "measure the time of collectives and of selection, under a launch"),
    "worth-it": ("worth_it", "what a step takes dense, in float16 and sparse, by arithmetic"),
    "doctor": ("doctor", "what this installation and its settings have wrong"),
}


class _Parser(argparse.ArgumentParser):
    """Prints one line about a wrong argument and one about --help, instead of argparse's whole usage."""

    def error(self, message: str) -> NoReturn:
        _print_failure(self.prog, message)
        self.exit(2, f"see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(prog="horovod-sparse", description=__doc__, epilog="Every subcommand has --help.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    chosen = next((word for word in words if word in SUBCOMMANDS), None)
    for name, (module, text) in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            subcommand = importlib.import_module(f"horovod_sparse.cli.{module}")
            subcommand.add_arguments(subparser)
    options = parser.parse_args(words)
    try:
        return int(subcommand.run(options))
    except HorovodSparseError as error:
        return _print_failure(f"horovod-sparse {chosen}", f"{type(error).__name__}: {error}")
    except BrokenPipeError:  # the reader of stdout has ended, as `head` does
        return 0
    except (OSError, UnicodeDecodeError) as error:
        return _print_failure(f"horovod-sparse {chosen}", f"a file cannot be read or written: {error}")


def _print_failure(command: str, reason: str) -> int:
    """Prints why a command failed, with the rank if it was launched, and returns the exit code 2."""
    from horovod_sparse.cli.launch import rank_prefix  # which help does without

    print(f"{rank_prefix()}{command}: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return 2


_MOST = 10**9
_POWERS = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BITS = {f"{prefix}{word}": 10.0**power for word in ("bit", "bps") for prefix, power in _POWERS.items()}
_COUNTS = {"b": 1e9, **{prefix: 10.0**power for prefix, power in _POWERS.items()}}


def _quantity(text: str, units: dict[str, float], what: str) -> float:
    """Returns the number that a text with a unit means; raises if it has no unit."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)(?:/s)?\s*", text.lower())
    try:
        value = float(match[1]) * units[match[2]] if match else -1.0
    except (KeyError, ValueError):
        value = -1.0
    if not 0.0 < value < math.inf:
        wrong = "has no unit" if match and not match[2] and "" not in units else "is no number above 0"
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}: give one with {what}")
    return value


positive = partial(_quantity, units={"": 1.0}, what="no unit, as in 180")
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
