"""The moment memory runs out: who holds what, written down while everything is still alive.

On a GPU torch's allocator calls us before it raises; a snapshot for PyTorch's memory viewer goes into dumps/, and what
it says, summed up, into the rank's events and a JSON file beside it. For a few steps, or minutes, the allocator also
notes the Python line behind each live block: most runs that do not fit show it by then, what stays from step to step
has its line for good, and a run that goes well pays nothing any more. Host memory has no such allocator: there the
exception is looked at on its way.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from model_check.blackbox.box import BOX
from model_check.blackbox.current_phase import step_around
from model_check.blackbox.memory_marks import read_host_limits, resident_bytes, shared_out_bytes
from model_check.blackbox.relayed_errors import words
from model_check.record import write_json_atomic
from model_check.record.error_texts import HOST_OOM
from model_check.record.events.memory import OutOfMemory, RecordingFailed

# A script that searches for its largest batch runs out of memory on purpose, again and again.
MOST_CAPTURES = 3
NOTED_STEPS = 3
NOTED_S = 300.0  # limit if no torch optimizer ever steps


class _Captured:
    count = 0
    errors: set[int] = set()  # noqa: RUF012 one process, one set


def install() -> None:
    """Chained before the hook that writes the exception down, for that one is the last event of a rank."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note(error)
        previous(kind, error, trace)

    sys.excepthook = hook


def patch_cuda(module: ModuleType) -> None:
    """torch.cuda: watch its allocator once CUDA is in use, and not before (a fork must stay possible)."""
    once_in_use = getattr(module, "_lazy_call", None)
    if once_in_use is not None:
        once_in_use(_watch_allocator)


def _watch_allocator() -> None:
    """A torch that calls these things otherwise must not lose its CUDA over it."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    try:
        torch._C._cuda_attach_out_of_memory_observer(_allocator_failed)  # type: ignore[attr-defined]
        _note_lines(torch.cuda.memory, register_optimizer_step_post_hook)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        BOX.event(RecordingFailed.by(error, "device memory"))


def _note_lines(memory: Any, after_each_step: Callable[..., Any], seconds: float = NOTED_S) -> None:
    """Notes only Python frames, only of blocks in use, until NOTED_STEPS steps are done or `seconds` have passed.

    A script may never step a torch optimizer: it only generates, or has its own optimizer.
    A script that records the history for itself, now or later, keeps what it asked for.
    """
    import torch

    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if enabled is not None and enabled():
        return
    record = memory._record_memory_history
    ours, lock = True, threading.Lock()

    def asked_by_the_script(*arguments: Any, **options: Any) -> Any:
        nonlocal ours
        with lock:
            ours = False
            memory._record_memory_history = record
            return record(*arguments, **options)

    def stop() -> None:
        nonlocal ours
        with lock:
            if ours:
                ours = False
                memory._record_memory_history = record
                record(None)

    steps = 0

    def step_done(*_: Any) -> None:
        nonlocal steps
        # The hook stays: torch is in the middle of its list of hooks here, and would raise if one were taken out of it.
        if steps == NOTED_STEPS:
            return
        if not torch.compiler.is_compiling() and step_around(sys._getframe(1)) is not None:
            return
        steps += 1
        if steps == NOTED_STEPS:
            late.cancel()
            stop()

    late = threading.Timer(seconds, stop)
    late.daemon = True
    record("state", context="state", stacks="python", max_entries=1)
    memory._record_memory_history = asked_by_the_script
    after_each_step(step_done)
    late.start()


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device or of the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and HOST_OOM.search(words(error)) is not None


def note(error: BaseException) -> None:
    """An exception on its way out: where it is about memory and the allocator has not told us, look around now."""
    if BOX.recorder is None or not is_out_of_memory(error) or id(error) in _Captured.errors:
        return
    _Captured.errors.add(id(error))
    if type(error).__name__ == "OutOfMemoryError" and _Captured.count:
        return
    _guarded(_capture_host, error)


def _allocator_failed(device: int, requested: int, total: int, free: int) -> None:
    """Called by torch's allocator, without its lock, right before it raises."""
    if BOX.recorder is not None and _Captured.count < MOST_CAPTURES:
        _guarded(_capture_device, device, requested, total, free)


