"""Compiles kernels: lazily, cached on disk for one user, without the GIL, by one rank at a time."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

from horovod_sparse.errors import UnsupportedError

try:
    import fcntl
except ImportError:  # no file locks here: ranks then compile side by side, as numba does by itself
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("horovod_sparse")

#: seconds that a process waits for another one's turn before it says so, and before it compiles beside it
_QUIET_SECONDS, _MOST_SECONDS = 5.0, 60.0
_PAUSE_SECONDS = 0.05

_depth = 0
#: locks that this process holds, and files whose lock it has logged to wait for
_locks: set[int] = set()
_logged: set[str] = set()


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function at its first call, and caches it on disk for this machine and argument types.

    Ranks that start together take turns: the first compiles, the others read its result (numba alone lets all
    compile, and two that save *different* specializations at one moment can exchange their code). The cache
    is stale as soon as any kernel file changes that this one uses. Where the package belongs to somebody
    else, its cache is not used: nobody reads code there that others may write.
    """
    if numba.config.DISABLE_JIT:
        return _raise_without_jit
    dispatcher = _dispatcher(function)
    compile_one = dispatcher.compile
    folder = getattr(getattr(dispatcher, "_cache", None), "cache_path", None)
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _stamps_of_files(function)

    def compile_in_turn(signature: Any) -> Any:
        with _cache_lock(folder):
            return compile_one(signature)

    dispatcher.compile = compile_in_turn
    return dispatcher


def _dispatcher(function: Callable[..., Any]) -> Any:
    """Returns numba's dispatcher, with a cache in the user's own folder if the package is another user's."""
    given = numba.config.CACHE_DIR
    if not given and hasattr(os, "getuid") and os.stat(__file__).st_uid != os.getuid():
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        numba.config.CACHE_DIR = os.path.join(caches, "horovod_sparse")
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = given


def _raise_without_jit(*_arguments: Any) -> Any:
    raise UnsupportedError("NUMBA_DISABLE_JIT is set, but host kernels must be compiled: unset it")


def _stamps_of_files(function: Callable[..., Any]) -> tuple[tuple[str, int, int], ...]:
    """Returns name, size and time of change of the kernel files that a function uses: the cache's key."""
    files: dict[str, tuple[int, int]] = {}
    _collect_files(function.__globals__, files)
    return tuple((name, *facts) for name, facts in sorted(files.items()))


def _collect_files(scope: dict[str, Any], files: dict[str, tuple[int, int]]) -> None:
    name = scope["__name__"]
    if name in files:
        return
    stat = os.stat(scope["__file__"])
    files[name] = stat.st_size, stat.st_mtime_ns
    package = __name__.rpartition(".")[0] + "."
    for value in list(scope.values()):
        used = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(used, str) and used.startswith(package) and used in sys.modules:
            _collect_files(vars(sys.modules[used]), files)


@contextlib.contextmanager
def _cache_lock(folder: str | None) -> Iterator[None]:
    """Holds the cache folder's file lock; reentrant, since compiling a kernel compiles its callees."""
    global _depth
    # numba's own lock first, which its threads may already hold when they come here.
    with global_compiler_lock:
        lock = _acquire_lock(folder) if _depth == 0 else None
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if lock is not None:
                _locks.discard(lock)
                os.close(lock)


def _close_inherited_locks() -> None:
    """Closes inherited locks in a forked child (a DataLoader's worker), which would hold them for ever."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited_locks)


def _acquire_lock(folder: str | None) -> int | None:
    if fcntl is None or folder is None:
        return None
    path = os.path.join(folder, "kernels.lock")
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks.add(descriptor)
            return descriptor
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:  # a file system without locks
            break
        if waited > _MOST_SECONDS:
            _log.warning("another process has held %s for %.0f s: compiling all the same", path, waited)
            break
        if waited > _QUIET_SECONDS and path not in _logged:
            _logged.add(path)
            _log.warning("waiting for another process of this user to compile kernels; its lock: %s", path)
        time.sleep(_PAUSE_SECONDS)
    os.close(descriptor)
    return None
