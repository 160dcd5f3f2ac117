"""How a kernel is compiled: lazily, cached on disk, without the GIL, by one rank at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba

try:
    import fcntl
except ImportError:  # no file locks here: ranks then compile side by side, as numba does by itself
    fcntl = None  # type: ignore[assignment]

__all__ = ["kernel"]

_inside = threading.RLock()
_depth = 0


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function at its first call, once per machine and argument types.

    Two things are added to numba's disk cache. Ranks that start together take turns: the first
    compiles, the others read its result (numba alone lets all compile, and two processes that save
    *different* specializations of one function at the same moment can exchange their code). And the
    cache is stale as soon as any kernel file changes, not only the file of this function, since
    kernels inline one another.

    Args:
        function: what numba can compile in nopython mode.

    Returns:
        The numba dispatcher.
    """
    dispatcher = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    compile_one = dispatcher.compile
    folder = getattr(getattr(dispatcher, "_cache", None), "cache_path", None)
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamp()

    def compile_in_turn(signature: Any) -> Any:
        with _turn(folder):
            return compile_one(signature)

    dispatcher.compile = compile_in_turn
    return dispatcher


def _stamp() -> tuple[tuple[str, int, int], ...]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)


@contextlib.contextmanager
def _turn(folder: str | None) -> Iterator[None]:
    """Holds the lock of the cache folder; one kernel compiles another, so it may be entered again."""
    global _depth
    with _inside:
        lock = _lock(folder) if _depth == 0 else None
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if lock is not None:
                os.close(lock)


def _lock(folder: str | None) -> int | None:
    if fcntl is None or folder is None:
        return None
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(os.path.join(folder, "kernels.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor
