"""Records of exceptions: the user's line of one, those a script swallowed, and the rules on them: MC301, MC302."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from model_check.diagnose.branches import held_in_finally, swallowing_handler
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame, innermost_user

_NOTHING_IN_FINALLY = (
    "repair the named line; the text of the exception is the original one",
    "call no collective in a `finally`: a rank that fails must not wait for the others",
)
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer"})


def last_swallowed(evidence: Evidence, rank: int, before: float = 0.0) -> Mapping[str, Any] | None:
    """The newest exception that this rank swallowed and not all its peers did: what all do keeps them together."""

    def kind(record: Mapping[str, Any]) -> tuple[object, str]:
        frame = user_frame(record)
        return record.get("type"), frame.site if frame is not None else ""

    peers = [r for r in evidence.ranks.values() if r.rank != rank]
    common = [Counter(kind(record) for record in _caught(peer)) for peer in peers]
    own = _caught(evidence.of(rank))
    counts = Counter(kind(record) for record in own)
    alone = [r for r in own if not common or any(seen[kind(r)] < counts[kind(r)] for seen in common)]
    known = [r for r in alone if not before or _time(r) <= before]
    return known[-1] if known else _left_in_the_ring(evidence, rank, before)


def _caught(rank: RankEvidence) -> list[Mapping[str, Any]]:
    """Exceptions from which the script went on, and those whose handler has itself called something recorded."""
    settled = rank.happened("swallowed_exception")
    if rank.exceptions:
        return [*settled]
    known = {_time(record) for record in settled}
    last_call = max((c.time_ns for c in rank.crumbs if c.event == "begin"), default=0) / 1e9
    handled = [r for r in rank.happened("raised") if _time(r) not in known and _time(r) < last_call]
    return [*settled, *handled]


def _left_in_the_ring(evidence: Evidence, rank: int, before: float) -> Mapping[str, Any] | None:
    """A recorded call that ended with an exception, after which the rank went on: its handler may still be running."""

    def raised(of: RankEvidence) -> list[Crumb]:
        return [c for c in of.crumbs if c.event == "end" and c.raised and c.phase in _STEP_PHASES]

    own = [c for c in raised(evidence.of(rank)) if not before or c.time_ns / 1e9 <= before]
    others = [len(raised(r)) for r in evidence.ranks.values() if r.rank != rank]
    went_on = bool(own) and evidence.of(rank).crumbs[-1].seq > own[-1].seq
    if not went_on or evidence.of(rank).exceptions or (others and min(others) >= len(own)):
        return None
    kind = own[-1].raised
    begin = next((c for c in evidence.of(rank).crumbs if c.seq == own[-1].span), None)
    frame = {"file": begin.file, "line": begin.line, "function": begin.function} if begin is not None else None
    return {
        "type": kind,
        "message": f"left a call of phase {own[-1].phase}",
        "t": own[-1].time_ns / 1e9,
        "user_frame": frame,
    }


def _time(record: Mapping[str, Any]) -> float:
    t = record.get("t_raised", record.get("t"))
    return float(t) if isinstance(t, (int, float)) else 0.0


def original(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was raised first, where the rank only raised again what one of its worker processes told it."""
    origin = record.get("origin")
    return origin if isinstance(origin, dict) and origin.get("type") else record


def user_frame(record: Mapping[str, Any]) -> Frame | None:
    """The user's innermost frame of an exception record, in the process that raised it first."""
    origin = original(record)
    if origin is not record and (frame := user_frame(origin)) is not None:
        return frame
    given = record.get("user_frame")
    if isinstance(given, dict) and given.get("file"):
        return Frame.from_json(given)
    return innermost_user(reversed(_frames(record)))


def _frames(record: Mapping[str, Any]) -> list[Frame]:
    """The way of an exception, outermost first."""
    frames = record.get("frames")
    return [Frame.from_json(f) for f in frames if isinstance(f, dict)] if isinstance(frames, list) else []


def went_on(rank: RankEvidence, record: Mapping[str, Any]) -> bool:
    """Whether the rank began anything after it caught this exception, other than to leave."""
    caught = _time(record) * 1e9
    return any(c.event == "begin" and c.phase != "exit" and c.time_ns > caught for c in rank.crumbs)


def quoted(record: Mapping[str, Any], length: int) -> str:
    """`ValueError: its message`; of an exception without a message the statement that raised it."""
    said = original(record)
    kind, message = str(said.get("type", "exception")), _first_sentence(str(said.get("message", "")))
    given = said.get("user_frame")
    text = str(given.get("text") or "") if isinstance(given, dict) else ""
    return f"{kind}: {message[:length]}" if message else f"{kind} in `{text[:length]}`" if text else kind


