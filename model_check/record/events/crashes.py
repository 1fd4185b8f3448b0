"""Events about exceptions and exits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from model_check.record.events.base import Event
from model_check.record.stacks import Frame

_OWN_CODE = re.compile(r"\[(MC\d{3})\] ")
WayOut = Literal["", "return", "exception", "sys.exit", "os._exit", "SystemExit"]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is said of an exception."""

    type: str = ""  # the name of its class
    message: str = ""
    user_frame: Frame | None = None  # the user's innermost line


@dataclass(frozen=True, kw_only=True)
class Origin(Told):
    """The first raise of an exception that reached the rank as text, from another process."""

    frames: tuple[Frame, ...] = ()  # outermost first
    where: str = ""  # that process, as torch names it


@dataclass(frozen=True, kw_only=True)
class ExceptionEvent(Told, Event):
    """An exception on a rank."""

    frames: tuple[Frame, ...] = ()  # its way, outermost first
    thread: str = ""  # its name
    code: str | None = None  # of an error of our own: the MC code that it gives itself
    origin: Origin | None = None
    cause: Told | None = None  # what it followed from
    parts: tuple[Told, ...] | None = None  # of a group of exceptions
    root_type: str | None = None  # the oldest exception of its chain, where the launcher's code caught it
    root_message: str | None = None

    @property
    def first(self) -> Told:
        """What was raised first, where the rank only raised again what one of its worker processes told it."""
        return self.origin if self.origin is not None and self.origin.type else self

    @property
    def own_code(self) -> str:
        """The code that an error of ours gives itself; in the files of earlier versions only its message has it."""
        found = _OWN_CODE.match(self.message)
        return self.code or (found[1] if found is not None else "")

    @property
    def frames_told(self) -> tuple[Frame, ...]:
        """All its frames, the user's last."""
        return (*self.frames, self.user_frame) if self.user_frame is not None else self.frames


@dataclass(frozen=True, kw_only=True)
class UncaughtException(ExceptionEvent, kind="exception"):
    """It ended, or is ending, the rank."""

    handled: bool = False
    rank: int | None = None
    attempt: int | None = None
    exit_code: int | None = None  # what the rank makes of it
    traceback: str | None = None  # as text


@dataclass(frozen=True, kw_only=True)
class ThreadException(ExceptionEvent, kind="thread_exception"):
    """It ended a thread; the process lives on without that."""


@dataclass(frozen=True, kw_only=True)
class CaughtException(ExceptionEvent):
    """The script has, or may have, a handler for it."""

    during: str = ""  # the phase whose call it left; "handler": it was met in its handler
    t_raised: float | None = None  # CLOCK_MONOTONIC seconds

    @property
    def raised_t(self) -> float:
        return self.t if self.t_raised is None else self.t_raised


@dataclass(frozen=True, kw_only=True)
class RaisedException(CaughtException, kind="raised"):
    """Written at once: its handler may hang."""


@dataclass(frozen=True, kw_only=True)
class SwallowedException(CaughtException, kind="swallowed_exception"):
    """The script went on from it."""

    handled: bool = True


@dataclass(frozen=True, kw_only=True)
class Exit(Event, kind="exit"):
    """The last event of a process."""

    code: int | None = None
    via: WayOut = ""  # SystemExit: raised, not called
    user_frame: Frame | None = None  # who called it
    message: str | None = None  # the words that were given instead of a code


@dataclass(frozen=True, kw_only=True)
class Fork(Event, kind="fork"):
    """The script forked a child."""

    child_pid: int = 0
