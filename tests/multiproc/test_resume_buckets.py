"""DDP adds gradients in one order from the first step on: a step after a resume rounds as it would have without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Four ranks, more than one bucket: the gradients of the very first step against those of the same step taken again,
# with the same weights and data. Plain DDP rearranges its buckets in between.
PROGRAM = """
import hashlib, json, os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from model_check.engine.passes import pin_buckets

def gradients(model, rank):
    torch.manual_seed(rank)
    model.zero_grad(set_to_none=True)
    model(torch.randn(8, 300)).square().mean().backward()
    return hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in model.parameters())).hexdigest()

def rank(number, port, pinned, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=4)
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(300, 300), nn.Tanh())))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=1)
    if pinned:
        pin_buckets(model)
    results[number] = [gradients(model, number) for _ in range(3)]
    dist.destroy_process_group()

if __name__ == "__main__":
    from torch.distributed import TCPStore
    port = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False).port
    results = mp.get_context("fork").Manager().dict()
    mp.start_processes(rank, args=(port, sys.argv[1] == "pinned", results), nprocs=4, start_method="fork")
    print(json.dumps([results[n] for n in range(4)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pinned", "plain"])
def test_the_first_step_adds_in_the_order_of_all_others(tmp_path: Path, mode: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, mode], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_rank = json.loads(done.stdout.splitlines()[-1])
    first, second, third = by_rank[0]
    assert all(row == by_rank[0] for row in by_rank), "replicas must agree"
    assert second == third
    # The other half of the test: without pinning this model shows the difference that pinning takes away.
    assert (first == second) == (mode == "pinned")
