"""Which names of the package are public, read from its source without importing a framework."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _algorithms() -> dict[str, str]:
    """Returns the class of every algorithm by its module, as the table of sparsifiers names them."""
    body = ast.parse((ROOT / "horovod_sparse" / "sparsifiers" / "__init__.py").read_text("utf-8")).body
    (table,) = [
        node.value for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    return {f"horovod_sparse.sparsifiers.{file}": name for file, name in ast.literal_eval(table).items()}


ALGORITHMS = _algorithms()
#: pages of the reference: file, title, and the modules whose public names are on it
PAGES = {
    "torch": ("PyTorch", ["horovod_sparse.torch"]),
    "tensorflow": ("TensorFlow", ["horovod_sparse.tensorflow", "horovod_sparse.tensorflow.elastic"]),
    "keras": (
        "Keras",
        [
            "horovod_sparse.tensorflow.keras",
            "horovod_sparse.tensorflow.keras.callbacks",
            "horovod_sparse.tensorflow.keras.elastic",
        ],
    ),
    "ddp": ("DistributedDataParallel", ["horovod_sparse.ddp", "horovod_sparse.trainers"]),
    "telemetry": ("Telemetry", ["horovod_sparse.telemetry"]),
    "errors": ("Errors", ["horovod_sparse.errors"]),
    "sparsifiers": ("Sparsifiers", ["horovod_sparse.sparsifiers", *ALGORITHMS]),
    "feedback": ("Feedback and recipes", ["horovod_sparse.feedback"]),
    "merging": ("Plans and their costs", ["horovod_sparse.merging"]),
    "simulation": ("Simulation", ["horovod_sparse.simulation", "horovod_sparse.topology"]),
    "extending": (
        "For new algorithms",
        [
            "horovod_sparse.arrays",
            "horovod_sparse.collectives",
            "horovod_sparse.thresholds",
            "horovod_sparse.wire",
        ],
    ),
    "package": ("The package itself", ["horovod_sparse"]),
}
#: packages that export names to the rest of this one, not to users
INTERNAL = tuple(f"horovod_sparse.{name}" for name in ("kernels", "planning", "tensors", "training"))


def public_names(module: str) -> list[str]:
    """Returns a module's public names, in its own order.

    A module offers its own classes, functions and constants without an underscore; a package, or one that has
    none of these, what it imports "as" itself, too.
    """
    if module in ALGORITHMS:
        return [ALGORITHMS[module]]
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = [name for node in body for name in _defined(node)]
    if path.name == "__init__.py" or not names:
        # those that are loaded when they are asked for are named for type checkers
        given = [inner for node in body for inner in (node.body if isinstance(node, ast.If) else [node])]
        imported = [alias for node in given if isinstance(node, ast.ImportFrom) for alias in node.names]
        names = [alias.name for alias in imported if alias.asname == alias.name] + names
    return [name for name in names if not name.startswith("_") or name == "__version__"]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def forgotten() -> list[str]:
    """Packages that export names and are on no page, nor said to be internal: to be empty."""
    listed = {module for _, modules in PAGES.values() for module in modules}
    found = []
    for path in sorted((ROOT / "horovod_sparse").rglob("__init__.py")):
        module = ".".join(path.parent.relative_to(ROOT).parts)
        inside = any(module == name or module.startswith(name + ".") for name in INTERNAL)
        # what a part of a listed package exports, that package exports
        part = any(module.startswith(name + ".") for name in listed if name != "horovod_sparse")
        if module not in listed and not inside and not part and public_names(module):
            found.append(module)
    return found
