"""A process that pretends to be a rank: it writes a black box and does what it is told on standard input.

One command per line, one `ok` per command: `step`, `begin PHASE`, `end`, `spin`, `write BYTES`, `block`,
`prompt TERMINAL`, `exit CODE`. No torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from model_check.blackbox.recorder import Recorder


def spin_for_ever() -> None:
    while True:
        pass


def block() -> None:
    """Stays in state D until the next byte on standard input: the kernel blocks a parent while its vfork child runs."""
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack) - 64) & ~15)
    clone_vm, clone_vfork = 0x100, 0x4000
    getc = ctypes.cast(libc.getc, ctypes.c_void_p)
    libc.clone(getc, top, clone_vm | clone_vfork | signal.SIGCHLD, ctypes.c_void_p(libc.fdopen(0, b"r")))


def main(run_dir: str, rank: int) -> None:
    recorder = Recorder(Path(run_dir) / "blackbox" / f"rank-{rank:05d}.ring", rank=rank, world_size=2)
    spans: list[tuple[int, str]] = []
    print("ok", flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "step":
            recorder.steps += 1
            recorder.point("step", file="train.py", line=7)
        elif command == "begin":
            op = "all_reduce" if argument == "collective" else "none"
            span = recorder.begin(argument, op=op, file="train.py", line=9, function="train")
            spans.append((span, argument))
        elif command == "end":
            recorder.end(*spans.pop())
        elif command == "spin":
            threading.Thread(target=spin_for_ever, daemon=True).start()
        elif command == "write":
            with open(os.devnull, "wb", buffering=0) as nowhere:
                nowhere.write(bytes(int(argument)))
        elif command == "prompt":
            print("ok", flush=True)
            os.dup2(os.open(argument, os.O_RDWR | os.O_NOCTTY), 0)
            os.read(0, 1)
            continue
        elif command == "block":
            print("ok", flush=True)
            block()
            continue
        elif command == "exit":
            os._exit(int(argument))
        print("ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
