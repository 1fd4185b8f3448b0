"""The ways into a rank whose main thread is stuck: torch's own C++ server on a unix socket, and its client; permission
for py-spy; faulthandler's stacks for crashes and on a signal.

The server is a thread of torch's that needs no GIL: it answers while the main thread waits in a collective and while
somebody holds the GIL. Measured against a Python thread: the same 0.4 ms for an answer, and the Python thread does not
answer at all while the GIL is held. The client imports no torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from model_check.blackbox.box import BOX

_HANDLERS = {"flight": ("fr_trace_json", "dump_nccl_trace_json"), "stacks": ("dump_traceback",)}
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 107 bytes
_TIMEOUT_S = 5.0
# The first realtime signals belong to the C library's threads; nobody is known to use this one. Unlike a Python
# handler, faulthandler's runs while the main thread is inside C code and even while somebody holds the GIL.
STACK_SIGNAL = signal.SIGRTMIN + 9
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def request(socket_path: str, what: str, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Asks a rank for its "flight" recorder or its "stacks" (as {"text": …}). No answer is an OSError that says why."""
    if what not in _HANDLERS:
        raise ValueError(f"a rank can be asked for {', '.join(_HANDLERS)}, not for {what}")
    status, body = 0, b""
    for handler in _HANDLERS[what]:
        status, body = _post(socket_path, handler, timeout_s)
        if status == 200:
            return json.loads(body) if what == "flight" else {"text": body.decode("utf-8", "replace")}
    raise OSError(f"the rank at {socket_path} answered {status}: {body[:200].decode('utf-8', 'replace')}")


def _post(socket_path: str, handler: str, timeout_s: float) -> tuple[int, bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(socket_path)
        head_lines = (f"POST /handler/{handler} HTTP/1.1", "Host: rank", "Content-Length: 0", "Connection: close")
        connection.sendall(("\r\n".join(head_lines) + "\r\n\r\n").encode())
        answer = bytearray()
        while chunk := connection.recv(1 << 16):
            answer += chunk
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not words[1].isdigit():
        raise OSError(f"the rank at {socket_path} closed the connection without an answer")
    return int(words[1]), body


@dataclass(frozen=True)
class Service:
    """A server that runs in this process until it ends."""

    path: str
    pid: int

    @classmethod
    def start(cls, wanted: Path) -> Service | None:
        """Answers at `wanted`, or at a short private path where that is too long; None where torch has no server."""
        try:
            from torch._C._distributed_c10d import _WorkerServer
        except ImportError:
            return None
        path = str(wanted)
        if len(path.encode()) > _LONGEST_SOCKET_PATH:
            path = str(Path(tempfile.mkdtemp(prefix="model_check_"), wanted.name))
        Path(path).unlink(missing_ok=True)
        with _QuietStart():
            server = _WorkerServer(path)
            _post(path, "ping", _TIMEOUT_S)
        Path(path).chmod(0o600)
        # One reference too many: the destructor would log on the script's standard error while the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
        return cls(path, os.getpid())


class _QuietStart:
    """Keeps the server's greeting, written by C++, off the script's standard error; anything else goes through."""

    def __enter__(self) -> None:
        self._stderr = os.dup(2)
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.dup2(write_end, 2)
        os.close(write_end)

    def __exit__(self, *exc_info: object) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        with os.fdopen(self._read_end, "rb") as captured:
            for line in (captured.read() or b"").splitlines(keepends=True):
                if b"WorkerServer.cpp" not in line:
                    os.write(2, line)


class _Open:
    """faulthandler writes to a file descriptor: the file must stay open as long as the process."""

    file: IO[str] | None = None


def allow_ptrace() -> None:
    """Under Yama's ptrace_scope=1 a process must name who may read its stacks. Refused where there is no Yama: fine."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def write_stacks_on_demand() -> None:
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
