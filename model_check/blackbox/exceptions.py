"""Exceptions that a script catches and goes on from: often the reason why a rank drifts away from its peers.

An exception is noted when it leaves an instrumented call, or when its handler speaks (prints, logs, calls a
collective), and a `raised` event is written at once: its handler may hang. If the script then goes on, a
`swallowed_exception` event follows; if the exception ends the process, an `exception` event does (see endings). Only
words are kept: holding on to the exception itself would hold on to its frames and the tensors in them.
"""

from __future__ import annotations

import builtins
import errno
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TextIO, TypeVar

from model_check.blackbox import relayed_errors
from model_check.blackbox.box import BOX, harmless
from model_check.errors import ModelCheckError
from model_check.record.events.crashes import ExceptionEvent, Origin, RaisedException, SwallowedException, Told
from model_check.record.redaction import redact_text, secret_values
from model_check.record.user_code import is_watching

E = TypeVar("E", bound=ExceptionEvent)
# A loop that fails and retries for hours must not fill the disk, nor hide a fault at another line.
_MAX_SWALLOWED = 200
_MAX_PER_LINE = 3
_MAX_MESSAGE = 4000
_MOST_PARTS = 8
_MONITORING_ID = 4  # 0 to 2 and 5 are spoken for by debuggers, coverage, profilers and optimizers
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)  # since Python 3.11
_OUR_PACKAGE = __file__.rpartition("blackbox")[0]  # spelled as in our frames' co_filename
# Control flow, not faults.
_ORDINARY = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt, ImportError)


def event_of(error: BaseException, kind: type[E], **more: Any) -> E:
    """The event of this kind that tells of the exception."""
    code = BOX.code
    frames = code.described_traceback(error.__traceback__)
    user_frame = code.user_frame(frames)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # The line that does not parse never ran, so no frame has it.
        user_frame = code.described(str(error.filename), error.lineno, "<module>")
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    # The line of a group is only where they were put together.
    parts = error.exceptions[:_MOST_PARTS] if _GROUP is not None and isinstance(error, _GROUP) else None
    return kind(
        type=type(error).__name__,
        message=shown(relayed_errors.words(error)),
        frames=frames,
        user_frame=user_frame,
        thread=threading.current_thread().name,
        code=error.code if isinstance(error, ModelCheckError) else None,
        origin=_origin(error),
        cause=_brief(cause) if cause is not None and cause is not error else None,
        parts=tuple(map(_brief, parts)) if parts is not None else None,
        **more,
    )


def _origin(error: BaseException) -> Origin | None:
    """The first raise in another process, its lines as the script's are shown."""
    told = relayed_errors.original(error)
    if told is None:
        return None
    frames = tuple(BOX.code.described(frame.file, frame.line, frame.function) for frame in told.frames)
    return replace(told, message=shown(told.message), frames=frames, user_frame=BOX.code.user_frame(frames))


