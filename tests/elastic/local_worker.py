"""A rank that trains with local steps, and kills itself where its task says: ``local_worker.py TASK FOLDER``.

``{"rounds": 12, "delay": 1, "kills": [[taken, collectives, milliseconds], ...]}``: the k-th kill is of rank k
modulo the number of ranks, in a round that has had none, in its step after so many (-1: in the agreement
after a start): before it if `collectives` is -1, or so long after so many collectives, where the next one
begins.
"""

import hashlib
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch.elastic as elastic
import numpy as np
import torch
from torch import nn

import horovod_sparse.torch as hvd
from horovod_sparse.torch import driver
from support.jobs import Diary, without_dynamo

EVERY, SEEDS = 4, 3


class Training:
    """A model whose data no other rank has, and how well its common parameters do on data of none."""

    def __init__(self, seed: int, delay: int) -> None:
        torch.manual_seed(7)
        self.teacher = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3)).requires_grad_(False)
        torch.manual_seed(seed + hvd.rank())  # the first rank's are taken
        self.net = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))
        self.random = np.random.default_rng([seed, os.getpid()])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.local = hvd.LocalSteps(
            self.optimizer, self.net, every=EVERY, delay=delay, compression="topk:density=0.1", check_every=1
        )

    def loss(self, random: np.random.Generator, length: int) -> torch.Tensor:
        inputs = torch.from_numpy(random.standard_normal((length, 20)).astype(np.float32))
        return (self.net(inputs) - self.teacher(inputs)).square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.random, 32).backward()
        self.optimizer.step()

    def told(self) -> dict[str, Any]:
        """Of common parameters, right after an exchange."""
        self.net.eval()
        with torch.no_grad(), self.local.common():
            loss = float(self.loss(np.random.default_rng(1), 4096))
            bits = b"".join(one.detach().numpy().tobytes() for one in self.net.parameters())
        self.net.train()
        return {"loss": loss, "digest": hashlib.sha256(bits).hexdigest()[:12], "round": self.local.step}


class Killer:
    """Ends this process where the task says, once each; see above."""

    def __init__(self, kills: list[list[float]], folder: Path, diary: Diary) -> None:
        self.kills, self.folder, self.diary = kills, folder, diary
        self.last_round, self.next, self.left = -1, 0, -1.0

    def begin_step(self, taken: int, round_: int) -> None:
        done = len(list(self.folder.glob("died.*")))
        if done > self.next:
            self.next, self.last_round = done, round_
        self.left = -1
        due = done < len(self.kills) and done % hvd.size() == hvd.rank() and self.kills[done][0] == taken
        if due and (taken < 0 or round_ != self.last_round):
            self.left = self.kills[done][1]
            if self.left < 0:
                self.die()

    def begin_collective(self) -> None:
        if self.left == 0:
            threading.Timer(self.kills[self.next][2] / 1000, self.die).start()
        self.left -= 1

    def die(self) -> None:
        self.diary.note("dies", number=self.next)
        (self.folder / f"died.{self.next}").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


def main(task: dict[str, Any], folder: Path) -> None:
    without_dynamo()
    torch.set_num_threads(1)
    logging.basicConfig()
    hvd.init()
    diary = Diary(folder)
    killer, start = Killer(task["kills"], folder, diary), driver.HorovodDriver.start_request

    def noticed(*given: Any, **named: Any) -> Any:
        killer.begin_collective()
        return start(*given, **named)

    driver.HorovodDriver.start_request = noticed
    one = Training(0, task["delay"])
    diary.note("begun", rank=hvd.rank(), size=hvd.size())

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        local = one.local
        diary.note("trains", rank=hvd.rank(), round=local.step, taken=local.taken)
        while local.step < task["rounds"]:
            killer.begin_step(local.taken, before := local.step)
            one.step()
            if local.step > before:
                diary.note("exchange", rank=hvd.rank(), size=hvd.size(), life=state.life, **one.told())
        for seed in range(SEEDS):
            other = Training(seed, task["delay"])
            other.local.agree(as_first=True)
            while other.local.step < task["rounds"]:
                other.step()
            diary.note("undisturbed", rank=hvd.rank(), seed=seed, **other.told())

    # who trains on after all who held the state are gone begins another life
    state = elastic.TorchState(local=one.local, life=f"{diary.host}.{os.getpid()}")
    state.register_reset_callbacks([lambda: killer.begin_step(-1, one.local.step)])
    killer.begin_step(-1, 0)
    train(state)
    diary.note("ended")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
