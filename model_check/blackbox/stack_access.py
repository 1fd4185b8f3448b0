"""Lets the launcher look in: permission for py-spy, and faulthandler's stacks for crashes and on a signal."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import threading
from typing import IO

from model_check.blackbox.box import BOX

# The first realtime signals belong to the C library's threads; nobody is known to use this one. Unlike a Python
# handler, faulthandler's runs while the main thread is inside C code and even while somebody holds the GIL.
STACK_SIGNAL = signal.SIGRTMIN + 9
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class _Open:
    """faulthandler writes to a file descriptor: the file must stay open as long as the process."""

    file: IO[str] | None = None


def allow_ptrace() -> None:
    """Under Yama's ptrace_scope=1 a process must name who may read its stacks. Refused where there is no Yama: fine."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def install() -> None:
    """Opens the rank's stack file and registers for it; what the script registers itself comes first."""
    recorder, run_dir = BOX.recorder, BOX.run_dir
    if recorder is None or run_dir is None:
        return
    run_dir.stacks_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir.stacks_dir / f"rank-{recorder.rank:05d}.fault.txt"
    file = path.open("a", encoding="utf-8")
    # Enabled by the script itself: its traceback goes where it wants it. Inherited over a fork: ours, of the parent.
    if _Open.file is not None or not faulthandler.is_enabled():
        faulthandler.enable(file=file, all_threads=True)
    free = _Open.file is not None or signal.getsignal(STACK_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
    if free and threading.current_thread() is threading.main_thread():
        # The interpreter puts back what was before when it ends, and a process may need seconds to end after that:
        # a signal that comes then must not kill it.
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
        recorder.identify(stack_signal=int(STACK_SIGNAL))
    _Open.file = file
