"""Children started with Popen: a short one every few steps, and a helper with its own process group."""

import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loop import train
from model import Net
from torch.nn.parallel import DistributedDataParallel as DDP

HELPER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
total = torch.ones(4)
dist.all_reduce(total)
print(total.sum().item())
dist.destroy_process_group()
sys.exit(7)
"""

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(Net())
torch.manual_seed(rank)
meeting = Path(f"helper-{rank}.store").resolve()
helper = subprocess.Popen([sys.executable, "-c", HELPER, str(meeting)], stdout=subprocess.PIPE, text=True)
said = []


def ask_a_child(step):
    if step % 8 == 0:
        said.append(subprocess.run(["echo", str(step)], capture_output=True, text=True, check=True).stdout)


book = train(model, after=ask_a_child)
answer = helper.communicate()[0]
book.close(model.module.state_dict(), said=said, helper=[answer, helper.returncode])
meeting.unlink(missing_ok=True)
dist.barrier()
dist.destroy_process_group()
