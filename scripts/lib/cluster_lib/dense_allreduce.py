"""How long Horovod's dense allreduce takes on a cluster: the figure that sparse ones are held against.

scripts/cluster run --gloo -- python scripts/lib/cluster_lib/dense_allreduce.py [ELEMENTS] [REPEATS]
"""

import json
import resource
import statistics
import sys
import time

import horovod.torch as hvd
import torch


def main(num_elements: int = 25_000_000, repeats: int = 3) -> None:
    """Allreduce that many float32 that often; rank 0 prints seconds, wall and CPU, and checks the sum."""
    torch.set_num_threads(1)
    hvd.init()
    size = hvd.size()
    gradient = torch.empty(num_elements)
    wall_s, cpu_s = [], []
    # The first one pays for connections and for Horovod's buffer.
    for repeat in range(repeats + 1):
        gradient.fill_(hvd.rank() + 1)
        hvd.barrier()
        started, cpu_started = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        hvd.allreduce_(gradient, name="gradient", op=hvd.Sum)
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        if repeat:
            wall_s.append(time.perf_counter() - started)
            cpu_s.append(cpu.ru_utime + cpu.ru_stime - cpu_started.ru_utime - cpu_started.ru_stime)
        if (gradient != size * (size + 1) / 2).any():
            raise ArithmeticError(f"the allreduce of {size} ranks gave a wrong sum")
    if hvd.rank() == 0:
        facts = {
            "ranks": size,
            "elements": num_elements,
            "median_s": round(statistics.median(wall_s), 3),
            "wall_s": [round(seconds, 3) for seconds in wall_s],
            "cpu_s_of_rank_0": [round(seconds, 3) for seconds in cpu_s],
        }
        print(json.dumps(facts), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(*(int(float(argument)) for argument in sys.argv[1:]))
