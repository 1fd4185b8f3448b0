"""The terminal of a job: every line of every rank, labelled and whole, above a live bar where there is a terminal.

Runs on a thread of its own, so that a reader that stops reading (a pager, a full pipe) never stops the supervision.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from model_check.launch.log_lines import LineTail, Tracebacks, clean, fitted, labelled
from model_check.record.metrics import StepMetrics
from model_check.record.step_lines import clock
from model_check.record.typed import from_json

if TYPE_CHECKING:
    from rich.progress import TaskID

_LOOK_EVERY_S = 0.05
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class ConsoleOptions:
    """How the job shows itself. `live` None: a bar where `stream` is a terminal; `log_copies`: a second home."""

    stream: TextIO | None = None
    live: bool | None = None
    log_copies: Path | None = None
    max_steps: int | None = None


class _NotShown(Exception):
    """The screen takes no more. What happens to the copies of the logs is another matter."""

    def __init__(self, why: OSError) -> None:
        super().__init__(why.strerror or str(why))
        # A stream may have an error of its own for what the system said.
        self.reader_left = isinstance(why.__cause__ or why, BrokenPipeError)


class _Pipe:
    """Plain lines, each written and flushed whole."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"

    def line(self, text: str) -> None:
        self._stream.write(text.encode(self._encoding, "backslashreplace").decode(self._encoding) + "\n")
        self._stream.flush()

    def progress(self, step: StepMetrics, eta_s: float | None) -> None:
        """A pipe gets no bar: the ranks' own lines say the same."""

    def close(self) -> None:
        """Nothing is held back."""


class _Terminal:
    """Lines that scroll, and below them one bar that stays."""

    def __init__(self, stream: TextIO, max_steps: int | None) -> None:
        # Imported here: in a pipe nobody pays for it.
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.text import Text

        self._text = Text
        self._console = RichConsole(file=stream, highlight=False, markup=False, emoji=False, force_terminal=True)
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._max_steps = max_steps
        self._task: TaskID | None = None

    def line(self, text: str) -> None:
        self._console.print(self._text(fitted(text, self._console.width)), soft_wrap=True)

    def progress(self, step: StepMetrics, eta_s: float | None) -> None:
        state = " | ".join(
            part
            for part in (
                f"loss {step.loss:.4f}" if math.isfinite(step.loss) else "",
                f"{step.tokens_per_s:,.0f} tokens/s" if step.tokens_per_s else "",
                f"ETA {clock(eta_s)}",
            )
            if part
        )
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("train", total=self._max_steps, state=state)
        self._progress.update(self._task, completed=step.step + 1, state=state, refresh=True)

    def close(self) -> None:
        self._progress.stop()


class Console:
    """Follows the logs of the ranks until it is closed. `say` adds a line of the launcher's own."""

    def __init__(self, metrics: Path, options: ConsoleOptions) -> None:
        stream = self._stream = options.stream or sys.stdout
        live = stream.isatty() if options.live is None else options.live
        self._screen: _Terminal | _Pipe = _Terminal(stream, options.max_steps) if live else _Pipe(stream)
        self._log_copies = options.log_copies
        self._tails: tuple[tuple[str, Path, LineTail], ...] = ()
        self._tracebacks = Tracebacks()
        self._followed: set[Path] = set()
        self._metrics = LineTail(metrics) if live else None
        self._max_steps = options.max_steps
        self._own: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model-check-console", daemon=True)
        self._thread.start()

    def follow(self, label: str, log: Path) -> None:
        """Shows what is written to this log from now on; a log already followed stays as it is (a restart)."""
        if log in self._followed:
            return
        self._followed.add(log)
        copy = self._log_copies / log.name if self._log_copies is not None else None
        self._tails = (*self._tails, (label, log, LineTail(log, copy)))

    def say(self, text: str) -> None:
        self._own.put(f"[model-check] {clean(text)}")

    def close(self) -> None:
        """Prints what is left. Where nobody reads, it gives up after a few seconds: the log files have everything."""
        self._closing.set()
        self._thread.join(_FAREWELL_S)
        if self._thread.is_alive() and self._stream is sys.stdout:
            # The thread holds the stream's lock: our exit would wait for it, or abort, at the last flush.
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def _run(self) -> None:
        try:
            while not self._closing.wait(_LOOK_EVERY_S):
                self._show(last=False)
            self._show(last=True)
            self._screen.close()
        except (_NotShown, BrokenPipeError, ValueError) as error:
            # The reader is gone (`| head`), its disk is full, or the stream is closed. The job goes on; copies of the
            # logs do too.
            if isinstance(error, _NotShown) and not error.reader_left:
                said = f"the output cannot be written ({error}); the job goes on without it"
                with suppress(OSError):
                    print(f"[model-check] {said}", file=sys.stderr, flush=True)
            while not self._closing.wait(_LOOK_EVERY_S):
                self._drain(last=False)
            self._drain(last=True)

    def _show(self, *, last: bool) -> None:
        for line in self._drain(last=last):
            self._line(line)
        while not self._own.empty():
            self._line(self._own.get())
        if self._metrics is not None:
            for record in self._metrics.read()[-1:]:
                self._show_progress(record)

    def _line(self, text: str) -> None:
        try:
            self._screen.line(text)
        except OSError as error:
            raise _NotShown(error) from error

    def _drain(self, *, last: bool) -> list[str]:
        lines: list[str] = []
        for label, log, tail in self._tails:
            written = tail.close() if last else tail.read()
            lines += [labelled(label, line) for line in self._tracebacks.shown(label, written, log)]
        return [*lines, *self._tracebacks.left()] if last else lines

    def _show_progress(self, line: str) -> None:
        try:
            step = from_json(StepMetrics, json.loads(line))
        except ValueError:
            return
        if step.step_s:  # else it is another writer's record: the bar waits for the next one
            left = None if self._max_steps is None else (self._max_steps - step.step - 1) * step.step_s
            self._screen.progress(step, left)
