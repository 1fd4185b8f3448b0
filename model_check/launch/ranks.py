"""Inside a rank's process, from the fork to the exit: ties, signals, streams, environment, the record of a failure."""

from __future__ import annotations

import atexit
import ctypes
import errno
import faulthandler
import io
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from model_check.errors import ModelCheckError
from model_check.record import JsonlWriter, RunDir
from model_check.record.events.crashes import UncaughtException
from model_check.record.rank_context import RankContext
from model_check.record.rank_exits import CLEAN_CODES
from model_check.record.redaction import redact_text, secret_values
from model_check.record.stacks import Frame
from model_check.record.typed import to_json

SIGNALS_OF_A_RANK = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_LIBC = ctypes.CDLL(None, use_errno=True)


def tie_to_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent dies, whatever kills the parent.

    Only for a rank: the tie ignores exit codes, and the children of a rank that ended cleanly must live on.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)  # the parent died before the line above could help


def become_rank(
    parent_pid: int, launcher_pid: int, ignored: Collection[int], env: Mapping[str, str], log: Path
) -> None:
    """Turns a forked child into a rank: own session, default signals, own environment, output into its log.

    `ignored`: signals that the launcher ignores, for example under nohup; its ranks ignore them too.
    """
    tie_to_parent(parent_pid)
    # Where Yama restricts ptrace, py-spy started by the launcher may look at this process and nobody else.
    _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(launcher_pid), 0, 0, 0)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in SIGNALS_OF_A_RANK:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ.update(env)
    _redirect_streams(log)


def _redirect_streams(log: Path) -> None:
    # The log is as private as its folder.
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, log.parent.stat().st_mode & 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.close(out)
    os.close(nothing)


class _Output(io.FileIO):
    """A rank's log as a stream. Output that a full disk rejects is dropped: print() must not end the training."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return memoryview(data).nbytes


def prepare_interpreter() -> None:
    """Fresh text streams, a stack on a fatal signal, and what libraries read from the environment at import only."""
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False), encoding="utf-8")
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Output(fd, "wb", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(file=sys.stderr)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads_named_by(os.environ.get("OMP_NUM_THREADS", "1")))
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()


def threads_named_by(text: str) -> int:
    """OMP_NUM_THREADS may name one number for each level of nesting: `4,2`. Of any other the runtime complains."""
    outermost = text.partition(",")[0].strip()
    return max(1, int(outermost)) if outermost.isascii() and outermost.isdigit() else 1


def forget_launcher() -> None:
    """Drops what a forked interpreter would do at its exit on the launcher's behalf, as multiprocessing does."""
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]


def run_entry(entry: Callable[[RankContext, Any], None], context: RankContext, payload: Any) -> int:
    """Calls the entry; an exception is recorded before anything else happens and becomes an exit code."""
    try:
        entry(context, payload)
        return 0
    except SystemExit as stop:
        code = _system_exit_code(stop)
        if code not in CLEAN_CODES:
            record_exception(context, stop, code)
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ModelCheckError as error:
        record_exception(context, error, error.exit_code)
        print(f"error: {_shown(str(error))}", file=sys.stderr, flush=True)
        return error.exit_code
    except BaseException as error:
        record_exception(context, error, 1)
        traceback.print_exc()
        return 1


def _system_exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr, flush=True)
    return 1


def _shown(text: str) -> str:
    """An exception may quote a token or a password: neither goes into a file."""
    return redact_text(text, secret_values(os.environ))


def record_exception(context: RankContext, error: BaseException, exit_code: int) -> None:
    """Appends the exception to the rank's events. The root is the oldest exception of the chain."""
    root = error
    while (earlier := root.__cause__ or root.__context__) is not None:
        root = earlier
    record = UncaughtException(
        t=time.monotonic(),
        time=time.time(),
        pid=os.getpid(),
        rank=context.rank,
        attempt=context.attempt,
        exit_code=exit_code,
        type=type(error).__name__,
        message=_shown(str(error)),
        code=error.code if isinstance(error, ModelCheckError) else None,
        root_type=type(root).__name__,
        root_message=_shown(str(root)),
        traceback=_shown("".join(traceback.format_exception(error))),
        frames=tuple(
            Frame(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)
        ),
    )
    try:
        writer = JsonlWriter(RunDir(context.run_dir).events(context.rank))
        writer.write({"event": record.kind, **to_json(record)})
        writer.close()
    except OSError as refused:
        print(f"the failure could not be recorded in {context.run_dir}: {refused}", file=sys.stderr, flush=True)


def finish_interpreter(code: int) -> NoReturn:
    """Ends a rank as the interpreter would (threads, exit functions, buffers), without destroying inherited objects."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
