"""Four ranks import a package at the same time; it takes nine seconds, however fast the machine is."""

import sys
import tempfile
from pathlib import Path

import faultclock

folder = Path(tempfile.mkdtemp(prefix="slow-package-"))
(folder / "deepspeed.py").write_text(
    "import time\nbegan = time.monotonic()\nwhile time.monotonic() < began + 9:\n    sum(range(10_000))\n"
)
sys.path.insert(0, str(folder))

faultclock.fired()
import deepspeed  # noqa: E402, F401  # FAULT
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
for _ in range(20):
    model(torch.randn(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
