"""Every call of torch.distributed that waits for other ranks: collectives, point-to-point, barriers, Work.wait.

Only the outermost call of a thread is recorded: all_gather_object is one record, not the gathers it is made of.
Collectives that C++ starts (DDP's reducer, functional collectives in compiled code) are seen in `native`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch

from model_check.blackbox.box import BOX, DTYPE, OP, SpanKind
from model_check.blackbox.exceptions import NOTES
from model_check.blackbox.gate import GATE, let_go
from model_check.blackbox.groups import GROUPS, Group
from model_check.blackbox.recorder import Recorder
from model_check.record.ring import FLAG_ASYNC, FLAG_NATIVE, MAX_DIMS, RAISED, REDUCES_BY, TAG, UNIT, WAIT

_DTYPES = {getattr(torch, name): code for name, code in DTYPE.items() if hasattr(torch, name)}
_OTHER_DTYPE = DTYPE["other"]
_NO_TENSOR = (0, 0, 0, 0, 0, 0, 0)
_REMEMBERED_WORKS = 4096
_KINDS = {(phase, op): SpanKind(phase, op) for phase in ("collective", "barrier", "p2p") for op in OP}
_MOST_TAGS = 64
_FRAMES_UP = 12
_BATCH = SpanKind("p2p", "batch_p2p")


@dataclass(frozen=True)
class Call:
    """How to read the arguments of one function: (position, name) of each thing worth recording."""

    op: str
    tensor: tuple[int, str] | None = None
    group: tuple[int, str] = (99, "group")
    async_op: tuple[int, str] = (99, "async_op")
    peer: tuple[int, str] | None = None
    reduction: tuple[int, str] | None = None
    tag: tuple[int, str] | None = None
    always_async: bool = False
    phase: str = "collective"


_T0, _TAG = (0, "tensor"), (3, "tag")
CALLS = {
    "all_reduce": Call("all_reduce", _T0, (2, "group"), (3, "async_op"), reduction=(1, "op")),
    "all_reduce_coalesced": Call("all_reduce", (0, "tensors"), (2, "group"), (3, "async_op"), reduction=(1, "op")),
    "broadcast": Call("broadcast", _T0, (2, "group"), (3, "async_op"), (1, "src")),
    "reduce": Call("reduce", _T0, (3, "group"), (4, "async_op"), (1, "dst"), reduction=(2, "op")),
    "all_gather": Call("all_gather", (1, "tensor"), (2, "group"), (3, "async_op")),
    "all_gather_into_tensor": Call("all_gather", (1, "input_tensor"), (2, "group"), (3, "async_op")),
    "all_gather_single": Call("all_gather", (1, "input_tensor"), (2, "group"), (3, "async_op")),
    "_all_gather_base": Call("all_gather", (1, "input_tensor"), (2, "group"), (3, "async_op")),
    "all_gather_coalesced": Call("all_gather", (1, "input_tensor_list"), (2, "group"), (3, "async_op")),
    "gather": Call("gather", _T0, (3, "group"), (4, "async_op"), (2, "dst")),
    "scatter": Call("scatter", _T0, (3, "group"), (4, "async_op"), (2, "src")),
    "reduce_scatter": Call("reduce_scatter", (0, "output"), (3, "group"), (4, "async_op"), reduction=(2, "op")),
    "reduce_scatter_tensor": Call("reduce_scatter", (0, "output"), (3, "group"), (4, "async_op"), reduction=(2, "op")),
    "reduce_scatter_single": Call("reduce_scatter", (0, "output"), (3, "group"), (4, "async_op"), reduction=(2, "op")),
    "_reduce_scatter_base": Call("reduce_scatter", (0, "output"), (3, "group"), (4, "async_op"), reduction=(2, "op")),
    "all_to_all": Call("all_to_all", (1, "input_tensor_list"), (2, "group"), (3, "async_op")),
    "all_to_all_single": Call("all_to_all", (1, "input"), (4, "group"), (5, "async_op")),
    "barrier": Call("barrier", None, (0, "group"), (1, "async_op"), phase="barrier"),
    "monitored_barrier": Call("monitored_barrier", None, (0, "group"), phase="barrier"),
    "all_gather_object": Call("all_gather_object", None, (2, "group")),
    "gather_object": Call("gather_object", None, (3, "group"), peer=(2, "dst")),
    "broadcast_object_list": Call("broadcast_object", (0, "object_list"), (2, "group"), peer=(1, "src")),
    "scatter_object_list": Call("scatter_object", None, (3, "group"), peer=(2, "src")),
    "send": Call("send", _T0, (2, "group"), tag=_TAG, peer=(1, "dst"), phase="p2p"),
    "recv": Call("recv", _T0, (2, "group"), tag=_TAG, peer=(1, "src"), phase="p2p"),
    "isend": Call("send", _T0, (2, "group"), tag=_TAG, peer=(1, "dst"), phase="p2p", always_async=True),
    "irecv": Call("recv", _T0, (2, "group"), tag=_TAG, peer=(1, "src"), phase="p2p", always_async=True),
    "send_object_list": Call("send", None, (2, "group"), peer=(1, "dst"), phase="p2p"),
    "recv_object_list": Call("recv", None, (2, "group"), peer=(1, "src"), phase="p2p"),
}


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[int, str] | None) -> Any:
    if where is None:
        return None
    return args[where[0]] if where[0] < len(args) else kwargs.get(where[1])


def _reduction(recorder: Recorder, op: Any) -> int:
    """The detail that says by which operation a call reduces; 0 for a sum, which is what nearly all of them do."""
    name = getattr(op, "name", "") if op is not None else "SUM"
    return recorder.intern(f"{REDUCES_BY}{str(name).lower() or '?'}") if name != "SUM" else 0


def _peer(args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, group: Group) -> int:
    """The root or the other side as a global rank; -1 where there is none or any will do."""
    if call.peer is None:
        return -1
    peer = _argument(args, kwargs, call.peer)
    if peer is not None:
        return peer if isinstance(peer, int) else -1
    in_group = kwargs.get(f"group_{call.peer[1]}")
    # A collective that names no root has rank 0 as its root; a receive that names no sender takes any.
    return 0 if in_group is None and call.phase == "collective" else group.global_rank(in_group)


@dataclass(frozen=True)
class _Objects:
    """Stands for a list of objects, of which only the number must agree between the ranks."""

    count: int


def bytes_in(tensor: torch.Tensor) -> int:
    """What it holds. A sparse one does not know, and lists another count on each rank: as if it were dense."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor.numel() * tensor.element_size()


