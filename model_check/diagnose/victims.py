"""Texts of errors that only say that another rank is gone. Whoever has one is a victim, never the cause."""

from __future__ import annotations

import re

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
# gloo's own word for tensors of different sizes: the rank that says so was wronged, but nobody has left.
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
    """The error says only that another rank, or the store, went away."""
    if _SIZES_DIFFER.search(text):
        return False
    return _LOST_PEER.search(text) is not None or is_store_loss(text)
