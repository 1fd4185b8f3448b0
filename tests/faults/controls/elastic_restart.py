"""Brings torchrun, which starts both ranks anew after one of them has failed: the second attempt is a healthy job."""

import os
import sys

if "RANK" not in os.environ:
    # Otherwise the second attempt may read the addresses of the first from the store that both share.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")
    own = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    os.execv(torchrun, [torchrun, *own, "--no-python", sys.executable, __file__])

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
if attempt == 1:
    # With the start before it longer than a launcher of the user's own gets to end a job that has crashed.
    time.sleep(float(os.environ.get("CONTROL_PAUSE", "8")))
for step in range(20):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if attempt == 0 and rank == 1 and step == 10:
        raise RuntimeError("only the first attempt fails")
print("RESULT", rank, attempt, repr(loss.item()), flush=True)
dist.destroy_process_group()
