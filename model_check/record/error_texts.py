"""Tells from the text of a rank's error whether the rank failed by itself, or only lost another rank or the store.

A rank whose error only says that a peer is gone is a victim, never the cause. The launcher uses these rules to name the
first failure, and the verdict uses the same ones.
"""

from __future__ import annotations

import re
import signal

from model_check.record.events.crashes import ExceptionEvent
from model_check.record.events.job import RankExit

_WORKER = re.compile(r"DataLoader worker \(pid(\(s\))? [\d, ]+\) (exited unexpectedly|is killed by signal)", re.I)
# How the end of a worker shows when the loader notices it by its queue before torch notices it by its signal.
_BROKEN_LINK = frozenset({"ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError"})
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.I)
DEVICE_OOM = re.compile(r"(CUDA|HIP|MPS|XPU) ?(error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.I)
HOST_OOM = re.compile(r"std::bad_alloc|DefaultCPUAllocator|can't allocate memory|cannot allocate memory", re.I)
DEVICE_ASSERT = re.compile(r"device-side assert", re.I)
DEVICE_LOST = re.compile(
    r"uncorrectable ECC|\bXid\b|fallen off the bus|device (is )?lost|GPU is lost|unknown error.*CUDA|"
    r"unspecified launch failure|"
    r"NVLink|hardware (stack )?error",
    re.I,
)
NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|\[Errno 27\] File too large", re.I)
# The message of a wrong call may quote the name of a store.
_WRONG_CALL = re.compile(r"^(Type|Attribute|Name|Import|ModuleNotFound)Error\b")
_OWN_TROUBLE = (PORT_TAKEN, DEVICE_OOM, HOST_OOM, DEVICE_ASSERT, DEVICE_LOST, NO_ROOM, _WRONG_CALL)

_LOST_PEER = re.compile(
    r"""connection\ (was\ )?(closed|reset|refused|aborted)
    | closed\ by\ (the\ )?(remote\ )?(peer|host)
    | broken\ pipe
    | gloo/transport | gloo\ .{0,40}(timed\ out|failed)
    | application\ timeout\ caused\ pair\ closure
    | socket\ (closed|timeout|error)
    | ncclRemoteError | remote\ process\ (has\ )?exited
    | NCCL\ (communicator|comm)\ .{0,30}abort
    | ncclInternalError .{0,200} (proxy|socket|connection)
    | collective\ operation\ timeout | watchdog\ (caught|collective)
    | timed\ out\ waiting\ .{0,80}\ (recv|send)
    | heartbeat\ .{0,60}(timed\ out|timeout|lost|stuck)
    | connectFullMesh\ failed
    | failed\ to\ recv,\ got\ 0\ bytes | recvValue\ failed | sendBytes\ failed
    | Monitored\ barrier | monitoredBarrier
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LOST_STORE = re.compile(
    r"TCPStore|DistNetworkError|DistStoreError|store->|c10d::.*store|failed to recv, got 0 bytes|recvValue failed|"
    r"wait timeout after|keys? .* timed out|client socket has (failed|timed out)",
    re.IGNORECASE,
)
# How gloo reports tensors of different sizes: the rank that reports it did nothing wrong, but no peer is gone.
_SIZES_DIFFER = re.compile(r"data size doesn't match|op\.preamble\.length")
# "op.preamble.length <= op.nbytes. 16 vs 8."
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<came>\d{1,20}) vs (?P<expected>\d{1,20})")


def unexpected_size(text: str) -> tuple[int, int] | None:
    """The bytes that came and those that were expected, where gloo aborted because they differ."""
    found = _SIZES.search(text)
    return (int(found["came"]), int(found["expected"])) if found is not None else None


def is_store_loss(text: str) -> bool:
    """The error is about the store through which ranks find each other."""
    return _LOST_STORE.search(text) is not None


def is_lost_peer(text: str) -> bool:
    """Whether an exception's `type: message` says only that another rank, or the store, went away."""
    return _mentions_a_loss(text) and not any(trouble.search(text) for trouble in _OWN_TROUBLE)


def _mentions_a_loss(text: str) -> bool:
    return not _SIZES_DIFFER.search(text) and (_LOST_PEER.search(text) is not None or is_store_loss(text))


def lost_its_peer(error: ExceptionEvent | None, end: RankExit | None, log_tail: str) -> bool:
    """Whether a rank that failed is a victim, by its exception or, without one, by the end of its log.

    The oldest exception of a chain decides: an exception raised later, during cleanup, is not the cause.
    """
    if error is not None:
        return is_lost_peer(_oldest(error)) and not is_dead_worker(error)
    # The NCCL watchdog aborts without a Python exception, and its explanation is above a long stack.
    if end is not None and end.signal == signal.SIGABRT:
        return _mentions_a_loss(log_tail)
    return end is not None and end.code == 1 and is_lost_peer(log_tail.rstrip().rpartition("\n")[2])


def _oldest(error: ExceptionEvent) -> str:
    """The oldest exception of a recorded chain, as `type: message`."""
    if error.root_type:
        return f"{error.root_type}: {error.root_message or ''}"
    return f"{error.type}: {error.message}"


def is_dead_worker(error: ExceptionEvent) -> bool:
    """Whether the error says that a worker process of the rank's data loader has died."""
    kind = (error.root_type or error.type).rpartition(".")[2]
    said = f"{error.message} {error.root_message or ''}"  # torch raises it from queue.Empty
    in_loader = any("torch/utils/data/" in frame.file for frame in error.frames_told)
    return (kind in _BROKEN_LINK and in_loader and error.origin is None) or _WORKER.search(said) is not None
