"""Runs loops on two ranks, forked from one process that has imported everything, and notes how each ends.

    python tests/support/pairs.py ddp|horovod [WORDS OF A CASE'S NAME]

A loop that is still running after `SECONDS` is ended. Prints one JSON object a case: see `Verdict`.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

#: others read an error of a rank that could not begin within three seconds
SECONDS, DEADLINE = 60.0, "5"
#: in these words PyTorch itself names what differs
_OF_PYTORCH = "DDP expects same model|appears not to match sizes"
VARIABLES = {
    "HOROVOD_SPARSE_TENSOR_SELECTION": "all",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


def outcome_of(body: Any) -> dict[str, Any]:
    """Carries a loop out, and returns how it ended: a checksum of its parameters, or an error."""
    from horovod_sparse.errors import HorovodSparseError

    try:
        return {"end": body()}
    except BaseException as error:
        ours = isinstance(error, HorovodSparseError) or re.search(f"^of the user$|{_OF_PYTORCH}", str(error))
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "ours": bool(ours)}


def verdict(case: Any, kind: str, ends: list[dict[str, Any]]) -> str:
    """Returns "named", "equal", "inexact" (named in other words), "bare", "silent", or "hung".

    A rank that has come to its end, or was killed, needs no error where the other rank has one. `Case.theirs`
    says over what a rank may end in words of PyTorch's, Gloo's or Horovod's own.
    """
    if any(one.get("hung") for one in ends):
        return "hung"
    if not (errors := [one for one in ends if "error" in one and not one.get("lost")]):
        return "equal" if len({str(one.get("end")) for one in ends}) == 1 else "silent"
    ours = [one for one in errors if one["ours"]]
    if len(ours) < len(errors) and kind not in case.theirs:
        return "bare"
    return "named" if all(re.search(case.words, one["error"]) for one in ours or errors) else "inexact"


def started(rank: int, case: Any, kind: str, folder: Path, variables: dict[str, str]) -> int:
    """Forks one rank, and returns its process."""
    if pid := os.fork():
        return pid
    try:  # nothing of the parent's goes on here
        with open(folder / f"{rank}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(variables | {"HOROVOD_SPARSE_DEADLINE_SECONDS": DEADLINE, "RANK": str(rank)})
        os.environ.update(dict.fromkeys(("LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"), str(rank)))
        found = outcome_of(lambda: case.carried_out(kind, rank, folder))
        (folder / f"{rank}.part").write_text(json.dumps(found))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
        until = time.monotonic() + SECONDS
        # a rank that leaves early would tell the other more than one that is slow
        while "end" in found and not (folder / f"{1 - rank}.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        atexit._run_exitfuncs()
    finally:
        os._exit(0)


def ended(pids: list[int], folder: Path) -> list[dict[str, Any]]:
    """Waits for both ranks, and returns how they ended."""
    until = time.monotonic() + SECONDS
    found: list[dict[str, Any]] = [{"hung": True} for _ in pids]
    for rank, pid in enumerate(pids):
        status = 0
        while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.02)
        if waited[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            status = waited[1]
        if (told := folder / f"{rank}.json").exists():
            found[rank] = json.loads(told.read_text())
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            lost = number in (signal.SIGKILL, signal.SIGTERM)
            found[rank] = {"lost": lost, "error": f"signal {number}", "ours": False}
    return found


def over_horovod() -> dict[str, str]:
    """Starts a rendezvous of two ranks, and returns the variables that lead to it."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(0)
    port = server.start()
    server.init(get_host_assignments(parse_hosts("localhost:2"), 2))
    ranks = {f"HOROVOD_{name}SIZE": "2" for name in ("", "LOCAL_")}
    place = {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_HOSTNAME": "localhost"}
    gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}
    where = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    return ranks | place | gloo | where


def main(kind: str, chosen: str = "") -> None:
    os.environ.update(VARIABLES)
    from support import disagreements

    disagreements.warmed()
    for case in (one for one in disagreements.CASES if kind in one.kinds and re.search(chosen, one.name)):
        folder = Path(tempfile.mkdtemp())
        variables = over_horovod() if kind == "horovod" else {}
        ends = ended([started(rank, case, kind, folder, variables) for rank in (0, 1)], folder)
        logs = [one.read_text()[-2000:] for one in sorted(folder.glob("*.log"))]
        shutil.rmtree(folder)
        found = {"name": case.name, "verdict": verdict(case, kind, ends), "ends": ends, "logs": logs}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(*sys.argv[1:])
