#!/usr/bin/env python3
"""Counts what a reader has to learn: files, lines, words, imports, and what a step of PyTorch crosses."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "horovod_sparse"
#: what is counted, and its limit: a commit that lowers a figure lowers its limit, and none raises one
LIMITS = ROOT / "scripts" / "lib" / "checks" / "house.json"
#: how far a figure may be below its limit before the limit has to follow
SLACK = 0.01


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: neither blank, nor comment, nor docstring."""
    lines: set[int] = set()
    fresh = True  # at the beginning of a statement
    quiet = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            fresh = True
        elif token.type not in quiet and token.type != tokenize.ENDMARKER:
            if not (fresh and token.type == tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
            fresh = False
    return lines


def import_lines(text: str) -> int:
    """Lines of import statements and of `__all__`."""
    return sum(
        match[0].count("\n") + 1
        for match in re.finditer(r"^ *(?:from [\w.]+ import|import) (?:\([^)]*\)|[^\n]*)", text, re.MULTILINE)
    ) + sum(match[0].count("\n") + 1 for match in re.finditer(r"^__all__ = \[[^\]]*\]", text, re.MULTILINE))


def crossed() -> tuple[int, int]:
    """Files of the package that one step of top-k in PyTorch runs through, and moves between them."""
    os.environ.setdefault("HOROVOD_ELASTIC", "1")  # one rank synchronizes, too
    sys.path.insert(0, str(ROOT))
    import torch

    import horovod_sparse.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.topk(density=0.1),
        tensor_selection="all",  # it would stay dense otherwise
    )
    inputs = torch.randn(4, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    files: set[str] = set()
    stack, moves = [""], 0

    def look(frame: object, event: str, _argument: object) -> None:
        nonlocal moves
        if event not in ("call", "return"):
            return
        name = frame.f_code.co_filename  # type: ignore[attr-defined]
        if not name.startswith(str(PACKAGE)):
            return
        if event == "call":
            files.add(name)
            moves += name != stack[-1]
            stack.append(name)
        elif len(stack) > 1:
            stack.pop()

    sys.setprofile(look)
    step()
    sys.setprofile(None)
    hvd.shutdown()
    return len(files), moves


def loaded() -> int:
    """Modules of the package that `import horovod_sparse.torch` loads, in a process of its own."""
    code = "import sys, horovod_sparse.torch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return sum(name.partition(".")[0] == "horovod_sparse" for name in done.stdout.split())


def words() -> int:
    """Counts the words of README.md and docs, without the appendix, which a command writes."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text().split()) for page in pages if "appendix" not in page.parts)


def measured() -> dict[str, float]:
    """Returns every figure, by its name."""
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    code = sum(len(code_lines(text)) for text in texts.values())
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    files, moves = crossed()
    signatures = sum(len(re.findall(r"^ +levels: str\b", text, re.MULTILINE)) for text in texts.values())
    return {
        "files of the package": len(texts),
        "lines of the package": sum(text.count("\n") for text in texts.values()),
        "lines of tests": sum(text.count("\n") for text in tests),
        "words of README.md and docs": words(),
        "imports in percent of code lines": round(100 * sum(map(import_lines, texts.values())) / code, 1),
        "modules that importing horovod_sparse.torch loads": loaded(),
        "files that a step of sparse top-k crosses": files,
        "moves between files in that step": moves,
        "lines of topk.py": texts[PACKAGE / "sparsifiers" / "topk.py"].count("\n"),
        "lines of signatures that name `levels`": signatures,
    }


def main() -> int:
    """Prints every figure beside its limit; 1 if `--check` finds one that is out of step."""
    parser = argparse.ArgumentParser(prog="scripts/check house", description=__doc__)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--check", action="store_true", help="fail if a figure is above its limit, or over 1 %% below"
    )
    asked.add_argument("--tighten", action="store_true", help="lower limits to what is reached")
    options = parser.parse_args()
    limits: dict[str, float] = json.loads(LIMITS.read_text())
    found = measured()
    worse = False
    for name, value in found.items():
        limit = limits[name]
        above, loose = value > limit, value < limit * (1 - SLACK)
        worse |= above or loose
        word = "   ABOVE ITS LIMIT" if above else "   run scripts/check house --tighten" if loose else ""
        print(f"{name:50} {value:>8,}   limit {limit:,}{word}")
    if options.tighten:
        limits = {name: min(limits[name], value) for name, value in found.items()}
        LIMITS.write_text(json.dumps(limits, indent=1) + "\n")
    return int(options.check and worse)


if __name__ == "__main__":
    sys.exit(main())
