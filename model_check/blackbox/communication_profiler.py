"""Where communication time goes: count, bytes, time, bandwidth and overlap of every kind of collective.

    profiler = CommunicationProfiler(enabled=True)
    ...                                   # train
    print(profiler.get_stats().to_dict())

Works in any script, under DDP, FSDP and tensor parallelism: calls are seen where the dispatcher hands them to their
backend (instrument.native), so those that C++ starts are counted too. Bytes are message sizes as nccl-tests counts
them: of an all-gather what comes out, of a reduce-scatter what goes in.

On the CPU a call lasts from its issue to the moment its result is there, and overlap is the share of that time in which
the main thread computed. On CUDA the duration is the device's own, by events around the call; what of it the
computation hid only a trace can say (`--profile`), so overlap is None there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from model_check.blackbox import native_collectives
from model_check.blackbox.collectives import bytes_in
from model_check.blackbox.current_phase import step_around

_COMPACT_EVERY = 2048
_MOST_PENDING = 64  # a Work holds its tensors: one that nobody in Python waits for must not be kept
# DDP's reducer may be the last owner of a group, which then waits for a thread of ours that needs the GIL.
_GROUPS_SEEN: dict[str, Any] = {}


class Interval(NamedTuple):
    """One call from its issue to its end, on the wall clock and on the main thread's CPU clock."""

    start: float
    end: float
    cpu_start: float
    cpu_end: float


def busy(intervals: list[Interval]) -> tuple[float, float]:
    """Seconds in which at least one call was under way, and the CPU seconds of the main thread in them."""
    wall = cpu = 0.0
    current: Interval | None = None
    for interval in sorted(intervals):
        if current is None or interval.start > current.end:
            if current is not None:
                wall, cpu = wall + current.end - current.start, cpu + current.cpu_end - current.cpu_start
            current = interval
        elif interval.end > current.end:
            current = current._replace(end=interval.end, cpu_end=interval.cpu_end)
    if current is not None:
        wall, cpu = wall + current.end - current.start, cpu + current.cpu_end - current.cpu_start
    return wall, cpu


def message_bytes(op: str, tensor_bytes: int, group_size: int) -> int:
    """Of the whole message, from what each rank brings to an all-gather or keeps of a reduce-scatter."""
    return tensor_bytes * group_size if op in ("all_gather", "reduce_scatter") else tensor_bytes


def bus_factor(op: str, group_size: int) -> float:
    """What turns bytes by time into the traffic of one link, which the hardware's own number can be compared with."""
    if group_size < 2:
        return 0.0
    if op == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (group_size - 1) / group_size
    return 1.0


@dataclass(frozen=True)
class KindStats:
    """All calls of one kind. `untimed`: calls whose end could not be seen; bandwidths leave their bytes out."""

    count: int
    bytes: int
    seconds: float
    untimed: int
    algorithm_gb_per_s: float | None
    bus_gb_per_s: float | None
    share_of_step: float | None
    overlap: float | None


@dataclass(frozen=True)
class CommunicationStats:
    """Everything since the profiler began. Shares are of the whole time: 0.25 is a quarter of every step."""

    steps: int
    elapsed_s: float
    seconds: float
    bytes: int
    bytes_per_step: float | None
    share_of_step: float | None
    overlap: float | None
    collectives: dict[str, KindStats]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Kind:
    """The running totals of one kind."""

    def __init__(self) -> None:
        self.count = self.untimed = self.bytes = self.timed_bytes = 0
        self.bus_bytes = 0.0
        self.seconds = self.cpu_seconds = self.device_seconds = 0.0
        self.intervals: list[Interval] = []

    def compact(self) -> None:
        wall, cpu = busy(self.intervals)
        self.seconds, self.cpu_seconds = self.seconds + wall, self.cpu_seconds + cpu
        self.intervals = []


class _Call(NamedTuple):
    kind: _Kind
    bytes: int
    bus_bytes: float
    start: float
    cpu_start: float

    def is_timed(self) -> None:
        self.kind.timed_bytes += self.bytes
        self.kind.bus_bytes += self.bus_bytes


class _Timing(NamedTuple):
    """When the device has finished a call, and the seconds it took."""

    over: Callable[[], bool]
    seconds: Callable[[], float]


