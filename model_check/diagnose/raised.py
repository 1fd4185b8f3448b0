"""Records of exceptions: the user's line of one, those a script swallowed, and the rules on them: MC301, MC302."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from model_check.diagnose.branches import held_in_finally, swallowing_handler
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.events.crashes import (
    CaughtException,
    ExceptionEvent,
    Origin,
    RaisedException,
    SwallowedException,
    Told,
)
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame, innermost_user

_NOTHING_IN_FINALLY = (
    "repair the named line; the text of the exception is the original one",
    "call no collective in a `finally`: a rank that fails must not wait for the others",
)
_MESSAGE_SHOWN = 400
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer"})


def last_swallowed(evidence: Evidence, rank: int, before: float = 0.0) -> CaughtException | None:
    """The newest exception that this rank swallowed and not all its peers did: what all do keeps them together."""
    peers = [r for r in evidence.ranks.values() if r.rank != rank]
    common = [Counter(map(_kind, _caught(peer))) for peer in peers]
    own = _caught(evidence.of(rank))
    counts = Counter(map(_kind, own))
    alone = [e for e in own if not common or any(seen[_kind(e)] < counts[_kind(e)] for seen in common)]
    known = [error for error in alone if not before or error.raised_t <= before]
    return known[-1] if known else _left_in_the_ring(evidence, rank, before)


def _kind(error: ExceptionEvent) -> tuple[str, str]:
    frame = user_frame(error)
    return error.type, frame.site if frame is not None else ""


def _caught(rank: RankEvidence) -> list[CaughtException]:
    """Exceptions from which the script went on, and those whose handler has itself called something recorded."""
    settled = rank.happened(SwallowedException)
    if rank.exceptions:
        return [*settled]
    known = {error.raised_t for error in settled}
    last_call = max((c.time_ns for c in rank.crumbs if c.event == "begin"), default=0) / 1e9
    handled = [e for e in rank.happened(RaisedException) if e.raised_t not in known and e.raised_t < last_call]
    return [*settled, *handled]


def _left_in_the_ring(evidence: Evidence, rank: int, before: float) -> CaughtException | None:
    """A recorded call that ended with an exception, after which the rank went on: its handler may still be running."""

    def raised(of: RankEvidence) -> list[Crumb]:
        return [c for c in of.crumbs if c.event == "end" and c.raised and c.phase in _STEP_PHASES]

    own = [c for c in raised(evidence.of(rank)) if not before or c.time_ns / 1e9 <= before]
    others = [len(raised(r)) for r in evidence.ranks.values() if r.rank != rank]
    went_on = bool(own) and evidence.of(rank).crumbs[-1].seq > own[-1].seq
    if not went_on or evidence.of(rank).exceptions or (others and min(others) >= len(own)):
        return None
    begin = next((c for c in evidence.of(rank).crumbs if c.seq == own[-1].span), None)
    return CaughtException(
        t=own[-1].time_ns / 1e9,
        type=own[-1].raised,
        message=f"left a call of phase {own[-1].phase}",
        user_frame=frame_of(begin) if begin is not None and begin.file else None,
    )


def user_frame(error: Told) -> Frame | None:
    """The user's innermost frame of an exception, in the process that raised it first."""
    if isinstance(error, ExceptionEvent) and error.first is not error and (frame := user_frame(error.first)):
        return frame
    if error.user_frame is not None and error.user_frame.file:
        return error.user_frame
    return innermost_user(reversed(error.frames)) if isinstance(error, (ExceptionEvent, Origin)) else None


def went_on(rank: RankEvidence, error: CaughtException) -> bool:
    """Whether the rank began anything after it caught this exception, other than to leave."""
    caught = error.raised_t * 1e9
    return any(c.event == "begin" and c.phase != "exit" and c.time_ns > caught for c in rank.crumbs)


def quoted(error: Told, length: int) -> str:
    """`ValueError: its message`; of an exception without a message the statement that raised it."""
    said = error.first if isinstance(error, ExceptionEvent) else error
    message = first_sentence(said.message)
    text = said.user_frame.text if said.user_frame is not None else ""
    kind = said.type or "exception"
    return f"{kind}: {message[:length]}" if message else f"{kind} in `{text[:length]}`" if text else kind


def first_sentence(message: str) -> str:
    """The first line; with the next where it only announces it, as in `2 problems:`."""
    lines = [line.strip() for line in message.strip().split("\n")[:2]]
    return " ".join(lines) if lines[0].endswith(":") else lines[0]


def facts_of(error: ExceptionEvent) -> dict[str, Any]:
    """An exception as the facts of a finding."""
    said = error.first
    message = first_sentence(said.message.removeprefix(f"[{error.own_code}] "))
    facts = {"exception": said.type, "message": message[:_MESSAGE_SHOWN]}
    if not message and said.user_frame is not None and said.user_frame.text:
        facts["statement"] = said.user_frame.text[:_MESSAGE_SHOWN]
    if isinstance(said, Origin):
        facts["raised_in"] = said.where
    if error.cause is not None and error.first is error:
        facts["followed_from"] = error.cause.type
    return facts