def hide_our_frames(error: BaseException | None) -> None:
    """Removes our wrappers from the traceback that is about to be printed, and from its chained tracebacks.

    They appear between any two modules that call each other, and say nothing about the script. An exception that we
    raise ourselves keeps its last frame.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kept = [trace for trace in _links(error.__traceback__) if not _is_ours(trace) or trace.tb_next is None]
        for trace, after in pairwise(kept):
            trace.tb_next = after
        error.__traceback__ = kept[0] if kept else None
        error = error.__cause__ or error.__context__


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_OUR_PACKAGE) and is_watching(file)


def _brief(error: BaseException) -> Told:
    """What is said of an exception that stands behind another one."""
    user_frame = BOX.code.user_frame(BOX.code.described_traceback(error.__traceback__))
    return Told(type=type(error).__name__, message=shown(relayed_errors.words(error)), user_frame=user_frame)


def shown(message: str) -> str:
    """A message of the script as an event may hold it: shortened, and without secrets."""
    told = message[: 16 * _MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
    # Shortened last, because half a secret would not be recognised.
    return redact_text(told, secret_values(os.environ))[:_MAX_MESSAGE]


def _raised_at(error: BaseException) -> tuple[type, str, int]:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error), "", 0
    return type(error), trace.tb_frame.f_code.co_filename, trace.tb_lineno


class Notes:
    """Per thread, the exception that was last seen leaving a call and has not yet ended the process."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, RaisedException]] = {}
        self._written = 0
        self._lines: Counter[tuple[type, str, int]] = Counter()

    def left_a_call(self, error: BaseException, where: str) -> None:
        """An instrumented call raised. Its callers may still let it through."""
        self._note(error, where)

    def caught(self, error: BaseException) -> None:
        """A handler of the script's has it. It may still raise it again."""
        self._note(error, "handler")

    @harmless
    def _note(self, error: BaseException, during: str) -> None:
        if isinstance(error, _ORDINARY) or self._written >= _MAX_SWALLOWED:
            return
        thread = threading.get_ident()
        known = self._pending.get(thread)
        if known is not None and known[0] == id(error):
            return
        line = _raised_at(error)
        self._lines[line] += 1
        if self._lines[line] > _MAX_PER_LINE:
            return
        raised = event_of(error, RaisedException, during=during, t_raised=time.monotonic())
        self._pending[thread] = (id(error), raised)
        BOX.event(raised)

    def moved_on(self) -> None:
        """The thread begins something new: whatever was pending and is no longer being handled was swallowed."""
        handled = sys.exc_info()[1]
        if handled is not None:
            self.caught(handled)
        if self._pending:
            self._settle(handled)

    @harmless
    def _settle(self, handled: BaseException | None) -> None:
        thread = threading.get_ident()
        pending = self._pending.get(thread)
        if pending is None or (handled is not None and id(handled) == pending[0]):
            return
        del self._pending[thread]
        self._written += 1
        BOX.event(SwallowedException(**vars(pending[1])))

    def ended_with(self, error: BaseException) -> None:
        """This exception ends the thread: it was not swallowed. One that was pending before it was."""
        pending = self._pending.get(threading.get_ident())
        if pending is not None and pending[0] != id(error):
            self._settle(error)
        self._pending.pop(threading.get_ident(), None)

    def forget(self) -> None:
        """In the child of a fork: these were the parent's."""
        self._pending.clear()
        self._lines.clear()
        self._written = 0


NOTES = Notes()


def hear_handlers() -> None:
    """Hears of exceptions that the user's own code catches in silence, where the interpreter can tell.

    sys.monitoring (Python 3.12) calls back only when an exception reaches a handler, so a script that raises nothing
    pays nothing. Before that, an exception is noticed when it leaves an instrumented call or when its handler speaks.
    """
    if sys.version_info < (3, 12):
        return
    monitoring: Any = sys.monitoring
    if monitoring.get_tool(_MONITORING_ID) is not None:
        return
    monitoring.use_tool_id(_MONITORING_ID, "model-check")
    monitoring.register_callback(_MONITORING_ID, monitoring.events.EXCEPTION_HANDLED, _handled)
    monitoring.set_events(_MONITORING_ID, monitoring.events.EXCEPTION_HANDLED)


def _handled(code: CodeType, offset: int, error: BaseException) -> None:
    if BOX.recorder is not None and BOX.code.shown(code.co_filename) is not None:
        NOTES.caught(error)


def _is_our_log(stream: TextIO) -> bool:
    """Whether a stream is the log that the launcher opened for this rank, not a user's file or terminal."""
    try:
        return "/model_check_logs_" in str(Path(f"/proc/self/fd/{stream.fileno()}").readlink())
    except (OSError, ValueError, AttributeError):
        return False


def listen_to(stream: TextIO | None, interpreter_says: Callable[[str], None] | None = None) -> None:
    """Notes the exception being handled whenever something is written: handlers print and log what they swallow.

    `interpreter_says` is given what no Python code has written.
    """
    if stream is None:
        return
    write = stream.write
    into_our_log = _is_our_log(stream)

    def heard(text: str) -> int:
        handled = sys.exc_info()[1]
        if handled is not None and BOX.recorder is not None:
            NOTES.caught(handled)
        if interpreter_says is not None and sys._getframe().f_back is None:
            interpreter_says(text)
        try:
            return write(text)
        except OSError as error:
            # The script did not choose this file, so output that its full disk rejects is dropped.
            if into_our_log and error.errno in (errno.ENOSPC, errno.EDQUOT):
                return len(text)
            raise

    try:
        stream.write = heard  # type: ignore[method-assign]
    except AttributeError:
        # A stream type without room for attributes: its handlers are not heard.
        return
