"""Draws docstrings, error messages or names of the package at random, for a reader who has not seen the code.

A reader gets the draw alone, and writes what each function does, or what a user has to do after each error.
CONTRIBUTING.md says how many of them have to be right.
"""

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[3] / "horovod_sparse"
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Yields every node of these kinds in the package, with its module's path; methods get an `owner`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            members: list[Any] = node.body if isinstance(node, ast.ClassDef) else []
            for member in members:
                member.owner = f"{node.name}."
            if isinstance(node, kinds):
                yield str(path.relative_to(PACKAGE)), node


def signature(node: Any) -> str:
    """Returns a class' name, or a function's name, after its class', with arguments and result type."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{getattr(node, 'owner', '')}{node.name}({ast.unparse(node.args)}){result}"


def docstrings() -> list[str]:
    """Returns the first paragraphs of docstrings, with their signatures."""
    texts = ((path, node, ast.get_docstring(node)) for path, node in nodes(*NAMED))
    firsts = ((path, node, text.split("\n\n")[0].replace("\n", " ")) for path, node, text in texts if text)
    return [f"{path}: {signature(node)}\n    {first}" for path, node, first in firsts]


def errors() -> list[str]:
    """Returns raised exceptions with a message, as source text with the value of `allowed`."""
    texts, known = list[str](), dict[str, Any]()  # `allowed` by path
    for path, node in sorted(nodes(ast.Assign, ast.Raise), key=lambda one: (one[0], one[1].lineno)):
        if isinstance(node, ast.Assign):
            known |= {path: node.value} if ast.unparse(node.targets[0]) == "allowed" else {}
        elif isinstance(node.exc, ast.Call) and node.exc.args:
            node.exc.args = [known.get(path, a) if ast.unparse(a) == "allowed" else a for a in node.exc.args]
            texts.append(f"{path}: {ast.unparse(node.exc)}")
    return texts


def names(public: bool) -> list[str]:
    """Returns signatures of public functions and classes, or of those whose name begins with `_`."""
    named = ((path, node) for path, node in nodes(*NAMED) if node.name[:2] != "__")
    return [f"{path}: {signature(node)}" for path, node in named if (node.name[0] != "_") == public]


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