def describe_tensor(tensor: Any) -> tuple[int, int, int, int, int, int, int]:
    """(dtype, bytes, number of dimensions, the first four) of a tensor, or of the first of a list of tensors."""
    if isinstance(tensor, (list, tuple)):
        if len(tensor) == 1:
            return describe_tensor(tensor[0])
        if not tensor:
            return _NO_TENSOR
        dtype, _, ndim, d0, d1, d2, d3 = describe_tensor(tensor[0])
        nbytes = sum(bytes_in(part) for part in tensor if isinstance(part, torch.Tensor))
        return dtype, nbytes, ndim, d0, d1, d2, d3
    if not isinstance(tensor, torch.Tensor):
        return (0, 0, 1, tensor.count, 0, 0, 0) if isinstance(tensor, _Objects) else _NO_TENSOR
    shape = tensor.shape
    if len(shape) == 1:  # gradients travel in flat buckets
        return _DTYPES.get(tensor.dtype, _OTHER_DTYPE), bytes_in(tensor), 1, shape[0], 0, 0, 0
    d0, d1, d2, d3 = (*shape[:MAX_DIMS], 0, 0, 0, 0)[:MAX_DIMS]
    return _DTYPES.get(tensor.dtype, _OTHER_DTYPE), bytes_in(tensor), min(len(shape), 255), d0, d1, d2, d3


