"""Signs of life of a rank that others wait for: it completes forwards, its lines change, its bytes move.

A loop over the same few lines that may run forever is not a sign of life, however much it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from model_check.diagnose.evidence import NEWEST_RECORDS, POLLING_PHASES, WAIT_PHASES
from model_check.diagnose.frames import fetching_at
from model_check.diagnose.source import Loop, enclosing_loop
from model_check.diagnose.stuck_rank import BUSY_SHARE, POLLS_PER_S, SHARED_CORE, StuckRank
from model_check.record.process_sample import ProcessSample
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame, ThreadStack

_FEW_LINES = 3  # a loop that only waits is seen at no more places than this
_MOVED_BYTES = 1 << 20
_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")

LoopOf = Callable[[Frame], Loop | None]  # the loop around a frame's line, unless it holds a recorded call


def sign_of_life(s: StuckRank) -> str:
    """What shows that the rank makes progress; empty if nothing does."""
    if s.stopped:
        return ""
    if (newest := _newest_progress(s)) is not None:
        did = "began" if newest.event == "begin" else "completed"
        return f"rank {s.rank.rank} {did} its {newest.phase} {s.evidence.now - newest.time_ns / 1e9:.1f} s ago"
    recent = s.recent_samples
    moved = recent[-1].io_bytes - recent[0].io_bytes if len(recent) > 1 else 0
    if moved > _MOVED_BYTES:
        return f"rank {s.rank.rank} moves bytes: {moved / (1 << 20):.0f} MiB in {recent[-1].t - recent[0].t:.0f} s"
    looks = [dump.main for dump in s.looks if dump.main is not None]
    if _gets_on(looks, s.busy, s.wakes, s.loop_without_records):
        return f"rank {s.rank.rank} gets on: {_places(looks)}"
    if s.waits_for_workers:
        return _workers_get_on(s)
    if s.in_loader and _computes(looks, s.busy, s.loop_without_records):
        return f"rank {s.rank.rank} computes in one call: {_places(looks)}"
    return ""


def _newest_progress(s: StuckRank) -> Crumb | None:
    """The rank's own work that just began or ended, or a wait that just ended, while other ranks wait."""
    if s.evidence.stall is None:
        return None
    newest = next(filter(_is_progress, reversed(s.rank.crumbs[-NEWEST_RECORDS:])), None)
    since = s.evidence.now - s.evidence.quiet_after_s
    return newest if newest is not None and newest.time_ns / 1e9 > since else None


def _is_progress(crumb: Crumb) -> bool:
    if crumb.phase not in WAIT_PHASES:
        return True
    return crumb.phase not in POLLING_PHASES and crumb.event == "end" and not crumb.raised


def _workers_get_on(s: StuckRank) -> str:
    """Says that every loader worker with a batch to fetch makes progress; empty if one does not."""
    said = []
    for pid, looks in s.worker_looks().items():
        children = [(sample.t, child) for sample in s.recent_samples for child in sample.children if child.pid == pid]
        cpu, wakes, moved = _rates(children)
        runnable = sum(child.state == "R" for _, child in children) > len(children) / 2
        busy = cpu >= BUSY_SHARE or (runnable and cpu >= SHARED_CORE)
        working = [thread for thread in looks if fetching_at(thread.frames)]
        if not working:
            continue
        if moved > _MOVED_BYTES or _gets_on(working, busy, wakes >= POLLS_PER_S, s.loop_without_records):
            said.append(f"its loader worker {pid} gets on: {_places(working)}")
        elif _computes(working, busy, s.loop_without_records):
            said.append(f"its loader worker {pid} computes in one call: {_places(working)}")
        else:
            return ""
    return "; ".join(said)


def _rates(seen: Sequence[tuple[float, ProcessSample]]) -> tuple[float, float, int]:
    """CPU seconds per second, wake-ups per second, and bytes moved."""
    if len(seen) < 2 or seen[-1][0] - seen[0][0] < 0.3:
        return 0.0, 0.0, 0
    (begun, first), (ended, last) = seen[0], seen[-1]
    woken = (last.switches or 0) - (first.switches or 0)
    return (last.cpu_s - first.cpu_s) / (ended - begun), woken / (ended - begun), last.io_bytes - first.io_bytes


def _gets_on(looks: Sequence[ThreadStack], busy: bool, wakes: bool, loop_of: LoopOf) -> bool:
    if len(looks) < 2 or not (busy or wakes):
        return False
    if any(_will_end(thread, loop_of) for thread in looks):
        return True
    seen = {tuple((frame.file, frame.function, frame.line) for frame in thread.frames) for thread in looks}
    loop = _loop_around(looks, loop_of)
    if loop is None:
        return len(seen) >= _FEW_LINES
    return busy and len(seen) > _FEW_LINES


def _computes(looks: Sequence[ThreadStack], busy: bool, loop_of: LoopOf) -> bool:
    """Whether it is inside one native call without the interpreter lock, and not in a loop that may be endless."""
    stacks = {tuple((frame.file, frame.function, frame.line) for frame in thread.frames) for thread in looks}
    if len(looks) < 2 or len(stacks) > 1 or not busy or any(thread.gil for thread in looks):
        return False
    loops = [loop_of(frame) for frame in looks[-1].frames if frame.is_program]
    return all(loop is None or loop.ends for loop in loops)


def _will_end(thread: ThreadStack, loop_of: LoopOf) -> bool:
    """Whether the innermost loop around it, in its function or in a caller, iterates over something finite."""
    for frame in thread.frames:
        if not frame.is_program:
            continue
        if frame.function.rpartition(".")[2] in _COMPREHENSIONS:
            return True
        if enclosing_loop(frame) is not None:
            loop = loop_of(frame)
            return loop is not None and loop.ends
    return False


def _loop_around(looks: Sequence[ThreadStack], loop_of: LoopOf) -> Loop | None:
    """The user's loop that contains every line seen, in the innermost function that all looks share."""
    shared: Frame | None = None
    for level in zip(*(reversed(thread.frames) for thread in looks), strict=False):
        if len({(frame.file, frame.function) for frame in level}) > 1:
            break
        shared = level[0] if level[0].is_user_code else shared
        if len({frame.line for frame in level}) > 1:
            break
    return loop_of(shared) if shared is not None else None


def _places(looks: Sequence[ThreadStack]) -> str:
    sites = dict.fromkeys(frame.site for thread in looks if (frame := thread.user_frame) is not None)
    return f"seen at {', '.join(list(sites)[-_FEW_LINES:])}" if sites else "its stack changes"
