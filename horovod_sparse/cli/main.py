"""The command `horovod-sparse`: measure a cluster, and look for mistakes."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

from horovod_sparse import __version__
from horovod_sparse.errors import HorovodSparseError

#: name -> (module, one line); a module is imported only if it is the one that runs
SUBCOMMANDS = {
    "calibrate": ("calibrate", "measure the time of collectives and of selection, under a launch"),
    "worth-it": ("worth_it", "what a step takes dense, in float16 and sparse, by arithmetic"),
    "doctor": ("doctor", "what this installation and its settings have wrong"),
}


class _Parser(argparse.ArgumentParser):
    """Answers a wrong argument with the error and where help is, in place of the whole usage."""

    def error(self, message: str) -> NoReturn:
        _refuse(self.prog, message)
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
        return _refuse(f"horovod-sparse {chosen}", f"{type(error).__name__}: {error}")
    except BrokenPipeError:  # whoever read this has gone, as `head` does
        return 0
    except (OSError, UnicodeDecodeError) as error:
        return _refuse(f"horovod-sparse {chosen}", f"a file cannot be read or written: {error}")


def _refuse(command: str, reason: str) -> int:
    """Prints what is wrong, with the rank under a launch, and returns the exit code."""
    from horovod_sparse.cli.launch import rank_words  # which help does without

    print(f"{rank_words()}{command}: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return 2
