"""What scripts/bench passes measures, and the memory that passes take beside residual and moments."""

import json
import tracemalloc

import pytest
import torch
import torch.distributed as dist

from benchmarks import passes
from horovod_sparse import ddp


def test_it_runs(tmp_path):
    file = tmp_path / "result.json"
    assert passes.main(["--elements", "20000", "--repeat", "1", "--json", str(file)]) == 0
    names = [timing["name"] for timing in json.loads(file.read_text())["timings"]]
    assert names[0] == "torch: fused AdamW" and names[-1] == "pass: SGD, every=1, delay=1"


@pytest.mark.parametrize("name", passes.OPTIMIZERS)
@pytest.mark.parametrize(("every", "delay"), [(1, 0), (4, 0), (1, 2)])
def test_passes_take_no_more_memory_of_size_n(name, every, delay):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for width in (10, 1000):  # kernels and modules take memory in the first training
            tracemalloc.start()
            net = torch.nn.Linear(width, width, bias=False)
            optimizer = passes.OPTIMIZERS[name][0](net.parameters())
            ddp.attach(net, "best:density=0.01", optimizer, every=every, delay=delay, check_every=0)
            for _ in range(8):
                net.weight.grad = torch.randn(width, width)
                optimizer.step()
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        # the host's residual, and the second moment or velocity: NumPy tells of its memory
        assert 2.0 <= most / 4_000_000 < 2.75  # 12 k bytes a move
    finally:
        dist.destroy_process_group()
