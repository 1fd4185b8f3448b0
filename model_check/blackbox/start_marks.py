"""Where a rank is on its way to the first step: always in its events, and with --verbose-init on its output too.

    [10:23:45.123][+2.456s][R0/2][LR0][PID:12345] CHECKPOINT 5: Model created

`MARKS` is the start of this process. Until `begin` is called nothing is recorded: only ranks of our trainer do.
Imports no torch, so that the first marks come before the imports they wait for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import psutil

from model_check.blackbox.box import BOX
from model_check.record.events.process import StartMark
from model_check.record.redaction import redact_variables
from model_check.record.start_marks import name_of

_SHOWN_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_"),
    *("WANDB_", "HF_", "TOKENIZERS_", "SLURM_", "MODEL_CHECK_", "MALLOC_"),
)


class StartMarks:
    """The checkpoints of one process, each passed once and in order."""

    def __init__(self) -> None:
        self._rank = self._world_size = self._local_rank = 0
        self._say: Callable[[str], None] | None = None
        self._began_at = 0.0
        self._pid = 0
        self._passed = 0
        self._unwritten: list[StartMark] = []

    def begin(self, rank: int, world_size: int, local_rank: int, say: Callable[[str], None] | None = None) -> None:
        """This process is a rank. `say` prints a line; without it the start is silent. Beginning again adds nothing."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._rank, self._world_size, self._local_rank = rank, world_size, local_rank
        self._say = say
        self._began_at = psutil.Process().create_time()  # of a forked rank its fork: what came before is not its own
        self._passed = 0
        self._unwritten = []

    @property
    def verbose(self) -> bool:
        return self._say is not None

    def passed(self, number: int, *, off: str = "") -> None:
        """This rank has passed checkpoint `number`. `off`: why the component it is named after is switched off."""
        if self._pid != os.getpid() or number <= self._passed:
            return
        assert number == self._passed + 1, f"checkpoint {number} follows {self._passed}: the start has lost its order"
        self._passed = number
        self._unwritten.append(StartMark(t=time.monotonic(), number=number, name=name_of(number), off=off or None))
        self._write()
        if off:
            self.say(f"CHECKPOINT {number} comes next and is off: {off}")
        self.say(f"CHECKPOINT {number}: {name_of(number)}")

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Around whatever can block: a start that stops in it ends with this line."""
        if self._say is None:
            yield
            return
        self.say(f"About to call {what}...")
        began = time.monotonic()
        yield
        self.say(f"{what} returned after {time.monotonic() - began:.3f} s")

    def say(self, text: str) -> None:
        if self._say is None:
            return
        now = time.time()
        clock = datetime.fromtimestamp(now).strftime("%H:%M:%S.%f")[:-3]
        who = f"[R{self._rank}/{self._world_size}][LR{self._local_rank}][PID:{self._pid}]"
        self._say(f"[{clock}][+{max(0.0, now - self._began_at):.3f}s]{who} {text}")

    def say_environment(self) -> None:
        """Every variable that decides how ranks meet and where they run; secrets are replaced."""
        if self._say is None:
            return
        shown = {k: v for k, v in redact_variables(os.environ).items() if k.startswith(_SHOWN_VARIABLES)}
        self.say(f"environment: {len(shown)} variables")
        for name, value in sorted(shown.items()):
            self.say(f"  {name}={value}")

    def say_device(self, when: str) -> None:
        """The device and the process group as they stand; asks torch, so only where torch is imported anyway."""
        if self._say is None:
            return
        for line in _device_lines():
            self.say(f"device {when}: {line}")

    def _write(self) -> None:
        """Marks from before the box was open are written with the first one after."""
        if BOX.recorder is None:
            return
        for mark in self._unwritten:
            BOX.event(mark)
        self._unwritten.clear()


def _device_lines() -> list[str]:
    """CUDA where there is one, this process's memory, and whether it has joined its peers."""
    import torch

    resident = psutil.Process().memory_info().rss / 2**30
    return [*_cuda(torch), f"resident memory {resident:.2f} GiB, {torch.get_num_threads()} threads", _group(torch)]


def _cuda(torch: Any) -> list[str]:
    if not torch.cuda.is_available():
        return [f"no CUDA device (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"]
    lines = [f"{torch.cuda.device_count()} CUDA devices visible"]
    if torch.cuda.is_initialized():
        current = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(current)
        name = torch.cuda.get_device_name(current)
        lines.append(f"cuda:{current} is a {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return lines


def _group(torch: Any) -> str:
    dist = torch.distributed
    if not dist.is_initialized():
        return "no process group yet"
    return f"process group: rank {dist.get_rank()} of {dist.get_world_size()} over {dist.get_backend()}"


MARKS = StartMarks()