def led_to_it(error: ExceptionEvent) -> list[str]:
    """What an exception followed from, and what a group of exceptions holds."""
    cause = [error.cause] if error.cause is not None and error.first is error else []
    return [
        *(f"observed: it followed from {_quoted_with_site(told)}" for told in cause),
        *(f"observed: it holds {_quoted_with_site(part)}" for part in error.parts or ()),
    ]


def _quoted_with_site(error: Told) -> str:
    frame = user_frame(error)
    return quoted(error, 160) + (f", raised at {frame.site}" if frame is not None else "")


def raised_at(rank: RankEvidence, error: ExceptionEvent) -> Frame | None:
    """The user's line of an exception; where its frames hold none, the call that the rank was in at that time."""
    moment = (error.raised_t if isinstance(error, CaughtException) else error.t) * 1e9
    crumb = next((c for c in reversed(rank.crumbs) if c.file and (not moment or c.time_ns <= moment)), None)
    return user_frame(error) or (frame_of(crumb, rank.cwd) if crumb is not None else None)


def swallowed_finding(
    evidence: Evidence,
    rank: int,
    error: CaughtException,
    victims: Iterable[int],
    known: list[str],
    shown_at: float | None = None,
) -> Finding:
    """MC302. `shown_at`: when the drift began to show; the exception itself may be minutes older."""
    frame = raised_at(evidence.of(rank), error)
    kind, message = error.type or "an exception", error.message.split("\n")[0]
    observed = f"observed: {kind}: {message}" + (f", raised at {frame.site}" if frame is not None else "")
    code, cause, title = "MC302", "swallowed", f"rank {rank} swallowed {kind} and drifted away from its peers"
    reasons = [observed, "observed: the script caught it and went on; no other rank did the same", *known]
    fix: tuple[str, ...] = ()
    if (stands := _held_on_its_way_out(evidence.of(rank), error)) is not None:
        code, cause, title, fix = (
            "MC301",
            "held_in_finally",
            f"rank {rank} raised {kind}: {message}",
            _NOTHING_IN_FINALLY,
        )
        waits = f"observed: on its way out it waits for its peers at {stands.site}, in a `finally`"
        reasons = [observed, *known, waits]
    elif isinstance(error, RaisedException):  # else a `swallowed_exception`: the block was left
        cause, title = "in_handler", f"rank {rank} handled {kind} and so drifted away from its peers"
        inside = "observed: what it called next stands in an `except` or `finally` block; no other rank did the same"
        reasons = [observed, inside, *known]
    return make_finding(
        code,
        title,
        ranks=[rank],
        victims=victims,
        frame=frame,
        evidence=reasons,
        certainty="proven",
        step=evidence.of(rank).step,
        phase="exception",
        fix=fix,
        began=shown_at or error.raised_t or None,
        now=evidence.now,
        cause=cause,
        facts=facts_of(error),
    )


def _held_on_its_way_out(rank: RankEvidence, error: CaughtException) -> Frame | None:
    """Where it waits for its peers in a `finally` that the exception passes: nothing has caught that."""
    crumb = rank.blocking
    stands = frame_of(crumb, rank.cwd) if crumb is not None and crumb.file else None
    held = stands is not None and any(held_in_finally(stands, passed) for passed in error.frames)
    return stands if held else None


def _hears_handlers(rank: RankEvidence) -> bool:
    """From Python 3.12 on, every exception handler that runs in the script is recorded: no record, nothing caught."""
    major, _, rest = rank.header.python.partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= (3, 12)


def unseen_swallow_finding(
    evidence: Evidence, rank: int, lost: Frame, victims: Iterable[int], known: list[str], shown_at: float | None
) -> Finding | None:
    """MC302 without a record: the rank is short of a call at `lost`, and a handler around it goes on; None: no such."""
    handler = None if _hears_handlers(evidence.of(rank)) else swallowing_handler(lost)
    if handler is None:
        return None
    return make_finding(
        "MC302",
        f"rank {rank} made fewer collectives than its peers: it probably swallowed an exception",
        ranks=[rank],
        victims=victims,
        frame=handler.frame,
        evidence=[
            *known,
            f"inferred: what stops the call at {lost.site} is caught by `{handler.text}` at {handler.frame.site}, in "
            "silence, and the rank goes on without it; the source has no other way past it",
            "observed: no record says which line raised: the handler printed nothing, and no recorded call was left",
        ],
        certainty="proven",
        step=evidence.of(rank).step,
        phase="exception",
        began=shown_at,
        now=evidence.now,
        cause="unseen",
        facts={"handler": handler.text},
    )