class _Begun(NamedTuple):
    """Where the device's queue stood when a call was about to be issued."""

    stream: Any
    event: Any

    @classmethod
    def on(cls, device: torch.device) -> _Begun | None:
        """None while a graph is captured: what is captured runs later."""
        with torch.cuda.device(device):  # the script may not have chosen its device
            if torch.cuda.is_current_stream_capturing():
                return None
            stream = torch.cuda.current_stream(device)
            return cls(stream, _event_on(stream))

    def timing(self) -> _Timing:
        """How long the work took that was issued on the stream since the start of this timing."""
        ended = _event_on(self.stream)
        return _Timing(ended.query, lambda: self.event.elapsed_time(ended) / 1e3)


def _event_on(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class CommunicationProfiler:
    """Counts and times collectives from its making until `close`. With `enabled=False` it does nothing at all."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._lock, self._collecting = threading.Lock(), threading.Lock()
        self._main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._on_device: deque[tuple[_Call, _Timing]] = deque()
        self._waited_for: dict[int, tuple[_Call, Any]] = {}
        self._timed_groups: set[str] = set()
        self._steps_of: int | None = None
        self._told = False  # somebody says when a step ends, so optimizers are not counted
        self._hook: Any = None
        self._restore_wait: Callable[[], None] | None = None
        self.reset()
        if enabled:
            native_collectives.install()
            native_collectives.listen(self._issuing)
            self._restore_wait = _watch_waits(self._wait_over)
            self._hook = register_optimizer_step_post_hook(self._optimizer_stepped)

    def reset(self) -> None:
        """Forgets what was seen so far: for after the first steps, which compile and allocate."""
        with self._lock:
            self._kinds: dict[str, _Kind] = {}
            self._all = _Kind()
            self._began = self._last_boundary = time.perf_counter()
            self._steps = 0

    def step(self) -> None:
        """A step ended. Only for loops without a torch optimizer: the first one that steps is counted by itself."""
        if not self._told:
            self._told, self._steps = True, 0
        self._boundary()

    def _boundary(self) -> None:
        self._steps += 1
        self._last_boundary = time.perf_counter()

    def close(self) -> None:
        """Stops counting; the stats stay."""
        if not self.enabled:
            return
        native_collectives.stop_listening(self._issuing)
        if self._restore_wait is not None:
            self._restore_wait()
            self._restore_wait = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __enter__(self) -> CommunicationProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_stats(self) -> CommunicationStats:
        """What was seen so far."""
        self._collect_from_device()
        with self._lock:
            for kind in (self._all, *self._kinds.values()):
                kind.compact()
            elapsed = (self._last_boundary if self._steps else time.perf_counter()) - self._began
            kinds = {name: _summary(kind, elapsed) for name, kind in sorted(self._kinds.items())}
            total = self._all.seconds + self._all.device_seconds
            size = sum(kind.bytes for kind in self._kinds.values())
            return CommunicationStats(
                steps=self._steps,
                elapsed_s=elapsed,
                seconds=total,
                bytes=size,
                bytes_per_step=size / self._steps if self._steps else None,
                share_of_step=min(1.0, total / elapsed) if elapsed > 0 else None,
                overlap=_overlap(self._all),
                collectives=kinds,
            )

    # Seen at the dispatcher, right before and right after a call is handed to its backend.

    def _issuing(self, op: str, tensor: Any, group: Any) -> Callable[[Any], None]:
        device = _cuda_device_of(tensor)
        on_device = device is not None and "nccl" in dist.get_backend_config(group)
        # Messages are launched together at the end of a batch: no event between them says how long one took.
        begun = _Begun.on(device) if device is not None and on_device and op not in ("send", "recv") else None
        start = time.perf_counter()
        return lambda result: self._issued(op, tensor, group, start, begun, on_device, result)

    def _issued(self, op: str, tensor: Any, group: Any, start: float, begun: Any, on_device: bool, result: Any) -> None:
        name, size = group.group_name, group.size()
        _GROUPS_SEEN.setdefault(name, group)
        nbytes = message_bytes(op, _nbytes(tensor), size)
        with self._lock:
            kind = self._kinds.setdefault(op, _Kind())
            kind.count += 1
            kind.bytes += nbytes
        call = _Call(kind, nbytes, nbytes * bus_factor(op, size), start, time.clock_gettime(self._main_clock))
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        if on_device:
            self._issued_on_device(call, work, begun, group, name)
            return
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce-scatter and messages have none: their end is seen when somebody waits
            if len(self._waited_for) >= _MOST_PENDING:
                self._waited_for.pop(next(iter(self._waited_for)))
            self._waited_for[id(work)] = (call, work)
            with self._lock:
                kind.untimed += 1
            return
        future.add_done_callback(lambda _: self._ended(call))

    def _issued_on_device(self, call: _Call, work: Any, begun: Any, group: Any, name: str) -> None:
        if work is None:
            # A call that the script waits for runs on the script's own stream and leaves no Work.
            self._pending(call, begun.timing() if begun is not None else None)
            return
        if name not in self._timed_groups:
            self._timed_groups.add(name)
            group._enable_collectives_timing()  # for the calls after this one
            self._pending(call, None)
            return
        # By the events that NCCL itself records around an asynchronous call.
        self._pending(call, _Timing(work.is_completed, lambda: work._get_duration() / 1e3))

    def _pending(self, call: _Call, timing: _Timing | None) -> None:
        """None: nothing will tell how long it took."""
        if timing is None:
            with self._lock:
                call.kind.untimed += 1
            return
        self._on_device.append((call, timing))
        if len(self._on_device) >= _MOST_PENDING:
            self._collect_from_device()

    def _collect_from_device(self) -> None:
        with self._collecting:  # backward passes run on threads of their own
            while self._on_device and self._on_device[0][1].over():
                call, timing = self._on_device.popleft()
                seconds = timing.seconds()
                with self._lock:
                    call.is_timed()
                    for kind in (call.kind, self._all):
                        kind.device_seconds += seconds

    def _ended(self, call: _Call) -> None:
        interval = Interval(call.start, time.perf_counter(), call.cpu_start, time.clock_gettime(self._main_clock))
        with self._lock:
            call.is_timed()
            for kind in (call.kind, self._all):
                kind.intervals.append(interval)
                if len(kind.intervals) >= _COMPACT_EVERY:
                    kind.compact()

    def _wait_over(self, work: Any) -> None:
        waited = self._waited_for.pop(id(work), None)
        if waited is not None:
            with self._lock:
                waited[0].kind.untimed -= 1
            self._ended(waited[0])

    def _optimizer_stepped(self, optimizer: Any, *_: object) -> None:
        if not torch.compiler.is_compiling() and step_around(sys._getframe(1)) is not None:
            return
        if self._steps_of is None:
            self._steps_of = id(optimizer)
        if self._steps_of == id(optimizer) and not self._told:
            self._boundary()


def _watch_waits(over: Callable[[Any], None]) -> Callable[[], None]:
    """Calls `over` after every Work.wait; returns what undoes it."""
    original = dist.Work.wait

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        over(work)
        return result

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]

    def restore() -> None:
        if dist.Work.wait is wait:
            dist.Work.wait = original  # type: ignore[method-assign]

    return restore


def _summary(kind: _Kind, elapsed: float) -> KindStats:
    seconds = kind.seconds + kind.device_seconds
    return KindStats(
        count=kind.count,
        bytes=kind.bytes,
        seconds=seconds,
        untimed=kind.untimed,
        algorithm_gb_per_s=kind.timed_bytes / seconds / 1e9 if seconds and kind.timed_bytes else None,
        bus_gb_per_s=kind.bus_bytes / seconds / 1e9 if seconds and kind.timed_bytes else None,
        share_of_step=min(1.0, seconds / elapsed) if elapsed > 0 else None,
        overlap=_overlap(kind),
    )


def _overlap(kind: _Kind) -> float | None:
    return min(1.0, kind.cpu_seconds / kind.seconds) if kind.seconds > 0 else None


def _nbytes(tensor: Any) -> int:
    if isinstance(tensor, (list, tuple)):
        return sum(_nbytes(part) for part in tensor)
    return bytes_in(tensor) if isinstance(tensor, torch.Tensor) else 0


def _cuda_device_of(tensor: Any) -> torch.device | None:
    if isinstance(tensor, (list, tuple)):
        return _cuda_device_of(tensor[0]) if tensor else None
    return tensor.device if isinstance(tensor, torch.Tensor) and tensor.is_cuda else None
