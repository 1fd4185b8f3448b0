"""Calls external programs, Python among them, and reads what they print."""

import subprocess
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
commit = subprocess.check_output(["echo", "abc123"], text=True).strip()
answer = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True)
failed = subprocess.run([sys.executable, "-c", "raise SystemExit(9)"])
model = torch.nn.Linear(4, 4)
for _ in range(20):
    model(torch.randn(2, 4)).pow(2).mean().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
print("RESULT", dist.get_rank(), commit, answer.stdout.strip(), repr(answer.stderr), failed.returncode)
dist.destroy_process_group()
