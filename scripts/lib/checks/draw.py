"""Draws docstrings, error messages or names of the package at random, for a reader who has not seen the code.

A reader gets the draw alone, and writes what each function does, or what a user has to do after each error.
CONTRIBUTING.md says how many of them have to be right.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "horovod_sparse"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package, by its path."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def signature(node: ast.AST) -> str:
    """A class' name, or a function's name, arguments and result."""
    if isinstance(node, FUNCTIONS):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{node.name}({ast.unparse(node.args)}){result}"
    assert isinstance(node, ast.ClassDef)
    return f"class {node.name}"


def docstrings() -> list[str]:
    """First paragraphs of docstrings, with their signatures."""
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and (text := ast.get_docstring(node)):
                first = text.split("\n\n")[0].replace("\n", " ")
                found.append(f"{path}: {signature(node)}\n    {first}")
    return found


def errors() -> list[str]:
    """Exceptions that the package raises with a message, as their source text."""
    nodes = ((path, node) for path, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return [
        f"{path}: {ast.unparse(node.exc)}"
        for path, node in nodes
        if isinstance(node.exc, ast.Call) and node.exc.args
    ]


def names(public: bool) -> list[str]:
    """Functions and classes with their signatures: public ones, or those whose name begins with `_`."""
    nodes = ((path, node) for path, tree in trees() for node in ast.walk(tree))
    return [
        f"{path}: {signature(node)}"
        for path, node in nodes
        if isinstance(node, (*FUNCTIONS, ast.ClassDef))
        and node.name[:2] != "__"
        and (node.name[0] != "_") == public
    ]


def main() -> None:
    """Prints the draw, numbered."""
    kinds = {
        "docstrings": docstrings,
        "errors": errors,
        "public": lambda: names(True),
        "private": lambda: names(False),
    }
    parser = argparse.ArgumentParser(prog="scripts/check draw", description=__doc__)
    parser.add_argument("kind", choices=kinds, help="what to draw; public and private: names")
    parser.add_argument("--count", type=int, default=60, help="how many to draw (default %(default)s)")
    parser.add_argument("--seed", type=int, required=True, help="draws with other seeds differ")
    options = parser.parse_args()
    for number, text in enumerate(
        random.Random(options.seed).sample(kinds[options.kind](), options.count), 1
    ):
        print(f"{number}. {text}\n")


if __name__ == "__main__":
    main()