class Issued(NamedTuple):
    """A call that has been written down, for its END and for the wait on its Work."""

    recorder: Recorder
    what: SpanKind
    span: int
    group: Group
    seq: int
    peer: int
    is_async: bool


def begin(
    recorder: Recorder, op: str, phase: str, group: Group, tensor: Any, peer: int, flags: int, detail: int = 0
) -> Issued:
    """Writes the BEGIN of a collective or a message; its sequence number in the group is counted here."""
    if GATE.gate is not None:
        let_go()
    what = _KINDS[phase, op]
    if phase == "p2p":
        seq = group.next_message(op, peer)
    else:
        seq, introduction = group.next_collective()
        detail = introduction or detail
    file, line, function = BOX.site(recorder)
    dtype, nbytes, ndim, d0, d1, d2, d3 = describe_tensor(tensor)
    span = recorder.put_collective(
        what.begin | dtype << 24,
        file,
        line,
        function,
        detail,
        peer,
        seq,
        group.id,
        flags,
        nbytes,
        ndim,
        d0,
        d1,
        d2,
        d3,
    )
    return Issued(recorder, what, span, group, seq, peer, bool(flags & FLAG_ASYNC))


def end(issued: Issued, detail: str = "") -> None:
    BOX.end(issued.recorder, issued.what, issued.span, detail)


