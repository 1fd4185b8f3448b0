"""How the process ends: the exception, exit call or return that the launcher sees only as an exit code.

Everything is chained, nothing replaced: torchelastic's error files, rich's tracebacks and a script's own hooks still
run. Nothing here communicates; a failing rank writes locally.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from model_check.blackbox import memory_marks
from model_check.blackbox.backend_shutdown import let_backends_finish
from model_check.blackbox.box import BOX, FOLLOWER, harmless
from model_check.blackbox.exceptions import NOTES, event_of, hide_our_frames, shown
from model_check.blackbox.relayed_errors import words
from model_check.blackbox.spans import is_wrapped
from model_check.record.events.crashes import Exit, ThreadException, UncaughtException, WayOut

_LEFT_S = 0.4


class _Ending:
    """What is known so far about how this process ends."""

    def __init__(self) -> None:
        self.exception: int | None = None  # id of the exception already written
        self.exit_call: Exit | None = None
        self.written = False

    @harmless
    def fail(self, error: BaseException) -> None:
        """An exception that nobody caught."""
        if BOX.recorder is None or isinstance(error, (SystemExit, GeneratorExit)) or self.exception == id(error):
            return
        self.exception = id(error)
        NOTES.ended_with(error)
        said = words(error)
        of_memory = isinstance(error, MemoryError) or "out of memory" in said or "bad_alloc" in said
        if (steps := FOLLOWER.loaded) is not None:
            steps.process_fails()
            if isinstance(error, Exception) and not of_memory:  # there is none to look with either
                steps.process_stops(list(_traceback(error.__traceback__)), said)
        if of_memory:
            memory_marks.mark("memory error")
        hide_our_frames(error)
        BOX.event(event_of(error, UncaughtException))

    @harmless
    def asked(self, code: int, via: WayOut, frame: FrameType | None, message: str = "") -> None:
        """sys.exit, exit or os._exit was called, here; sys.exit may have been given words instead of a code."""
        if code and (steps := FOLLOWER.loaded) is not None:
            handled = sys.exc_info()[1]
            trace = _traceback(handled.__traceback__) if handled is not None else ()
            steps.process_stops([*_stack(frame), *trace], words(handled) if handled is not None else "")
        words_given = shown(message) if message else None
        self.exit_call = Exit(code=code, via=via, user_frame=BOX.code.caller(frame), message=words_given)

    def interpreter_says(self, text: str) -> None:
        """Words of the interpreter's own, after the script's last line: those of a SystemExit that nobody caught."""
        on_main = threading.current_thread() is threading.main_thread()
        if getattr(threading, "_SHUTTING_DOWN", False):
            return  # an atexit handler made of C code, `print` itself say: the script is over
        if BOX.recorder is not None and on_main and self.exit_call is None and self.exception is None and text.strip():
            self.exit_call = Exit(code=1, via="SystemExit", message=shown(text))

    @harmless
    def write(self) -> None:
        """The last event of the process."""
        if self.written or BOX.recorder is None:
            return
        self.written = True
        last = sys.modules["sys"].__dict__.get("last_value")
        if isinstance(last, BaseException):
            # A hook of the script's own took our place.
            self.fail(last)
        if (steps := FOLLOWER.loaded) is not None:
            if self.exception is None and (self.exit_call is None or self.exit_call.via == "SystemExit"):
                # A bare `raise SystemExit` looks like an end of the script; by its code it is told which it was.
                steps.process_stops((), "")
            if steps.looks_back():
                # Only now: it may take a second run of the step, and what the script has to say is said.
                with _ending_in_time():
                    steps.look_back()
            steps.process_ends()
        memory_marks.mark("exit")
        if self.exception is not None:
            BOX.event(Exit(code=1, via="exception"))
        else:
            NOTES.moved_on()
            BOX.event(self.exit_call or Exit(code=0, via="return"))


ENDING = _Ending()


def _exit_code(code: object) -> int:
    """What the interpreter makes of the argument of sys.exit: a text is printed and becomes 1."""
    if code is None:
        return 0
    return code if isinstance(code, int) else 1


def install() -> None:
    sys.excepthook = _chain_excepthook(sys.excepthook)
    threading.excepthook = _chain_thread_hook(threading.excepthook)
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        _wrap_exit(module, name)
    _wrap_hard_exit()
    # The first to be registered is the last to be called: what the script does at its exit has been done by then.
    atexit.register(let_backends_finish)
    atexit.register(ENDING.write)


def forget_after_fork() -> None:
    ENDING.__init__()  # type: ignore[misc]


def _chain_excepthook(previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ENDING.fail(error)
        previous(kind, error, error.__traceback__ if trace is not None else None)

    return hook


def _traceback(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """The frames of an exception with their lines, outermost first."""
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _stack(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The same of a call that is under way."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


class _Hurried(BaseException):
    """There is no more time."""


def _hurry(number: int, frame: FrameType | None) -> NoReturn:
    raise _Hurried


@contextmanager
def _ending_in_time() -> Iterator[None]:
    """Whoever ends all ranks because one has failed sends SIGTERM, and SIGKILL a second later. This one is about to end
    with a code of its own: what it does here is given up in time for that."""
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or any(signal.getsignal(n) is not signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGALRM)):
        yield  # the script has plans of its own
        return
    signal.signal(signal.SIGALRM, _hurry)
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, _LEFT_S))
    with suppress(_Hurried):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _chain_thread_hook(previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(args: Any) -> None:
        error = args.exc_value
        if error is not None and BOX.recorder is not None and not isinstance(error, SystemExit):
            # The process lives on without this thread.
            NOTES.ended_with(error)
            hide_our_frames(error)
            BOX.event(event_of(error, ThreadException))
        previous(args)

    return hook


def _wrap_exit(module: ModuleType, name: str) -> None:
    original = getattr(module, name, None)
    if original is None or is_wrapped(original):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        # A spawned child of multiprocessing always ends this way, whatever its function did.
        if BOX.recorder is not None and threading.current_thread() is threading.main_thread():
            given = args[0] if args else kwargs.get("code")
            code = _exit_code(given)
            if code or not caller.f_code.co_filename.endswith("multiprocessing/spawn.py"):
                ENDING.asked(code, "sys.exit", caller, given if isinstance(given, str) else "")
        return original(*args, **kwargs)

    functools.update_wrapper(call, original, assigned=("__doc__", "__name__"), updated=())
    call._model_check_original = original  # type: ignore[attr-defined]
    setattr(module, name, call)


def _wrap_hard_exit() -> None:
    original = os._exit
    if is_wrapped(original):
        return

    @functools.wraps(original)
    def call(status: int) -> NoReturn:
        if BOX.recorder is not None:
            caller = sys._getframe(1)
            # A forked child of multiprocessing always ends this way, whatever its function did.
            if not caller.f_code.co_filename.endswith("popen_fork.py"):
                ENDING.asked(status, "os._exit", caller)
            elif status and ENDING.exception is None and ENDING.exit_call is None:
                ENDING.exit_call = Exit(code=status, via="sys.exit")
            ENDING.write()
        original(status)

    call._model_check_original = original  # type: ignore[attr-defined]
    os._exit = call


def recording_failures(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions whose caller turns every exception into an exit code, so that no hook ever sees it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            ENDING.fail(error)
            raise

    return call


def patch_multiprocessing_process(module: Any) -> None:
    """multiprocessing.process: a Process's function fails inside a catch-all."""
    module.BaseProcess.run = recording_failures(module.BaseProcess.run)


def patch_torch_spawn(module: Any) -> None:
    """torch.multiprocessing.spawn: its wrapper writes the traceback to a file for the parent and exits."""
    original = module._wrap

    @functools.wraps(original)
    def _wrap(fn: Callable[..., Any], *args: Any) -> Any:
        return original(recording_failures(fn), *args)

    module._wrap = _wrap
