"""Sees the collectives that never pass through Python: DDP's reducer, FSDP's unsharding, functional collectives.

Every process group calls its backend through an operator of the dispatcher (`c10d::allreduce_` and so on). A kernel of
ours at the BackendSelect key is called last before the backend's own, for every tensor and in every mode (autograd,
inference, compiled code), writes a record, and passes the same arguments on: results cannot change.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from model_check.blackbox import collectives
from model_check.blackbox.box import BOX


@dataclass(frozen=True)
class _Operator:
    """Where the operator keeps its tensor and its process group, by position."""

    op: str
    tensor: int | None
    group: int
    peer: int | None = None
    phase: str = "collective"
    given: int | None = None  # of a reduction: what this rank brings into it
    overlaps: int | None = None  # whether it is on a stream of the backend's own; torch leaves out what is true


_OPERATORS = {
    "allreduce_": _Operator("all_reduce", 0, 1, given=0, overlaps=4),
    "allreduce_coalesced_": _Operator("all_reduce", 0, 1, given=0),
    "broadcast_": _Operator("broadcast", 0, 1, 2),
    "reduce_": _Operator("reduce", 0, 1, 3, given=0),
    "allgather_": _Operator("all_gather", 1, 2),
    "_allgather_base_": _Operator("all_gather", 1, 2),
    "allgather_coalesced_": _Operator("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": _Operator("all_gather", 1, 2),
    "reduce_scatter_": _Operator("reduce_scatter", 0, 2, given=1),
    "_reduce_scatter_base_": _Operator("reduce_scatter", 0, 2, given=1),
    "reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", 0, 2, given=1),
    "gather_": _Operator("gather", 1, 2, 3),
    "scatter_": _Operator("scatter", 0, 2, 3),
    "alltoall_": _Operator("all_to_all", 1, 2),
    "alltoall_base_": _Operator("all_to_all", 1, 2),
    "barrier": _Operator("barrier", None, 1, phase="barrier"),
    "monitored_barrier_": _Operator("monitored_barrier", None, 1, phase="barrier"),
    "send": _Operator("send", 0, 1, 2, phase="p2p"),
    "recv_": _Operator("recv", 0, 1, 2, phase="p2p"),
    "recv_any_source_": _Operator("recv", 0, 1, phase="p2p"),
}


Listener = Callable[[str, Any, Any], Callable[[Any], None]]
"""Told of a call before its backend has it: operation, tensor, process group. What it returns is told the result."""

Told = Callable[["Exchange"], Any]
"""Told of an exchange before its backend has it. Where it reads the tensors on a stream of its own, it returns that
stream: the exchange is queued behind it, since it writes to them. Otherwise None."""


@dataclass(frozen=True)
class Exchange:
    """A collective that is about to be started."""

    given: list[torch.Tensor]  # what this rank brings to a reduction, still its own; none where nothing is added up
    group: Any  # as the dispatcher holds it
    overlaps: bool  # the script's own stream goes on beside it, until the script waits for it


class NeedsPeers(RuntimeError):
    """What this rank runs by itself wants to exchange something: its peers are not there."""


class Lone:
    """What one rank runs by itself: no call of it reaches a peer."""

    def __init__(self) -> None:
        self.stopped = False
        self._thread = threading.get_ident()

    def includes_this_thread(self) -> bool:
        """The one that began it, or one of autograd's own, which work for it; a thread of the script's goes on."""
        here = threading.get_ident()
        if here == self._thread or torch._C._current_graph_task_id() == -1:
            return here == self._thread
        python = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
        return all(thread.ident != here for thread in python)

    def stop(self) -> None:
        self.stopped = True
        raise NeedsPeers("no rank takes part in what another one runs by itself")


class _Registered:
    """The registrations live as long as this object does."""

    library: Any = None
    listeners: ClassVar[tuple[Listener, ...]] = ()
    told: ClassVar[tuple[Told, ...]] = ()
    lone: ClassVar[Lone | None] = None


def install() -> None:
    """Once a process; a forked child inherits it."""
    if _Registered.library is not None:
        return
    library = torch.library.Library("c10d", "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    unbox = torch.distributed.ProcessGroup.unbox
    for name, operator in _OPERATORS.items():
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            library.impl(name, _kernel(packet.default, operator, below, unbox), "BackendSelect", with_keyset=True)
    _Registered.library = library


def listen(listener: Listener) -> None:
    """Tells the listener of every call from now on, whether or not this process is recorded."""
    _Registered.listeners = (*_Registered.listeners, listener)


def stop_listening(listener: Listener) -> None:
    _Registered.listeners = tuple(known for known in _Registered.listeners if known != listener)


def tell_of_exchanges(told: Told) -> None:
    _Registered.told = (*_Registered.told, told)


def stop_telling(told: Told) -> None:
    _Registered.told = tuple(known for known in _Registered.told if known != told)


@contextmanager
def by_itself() -> Iterator[Lone]:
    """What runs inside is no part of the job's order of calls: its first one is refused, and written down nowhere."""
    thread = BOX.thread
    depth, before = thread.depth, _Registered.lone
    _Registered.lone = lone = Lone()
    thread.depth = depth + 1
    try:
        yield lone
    finally:
        thread.depth = depth
        _Registered.lone = before