def _begin_call(recorder: Recorder, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Issued | None:
    if not torch.distributed.is_initialized():
        return None
    group = GROUPS.find(recorder, _argument(args, kwargs, call.group))
    if group is None:
        return None
    NOTES.moved_on()
    flags = FLAG_ASYNC if call.always_async or _argument(args, kwargs, call.async_op) else 0
    tensor, peer = _argument(args, kwargs, call.tensor), _peer(args, kwargs, call, group)
    if call.op == "broadcast_object":
        tensor = _Objects(len(tensor)) if isinstance(tensor, list) else None
    return begin(recorder, call.op, call.phase, group, tensor, peer, flags, _detail(recorder, call, args, kwargs))


def _detail(recorder: Recorder, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if call.reduction is not None:
        return _reduction(recorder, _argument(args, kwargs, call.reduction))
    if call.op == "all_gather":
        unit = _sharded_unit(sys._getframe(3))
        return recorder.intern(f"{UNIT}{unit}") if unit else 0
    tag = _argument(args, kwargs, call.tag)
    # The text table has room for a few tags, not for a tag that counts steps.
    return recorder.intern(f"{TAG}{min(tag, _MOST_TAGS)}") if isinstance(tag, int) and tag > 0 else 0


def _sharded_unit(frame: FrameType | None) -> str:
    """The module whose parameters FSDP2 gathers. Its line is not enough: a loop calls many modules from one line."""
    if frame is None or not str(frame.f_globals.get("__name__")).startswith("torch.distributed.fsdp"):
        return ""
    for _ in range(_FRAMES_UP):
        if frame is None:
            break
        if frame.f_code.co_name == "unshard" and (unit := getattr(frame.f_locals.get("self"), "_module_fqn", None)):
            return str(unit)
        frame = frame.f_back
    return ""


def recorded(original: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """The same function, written down before it runs."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        recorder = BOX.recorder
        thread = BOX.thread
        if recorder is None or thread.depth:
            return original(*args, **kwargs)
        try:
            issued = _begin_call(recorder, call, args, kwargs)
        except Exception as error:
            BOX.give_up(error)
            issued = None
        if issued is None:
            return original(*args, **kwargs)
        thread.depth = 1
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            end(issued, f"{RAISED}{type(error).__name__}")
            NOTES.left_a_call(error, call.op)
            raise
        finally:
            thread.depth = 0
        end(issued)
        if issued.is_async and result is not None:
            WORKS.remember(result, issued)
        return result

    wrapper._model_check_original = original  # type: ignore[attr-defined]
    return wrapper


class _Works:
    """Which call a Work came from. By id, because a Work takes no attributes; a stale entry is overwritten."""

    def __init__(self) -> None:
        self._issued: dict[int, Issued] = {}

    def remember(self, work: Any, issued: Issued) -> None:
        if len(self._issued) >= _REMEMBERED_WORKS:
            self._issued.clear()
        self._issued[id(work)] = issued

    def take(self, work: Any) -> Issued | None:
        return self._issued.pop(id(work), None)


WORKS = _Works()


def wait_recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Work.wait with a record of what is waited for."""

    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, thread = BOX.recorder, BOX.thread
        if recorder is None or thread.depth:
            return original(work, *args, **kwargs)
        issued = WORKS.take(work)
        if issued is None or issued.recorder is not recorder:
            return original(work, *args, **kwargs)
        file, line, function = BOX.site(recorder)
        span = recorder.put_collective(
            issued.what.begin,
            file,
            line,
            function,
            recorder.intern(WAIT),
            issued.peer,
            issued.seq,
            issued.group.id,
            FLAG_ASYNC,
            *_NO_TENSOR[1:],
        )
        waiting = issued._replace(span=span)
        try:
            result = original(work, *args, **kwargs)
        except BaseException as error:
            end(waiting, f"{RAISED}{type(error).__name__}")
            NOTES.left_a_call(error, "wait")
            raise
        end(waiting, WAIT)
        return result

    return wait


def batch_recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """batch_isend_irecv: one span, and a record of each message in it."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        recorder, thread = BOX.recorder, BOX.thread
        if recorder is None or thread.depth or not isinstance(p2p_op_list, list) or not p2p_op_list:
            return original(p2p_op_list)
        try:
            NOTES.moved_on()
            span = BOX.begin(recorder, _BATCH, f"{len(p2p_op_list)} messages")
            messages = [message for op in p2p_op_list if (message := _issue_message(recorder, op)) is not None]
        except Exception as error:
            BOX.give_up(error)
            return original(p2p_op_list)
        thread.depth = 1
        try:
            works = original(p2p_op_list)
        except BaseException as error:
            BOX.end(recorder, _BATCH, span, f"{RAISED}{type(error).__name__}")
            NOTES.left_a_call(error, "batch_p2p")
            raise
        finally:
            thread.depth = 0
        BOX.end(recorder, _BATCH, span)
        for work, message in zip(works, messages, strict=False):
            WORKS.remember(work, message)
        return works

    return batch_isend_irecv


def _issue_message(recorder: Recorder, op: Any) -> Issued | None:
    name = getattr(getattr(op, "op", None), "__name__", "")
    group = GROUPS.find(recorder, getattr(op, "group", None))
    if group is None or name not in ("isend", "irecv"):
        return None
    issued = begin(recorder, name[1:], "p2p", group, op.tensor, getattr(op, "peer", -1), FLAG_ASYNC)
    end(issued)
    return issued


def native(recorder: Recorder, op: str, phase: str, process_group: Any, tensor: Any, peer: int | None) -> Issued | None:
    """A call that C++ makes: asynchronous as far as Python can see."""
    group = GROUPS.find(recorder, process_group)
    if group is None:
        return None
    return begin(recorder, op, phase, group, tensor, group.global_rank(peer), FLAG_NATIVE | FLAG_ASYNC)


def patch(c10d: Any) -> None:
    """torch.distributed.distributed_c10d, right after its import."""
    for name, call in CALLS.items():
        original = getattr(c10d, name, None)
        if original is not None:
            setattr(c10d, name, recorded(original, call))
    c10d.batch_isend_irecv = batch_recorded(c10d.batch_isend_irecv)
    c10d.Work.wait = wait_recorded(c10d.Work.wait)
