"""A profiler trace in words: "41 % GEMM, 18 % attention, 9 % exposed all-reduce, 6 % waiting for data; …".

Pure functions over the events of a Chrome trace, as torch.profiler writes it; no torch. Every instant of the traced
steps is given to one thing: to the computation that runs then (on the device if the trace has kernels, else on the
main thread), or else to the communication that nothing hides, or else to the wait for data, or else to nothing.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

DATA_WAIT = "model_check::data_wait"
_STEP = re.compile(r"ProfilerStep#(\d+)")
_LOADER = re.compile(rf"{DATA_WAIT}|enumerate\(DataLoader\)")
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cpu_op", "user_annotation"})

# First match wins. A kernel of a collective is no computation, whatever it adds up.
_COLLECTIVES = (
    ("all-reduce", re.compile(r"all_?reduce", re.I)),
    ("all-gather", re.compile(r"all_?gather", re.I)),
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all-to-all", re.compile(r"all_?to_?all", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("send/receive", re.compile(r"send|recv", re.I)),
)
_COMMUNICATES = re.compile(r"^nccl|^gloo:|^c10d::|ncclDevKernel|ncclKernel", re.I)
_COMPUTES = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.I)),
    ("GEMM", re.compile(r"gemm|nvjet|cutlass|cublas|wgmma|xmma|matmul|^aten::(addmm|mm|bmm|baddbmm|linear)$", re.I)),
    ("optimizer", re.compile(r"adam|multi_tensor|_foreach_|fused_sgd|^aten::_fused_", re.I)),
    ("copies", re.compile(r"memcpy|memset|^aten::(copy_|_to_copy|to|zero_|fill_)$", re.I)),
)
_OTHER = "other"
_IDLE = "idle"
_WAITING = "waiting for data"

_ADVICE = {
    _WAITING: "the data: raise training.num_workers, or prepare the cache on a faster disk",
    "optimizer": "the optimizer: raise training.grad_accum_nums, so that it runs once for more tokens",
    "copies": "the copies: look for .to(), .item() and tensors made on the host inside the step",
    _OTHER: "the many small operations: training.compile=on fuses them",
    _IDLE: "the gaps: the host does not keep up; training.compile=on, a larger training.batch_size, less Python a step",
}
_EXPOSED_ADVICE = (
    "the {what} that nothing hides: raise training.batch_size or training.grad_accum_nums, or shard within a host "
    "only (parallel.strategy=hsdp)"
)
_NOTHING = "nothing stands out: the matrix products and attention take what is there"
_WORTH_NAMING = 0.05


# What an instant is given to where several things happen in it: the highest.
_COMPUTATION, _COMMUNICATION, _COPY, _DATA = 4, 3, 2, 1


class _Span(NamedTuple):
    start: float
    end: float
    priority: int
    label: str


@dataclass(frozen=True)
class TraceSummary:
    """Shares of the traced time, largest first; they add up to 1."""

    steps: int
    seconds: float
    shares: dict[str, float]
    communication_share: float
    communication_hidden: float | None
    advice: str

    def words(self) -> str:
        shown = [f"{share:.0%} {what}".replace("%", " %") for what, share in self.shares.items() if share >= 0.005]
        return f"{', '.join(shown)}; the first thing to change is {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "words": self.words()}


def summarize(events: Iterable[Mapping[str, Any]], steps_done: int | None = None) -> TraceSummary | None:
    """From the `traceEvents` of a trace; None where it holds no whole step.

    Where training ended inside the window, the last step of the trace is only what came after: `steps_done` leaves it
    out.
    """
    timed = [e for e in events if e.get("ph") == "X" and "dur" in e and "ts" in e]
    steps = [e for e in timed if e.get("cat") == "user_annotation" and _is_step(str(e.get("name", "")), steps_done)]
    if not steps:
        return None
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    on_device = any(e.get("cat") == "kernel" for e in timed)
    spans = _device_spans(timed) if on_device else _host_spans(timed, main=steps[0].get("tid"))
    waits = [e for e in timed if e.get("cat") in _HOST and _LOADER.match(str(e.get("name", "")))]
    spans += [_span(wait, _DATA, _WAITING) for wait in waits]
    inside = [_clipped(span, begin, end) for span in spans if span.end > begin and span.start < end]
    taken = _sweep(inside, begin, end)
    total = end - begin
    shares = dict(sorted(((what, t / total) for what, t in taken.items() if t > 0), key=lambda item: -item[1]))
    alone = _sweep([s for s in inside if s.priority == _COMMUNICATION], begin, end)
    communicating = sum(t for what, t in alone.items() if what != _IDLE)
    exposed = sum(share for what, share in shares.items() if what.startswith("exposed "))
    return TraceSummary(
        steps=len(steps),
        seconds=total / 1e6,
        shares=shares,
        communication_share=communicating / total,
        communication_hidden=1 - exposed * total / communicating if communicating else None,
        advice=_advice(shares),
    )


def _is_step(name: str, steps_done: int | None) -> bool:
    match = _STEP.fullmatch(name)
    return match is not None and (steps_done is None or int(match[1]) < steps_done)


def _clipped(span: _Span, begin: float, end: float) -> _Span:
    return span._replace(start=max(span.start, begin), end=min(span.end, end))


def _span(event: Mapping[str, Any], priority: int, label: str) -> _Span:
    return _Span(event["ts"], event["ts"] + event["dur"], priority, label)


def _collective(name: str) -> str:
    return f"exposed {next((what for what, pattern in _COLLECTIVES if pattern.search(name)), 'communication')}"


def _device_spans(events: Sequence[Mapping[str, Any]]) -> list[_Span]:
    spans = []
    for event in events:
        if event.get("cat") in _DEVICE:
            name = str(event.get("name", ""))
            if _COMMUNICATES.search(name):
                spans.append(_span(event, _COMMUNICATION, _collective(name)))
            else:
                # A batch that is copied ahead on a stream of its own hides nothing.
                copies = event.get("cat") != "kernel"
                spans.append(_span(event, _COPY if copies else _COMPUTATION, _computation(name)))
    return spans


def _host_spans(events: Sequence[Mapping[str, Any]], main: Any) -> list[_Span]:
    """Operators of the main thread compute; collectives run on threads of their backend, or block the main one."""
    stepping = sorted(
        (e["ts"], e["ts"] + e["dur"]) for e in events if str(e.get("name", "")).startswith("Optimizer.step")
    )
    spans = []
    for event in events:
        if event.get("cat") not in _HOST:
            continue
        name = str(event.get("name", ""))
        if _COMMUNICATES.search(name):
            spans.append(_span(event, _COMMUNICATION, _collective(name)))
        elif event.get("cat") == "cpu_op" and event.get("tid") == main:
            in_optimizer = any(begin <= event["ts"] < end for begin, end in stepping)
            spans.append(_span(event, _COMPUTATION, "optimizer" if in_optimizer else _computation(name)))
    return spans


def _computation(name: str) -> str:
    return next((what for what, pattern in _COMPUTES if pattern.search(name)), _OTHER)


def _sweep(spans: Sequence[_Span], begin: float, end: float) -> dict[str, float]:
    """Each instant to the active span of the highest priority; of those, to the innermost, which began last."""
    taken: dict[str, float] = defaultdict(float)
    waiting = sorted(spans)
    bounds = sorted({begin, end, *(s.start for s in waiting), *(s.end for s in waiting)})
    active: list[tuple[int, float, float, _Span]] = []
    position = 0
    for start, stop in itertools.pairwise(bounds):
        while position < len(waiting) and waiting[position].start <= start:
            span = waiting[position]
            heapq.heappush(active, (-span.priority, -span.start, span.end, span))
            position += 1
        while active and active[0][3].end <= start:
            heapq.heappop(active)
        taken[active[0][3].label if active else _IDLE] += stop - start
    return taken


def _advice(shares: Mapping[str, float]) -> str:
    """The largest share that is not the work itself."""
    changeable = {what: share for what, share in shares.items() if what not in ("GEMM", "attention")}
    largest = max(changeable, key=lambda what: changeable[what], default=None)
    if largest is None or changeable[largest] < _WORTH_NAMING:
        return _NOTHING
    if largest.startswith("exposed "):
        return _EXPOSED_ADVICE.format(what=largest.removeprefix("exposed "))
    return _ADVICE[largest]