def uninstall() -> None:
    """Takes the kernels out again: collectives reach their backend as if we had never been here."""
    if _Registered.library is not None:
        _Registered.library._destroy()
        _Registered.library = None


def _drop(listener: Listener | Told, error: Exception) -> None:
    """A listener that fails is told no more: the call goes on."""
    stop_listening(listener)  # type: ignore[arg-type]
    stop_telling(listener)  # type: ignore[arg-type]
    warnings.warn(f"a listener to collectives was dropped: {error!r}", RuntimeWarning, stacklevel=4)


def _tensors(given: Any) -> list[torch.Tensor]:
    """One tensor, a list of them, or a list of lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors(part)]


def _kernel(target: Any, operator: _Operator, below: Any, unbox: Callable[[Any], Any]) -> Callable[..., Any]:
    op, phase, tensor_at, group_at = operator.op, operator.phase, operator.tensor, operator.group
    peer_at, given_at, overlaps_at = operator.peer, operator.given, operator.overlaps
    redispatch = target._handle.redispatch_boxed  # what `target.redispatch` calls, without a frame of its own

    # No context manager here: inside a compiled call Dynamo would compile contextlib's code for it.
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _Registered.lone is not None and _Registered.lone.includes_this_thread():
            _Registered.lone.stop()
        if tensor_at is None or not _Registered.told:
            return heard(keyset, args, kwargs)
        given = [] if given_at is None else _tensors(args[given_at])
        overlaps = overlaps_at is not None and (len(args) <= overlaps_at or bool(args[overlaps_at]))
        behind = None
        for told in _Registered.told:
            try:
                behind = told(Exchange(given, args[group_at], overlaps)) or behind
            except Exception as error:
                _drop(told, error)
        if behind is None:
            return heard(keyset, args, kwargs)
        with torch.cuda.stream(behind):
            return heard(keyset, args, kwargs)

    def heard(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _Registered.listeners:
            return record(keyset, args, kwargs)
        tensor = None if tensor_at is None else args[tensor_at]
        listening = []
        for listener in _Registered.listeners:
            try:
                listening.append((listener, listener(op, tensor, unbox(args[group_at]))))
            except Exception as error:
                _drop(listener, error)
        result = record(keyset, args, kwargs)
        for listener, handed_over in listening:
            try:
                handed_over(result)
            except Exception as error:
                _drop(listener, error)
        return result

    def record(keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = BOX.recorder
        if recorder is None or BOX.thread.depth:
            return redispatch(keyset & below, *args, **kwargs)
        tensor = None if tensor_at is None else args[tensor_at]
        peer = None if peer_at is None else args[peer_at]
        try:
            issued = collectives.native(recorder, op, phase, unbox(args[group_at]), tensor, peer)
        except Exception as error:
            BOX.give_up(error)
            issued = None
        try:
            return redispatch(keyset & below, *args, **kwargs)
        finally:
            if issued is not None:
                collectives.end(issued)

    return kernel
