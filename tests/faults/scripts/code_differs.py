"""Two checkouts that are not the same: rank 1 runs an edited copy of the training script."""

import os
import socket
import subprocess
import sys
import tempfile

TRAIN = """\
import faultclock
import torch
import torch.distributed as dist

faultclock.fired()
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1500):
    loss = model(torch.randn(2, 4)).pow(2).mean()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
"""


def checkout(text):
    path = os.path.join(tempfile.mkdtemp(), "train.py")
    with open(path, "w") as script:
        script.write(text)
    return path


def main():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    scripts = [checkout(TRAIN), checkout(TRAIN.replace("pow(2)", "abs()")), checkout(TRAIN)]
    here = os.path.dirname(os.path.abspath(__file__))
    ranks = []
    for rank, script in enumerate(scripts):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3")
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), here]))
        ranks.append(subprocess.Popen([sys.executable, script], env=env))
    sys.exit(max(r.wait() for r in ranks))


main()