def _first_sentence(message: str) -> str:
    """The first line; with the next where it only announces it, as in `2 problems:`."""
    lines = [line.strip() for line in message.strip().split("\n")[:2]]
    return " ".join(lines) if lines[0].endswith(":") else lines[0]


def led_to_it(record: Mapping[str, Any]) -> list[str]:
    """What an exception followed from, and what a group of exceptions holds."""
    lines = []
    cause, parts = record.get("cause"), record.get("parts")
    if isinstance(cause, dict) and original(record) is record:
        lines.append(f"observed: it followed from {_quoted_with_site(cause)}")
    if isinstance(parts, list):
        lines += [f"observed: it holds {_quoted_with_site(part)}" for part in parts if isinstance(part, dict)]
    return lines


def _quoted_with_site(record: Mapping[str, Any]) -> str:
    frame = user_frame(record)
    return quoted(record, 160) + (f", raised at {frame.site}" if frame is not None else "")


def raised_at(rank: RankEvidence, record: Mapping[str, Any]) -> Frame | None:
    """The user's line of an exception; where its frames hold none, the call that the rank was in at that time."""
    frame = user_frame(record)
    if frame is not None:
        return frame
    moment = _time(record) * 1e9
    crumb = next((c for c in reversed(rank.crumbs) if c.file and (not moment or c.time_ns <= moment)), None)
    return Frame(crumb.file, crumb.line, crumb.function, root=rank.cwd) if crumb is not None else None


def swallowed_finding(
    evidence: Evidence,
    rank: int,
    record: Mapping[str, Any],
    victims: Iterable[int],
    facts: list[str],
    shown_at: float | None = None,
) -> Finding:
    """MC302. `shown_at`: when the drift began to show; the exception itself may be minutes older."""
    frame = raised_at(evidence.of(rank), record)
    kind, message = record.get("type", "an exception"), str(record.get("message", "")).split("\n")[0]
    facts = [f"observed: {kind}: {message}" + (f", raised at {frame.site}" if frame is not None else ""), *facts]
    began = shown_at or _time(record) or None
    if (stands := _held_on_its_way_out(evidence.of(rank), record)) is not None:
        return make_finding(
            "MC301",
            f"rank {rank} raised {kind}: {message}",
            ranks=[rank],
            victims=victims,
            frame=frame,
            evidence=[*facts, f"observed: on its way out it waits for its peers at {stands.site}, in a `finally`"],
            certainty="proven",
            step=evidence.of(rank).step,
            phase="exception",
            fix=_NOTHING_IN_FINALLY,
            began=began,
            now=evidence.now,
        )
    at_work = record.get("event") == "raised"  # else a `swallowed_exception`: the block was left
    return make_finding(
        "MC302",
        f"rank {rank} handled {kind} and so drifted away from its peers"
        if at_work
        else f"rank {rank} swallowed {kind} and drifted away from its peers",
        ranks=[rank],
        victims=victims,
        frame=frame,
        evidence=[
            facts[0],
            "observed: what it called next stands in an `except` or `finally` block; no other rank did the same"
            if at_work
            else "observed: the script caught it and went on; no other rank did the same",
            *facts[1:],
        ],
        certainty="proven",
        step=evidence.of(rank).step,
        phase="exception",
        began=began,
        now=evidence.now,
    )


def _held_on_its_way_out(rank: RankEvidence, record: Mapping[str, Any]) -> Frame | None:
    """Where it waits for its peers in a `finally` that the exception passes: nothing has caught that."""
    crumb = rank.blocking
    stands = frame_of(crumb, rank.cwd) if crumb is not None and crumb.file else None
    held = stands is not None and any(held_in_finally(stands, passed) for passed in _frames(record))
    return stands if held else None


def _hears_handlers(rank: RankEvidence) -> bool:
    """From Python 3.12 on, every exception handler that runs in the script is recorded: no record, nothing caught."""
    major, _, rest = str(rank.header.get("python") or "").partition(".")
    minor = rest.partition(".")[0]
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= (3, 12)


def unseen_swallow_finding(
    evidence: Evidence, rank: int, lost: Frame, victims: Iterable[int], facts: list[str], shown_at: float | None
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
            *facts,
            f"inferred: what stops the call at {lost.site} is caught by `{handler.text}` at {handler.frame.site}, in "
            "silence, and the rank goes on without it; the source has no other way past it",
            "observed: no record says which line raised: the handler printed nothing, and no recorded call was left",
        ],
        certainty="proven",
        step=evidence.of(rank).step,
        phase="exception",
        began=shown_at,
        now=evidence.now,
    )