def _guarded(capture: Any, *arguments: Any) -> None:
    """The script's own error must reach it, whatever happens to our look at it."""
    _Captured.count += 1
    try:
        capture(*arguments)
    except Exception as failure:
        BOX.event(RecordingFailed.by(failure, "who holds the memory"))


def _capture_device(device: int, requested: int, total: int, free: int) -> None:
    import torch

    from model_check.blackbox.memory_holdings import find_owners, sum_up

    stats = torch.cuda.memory_stats(device)
    with _compiler_left_alone(torch):
        snapshot = torch.cuda.memory._snapshot(device)
    holdings = sum_up(
        [s for s in snapshot["segments"] if s.get("device", device) == device], find_owners(), _line_of_block
    )
    _write(
        OutOfMemory(
            device=f"cuda:{device}",
            requested=requested,
            total=total,
            free=free,
            allocated=stats.get("allocated_bytes.all.current", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
            at=_line_here(),
            **vars(holdings),
        ),
        snapshot,
    )


@contextmanager
def _compiler_left_alone(torch: Any) -> Iterator[None]:
    """To name lines in compiled code, a snapshot asks for torch's compiler, which is then imported: for seconds.

    Where it is not loaded, nothing was compiled.
    """
    lazy: set[str] = getattr(torch, "_lazy_modules", set())
    hidden = "_inductor" in lazy and "torch._inductor" not in sys.modules
    if hidden:
        lazy.discard("_inductor")
    try:
        yield
    finally:
        if hidden:
            lazy.add("_inductor")


def _capture_host(error: BaseException) -> None:
    holdings: dict[str, Any] = {}
    if "torch" in sys.modules:
        from model_check.blackbox.memory_holdings import Holdings, find_owners

        holdings = vars(Holdings.of(find_owners().values()))
    frame = BOX.code.user_frame(BOX.code.described_traceback(error.__traceback__))
    _write(
        OutOfMemory(
            device="cuda" if type(error).__name__ == "OutOfMemoryError" else "cpu",
            requested=OutOfMemory.told_by(words(error)).requested,
            rss=resident_bytes(),
            pss=shared_out_bytes(),
            limits=read_host_limits(),
            at=frame.site if frame is not None else "",
            **holdings,
        )
    )


def _write(account: OutOfMemory, snapshot: Any = None) -> None:
    recorder, run_dir = BOX.recorder, BOX.run_dir
    if recorder is None or run_dir is None:
        return
    stem = run_dir.dumps_dir / f"oom-rank-{recorder.rank}"
    account = replace(account, rank=recorder.rank, step=recorder.steps)
    try:
        run_dir.dumps_dir.mkdir(exist_ok=True)
        if snapshot is not None:
            account = replace(account, snapshot=_dump(snapshot, stem.with_suffix(".pickle")))
        write_json_atomic(stem.with_suffix(".json"), account.body())
    except OSError as error:
        BOX.unwritten("dumps", error)
    BOX.event(account)


def _dump(snapshot: Any, path: Path) -> str | None:
    """In the form that PyTorch's memory viewer reads. A full disk costs the file, not the finding."""
    try:
        with path.open("wb") as file:
            pickle.dump(snapshot, file)
    except OSError:
        return None
    return f"dumps/{path.name}"


def _line_of_block(frames: list[dict[str, Any]]) -> str:
    """The innermost line of the user's among a block's frames; of ours where our trainer is the program."""
    for frame in frames:
        shown = BOX.code.shown(str(frame.get("filename") or ""))
        if shown is not None:
            return f"{shown}:{frame.get('line')}"
    for frame in frames:
        file = str(frame.get("filename") or "")
        if f"{Path(__file__).parents[1]}/" in file:
            return f"{Path(file).relative_to(Path(__file__).parents[2])}:{frame.get('line')}"
    return ""


def _line_here() -> str:
    """Where the script is: on this thread, or (backward runs on threads of C++) on the main one."""
    found = BOX.code.innermost(sys._getframe(1))
    if found is None:
        found = BOX.code.innermost(sys._current_frames().get(threading.main_thread().ident or 0))
    return f"{found[0]}:{found[1]}" if found is not None else ""
