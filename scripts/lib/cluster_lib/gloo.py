"""Start ranks with Horovod's own Gloo launcher, entering a host where Horovod would use ssh.

    gloo.py ADDRESS INTERFACE RANKS HOST:SLOTS,... COMMAND...

Runs on the first host. `launch_gloo` is what horovodrun calls; it keeps the rendezvous server,
places the ranks and makes their environment, and leaves to its caller how a command gets to a host.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.common.util.settings import Settings
from horovod.runner.gloo_run import launch_gloo

_ENTER = str(Path(__file__).resolve().parent / "enter")
# How long a rank may take to end once another has failed.
_PATIENCE_S = 3.0
# How long the others may go on by themselves: the cause is often a rank that ends later.
_GRACE_S = 1.0


class Ranks:
    """Runs the command of each rank on its host; the first failure ends them all."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.first_failure = 0

    def execute(self, command: str, slot: SlotInfo, events: list[threading.Event]) -> tuple[int, float]:
        """Run one rank to its end; called by Horovod in one thread per rank."""
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", _ENTER, slot.hostname, "sh", "-c", f"exec {command}"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        while process.poll() is None:
            if any(event.is_set() for event in events):
                self._end(process)
            elif self.stop.is_set():
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    self._end(process)
            time.sleep(0.02)
        code = process.wait()
        status = 128 - code if code < 0 else code
        with self.lock:
            if status and not self.stop.is_set():
                self.first_failure = status
                self.stop.set()
        return status, time.time()

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(_PATIENCE_S)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def main() -> int:
    """Launch, and return the exit code of the first rank that failed."""
    address, interface, num_ranks, hosts, *command = sys.argv[1:]
    ranks = Ranks()
    settings = Settings(hosts=hosts, num_proc=int(num_ranks), verbose=0)
    try:
        # Nothing to add to the environment: the ranks inherit this process's.
        launch_gloo(command, ranks.execute, settings, [interface], {}, address)
    except RuntimeError:
        # How Horovod says that a rank failed, or was ended because of a signal to this process.
        return ranks.first_failure or 1
    return ranks.first_failure


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # The rendezvous server's thread would keep the interpreter waiting.
    os._exit(status)
