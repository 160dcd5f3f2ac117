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
    num_elements = 1_000_000
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tracemalloc.start()
    try:
        net = torch.nn.Linear(1000, 1000, bias=False)
        optimizer = passes.OPTIMIZERS[name][0](net.parameters())
        ddp.attach(net, "best:density=0.01", optimizer, every=every, delay=delay, check_every=0)
        for _ in range(8):
            net.weight.grad = torch.randn(1000, 1000)
            optimizer.step()
        # the host's residual, and the second moment or velocity: NumPy tells of its memory
        assert 2.0 <= tracemalloc.get_traced_memory()[1] / (4 * num_elements) < 2.75  # 12 k bytes a move
    finally:
        tracemalloc.stop()
        dist.destroy_process_group()
