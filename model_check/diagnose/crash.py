"""Rules on ranks that failed: which one failed first by itself, and why: MC3xx, and what its exception is about.

A rank whose error only says that a peer is gone is a victim, whatever its exit code, and so is a rank that we ended.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from model_check.diagnose.branches import only_system_exit
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.departures import departed_finding
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.exceptions import classify_exception, port_facts
from model_check.diagnose.findings import make_finding, waiting_text
from model_check.diagnose.issues import GroupTable
from model_check.diagnose.joining import met_the_wrong_members
from model_check.diagnose.memory import is_fragmented, memory_account, memory_facts, memory_fixes, memory_values
from model_check.diagnose.raised import (
    facts_of,
    last_swallowed,
    led_to_it,
    quoted,
    raised_at,
    swallowed_finding,
    user_frame,
    went_on,
)
from model_check.diagnose.timeouts import gave_up_finding
from model_check.diagnose.uneven import loader_frame
from model_check.diagnose.waits import Wait
from model_check.record import Finding
from model_check.record.error_texts import lost_its_peer, unexpected_size
from model_check.record.events.crashes import CaughtException, ExceptionEvent, UncaughtException
from model_check.record.events.job import AddressSpaceLimit
from model_check.record.events.memory import MemoryKill, MemoryMark
from model_check.record.rank_exits import signal_name
from model_check.record.stacks import Frame, innermost_user

_FATAL_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)
_ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
_GIB = 1 << 30
_TIDY_END = (
    "end the script with dist.destroy_process_group(): threads of the backend that still run may abort the exit",
    "the work of the script is done; what it wrote before its end is whole",
)
_DAMAGED_FILE = (
    "load an older file that is whole, or copy this one again from where it is: compare the sizes",
    "save to a temporary name and rename it when it is whole: os.replace(tmp, path)",
)
_UNFLUSHED = 120  # the interpreter's own word: what was printed last could not be written
_NOBODY = "observed: the launcher did not send it, and no memory kill is on record; the sender is not known"


@dataclass(frozen=True)
class Failure:
    """One rank that failed: its exception where it left one, and when its trouble began."""

    rank: RankEvidence
    began: float
    exception: ExceptionEvent | None
    victim: bool


@dataclass(frozen=True)
class _Crash:
    """The first failure, the ranks that failed like it, and what followed from it."""

    evidence: Evidence
    root: Failure
    ranks: list[int]
    victims: list[int]
    aftermath: list[str]

    @property
    def rank(self) -> RankEvidence:
        return self.root.rank

    def finding(
        self, code: str, title: str, frame: Frame | None, reasons: Sequence[str], facts: dict[str, Any], **more: Any
    ) -> Finding:
        doing = self.rank.innermost
        return make_finding(
            code,
            title,
            ranks=self.ranks,
            victims=self.victims,
            frame=frame,
            evidence=[*reasons, *self.aftermath],
            step=self.rank.step,
            began=self.root.began,
            now=self.evidence.now,
            facts=facts,
            **{"certainty": "proven", "phase": doing.phase if doing is not None else None, **more},
        )


def crash_findings(evidence: Evidence, tables: Sequence[GroupTable], waits: Mapping[int, Wait]) -> list[Finding]:
    """The root cause of the first failure; what followed from it is named as its victims."""
    failures = sorted(find_failures(evidence), key=lambda f: (f.began, f.rank.rank))
    if not failures:
        return []
    causes = [f for f in failures if not f.victim]
    bereft = sorted(f.rank.rank for f in failures if f.victim)
    if not causes:
        return _only_victims(evidence, tables, failures, waits)
    root = causes[0]
    # A rank that swallowed an exception and only then lost its peers failed because of what it swallowed.
    like_it = [f.rank.rank for f in causes if _trouble(f) == _trouble(root)]
    later = [f.rank.rank for f in causes if f.rank.rank not in like_it]
    waiting = [rank for rank in waits if evidence.of(rank).alive]
    victims = sorted({*bereft, *later, *waiting} - {*like_it})
    crash = _Crash(evidence, root, sorted(like_it), victims, _aftermath(evidence, victims, waits, later))
    if root.exception is not None:
        return [_exception_finding(crash, root.exception)]
    end = root.rank.exit
    if end is not None and end.signal is not None:
        return [_signal_finding(crash, end.signal)]
    return [_exit_code_finding(crash)]


def find_failures(evidence: Evidence) -> list[Failure]:
    """Ranks that raised, or ended with anything but 0, and that we did not end ourselves."""
    failures = []
    for rank in evidence.ranks.values():
        exception = _fatal_exception(rank)
        end = rank.exit
        if exception is None and (end is None or not end.failed or end.unknown):
            continue
        began = (exception.t if exception is not None else 0.0) or (end.t if end is not None else evidence.now)
        if exception is not None and began >= evidence.signals_sent.get(rank.rank, math.inf):
            continue  # how it leaves when it is told to is no failure
        ended_by_us = exception is None and end is not None and evidence.stands(rank.rank)
        victim = ended_by_us or lost_its_peer(exception, end, rank.log_tail)
        failures.append(Failure(rank, began, exception, victim))
    first = min((f.began for f in failures if not f.victim), default=None)
    return [_swept_away(f, first) for f in failures]


def _swept_away(failure: Failure, first: float | None) -> Failure:
    """A launcher of the user's own ends the other ranks when one fails, and does not tell us."""
    end = failure.rank.exit
    by_signal = end is not None and end.signal in _ENDING_SIGNALS and failure.exception is None
    if by_signal and first is not None and failure.began > first:
        return Failure(failure.rank, failure.began, None, victim=True)
    return failure


def _fatal_exception(rank: RankEvidence) -> UncaughtException | None:
    """The exception that ended, or is ending, the main thread."""
    on_main = (error for error in rank.exceptions if error.thread in ("", "MainThread"))
    return next((error for error in on_main if error.type not in ("SystemExit", "KeyboardInterrupt")), None)


def _trouble(failure: Failure) -> tuple[object, ...]:
    """What ranks that failed alike have in common; a death by a signal is each rank's own."""
    if failure.exception is not None:
        frame = user_frame(failure.exception)
        return failure.exception.type, frame.site if frame is not None else ""
    end = failure.rank.exit
    return ("exit", end.code) if end is not None and end.signal is None else ("killed", failure.rank.rank)


def _aftermath(evidence: Evidence, victims: Iterable[int], waits: Mapping[int, Wait], later: list[int]) -> list[str]:
    lines = []
    for number in victims:
        exception = _fatal_exception(evidence.of(number))
        if exception is not None and number not in later:
            text = shorten(exception.message.split("\n")[0], 120, placeholder=" …")
            lines.append(f"observed: rank {number} then lost its peer: {exception.type}: {text}")
    if later:
        lines.append(f"observed: {ranks_text(later)} failed later, in another way")
    # A rank that has raised waits for nothing any more, whatever its last open call was.
    return [*lines, *waiting_text(waits, [v for v in victims if _fatal_exception(evidence.of(v)) is None])]


def _exception_finding(crash: _Crash, exception: ExceptionEvent, caught: Sequence[str] = ()) -> Finding:
    """`caught`: what the script did with the exception before it ended."""
    evidence, rank = crash.evidence, crash.rank
    code, about = classify_exception(exception, evidence, crash.ranks)
    # torch notices the end of a worker in a signal handler, wherever the rank happens to be at that time.
    frame = (loader_frame(rank) if code == "MC216" else None) or raised_at(rank, exception)
    message = exception.message.strip()
    who = ranks_text(crash.ranks)
    extra: list[str] = []
    fix: list[str] = []
    facts = facts_of(exception) | (port_facts(evidence) if code == "MC103" else {})
    if code in ("MC307", "MC501"):
        account = memory_account(rank, message, on_device=code == "MC501")
        extra = [*memory_facts(account, evidence.plan), *_memory_history(rank)]
        fix = memory_fixes(account, evidence.plan)
        facts |= memory_values(account)
        if code == "MC501" and is_fragmented(account):
            code, about = "MC502", "{who} found its device memory in pieces too small to use"
    if code == "MC307":
        extra += _address_space_limit(evidence)
    if exception.origin is not None and exception.first is exception.origin:
        again = user_frame(replace(exception, origin=None))
        where = f", raised again at {again.site}" if again is not None else ""
        extra.append(f"observed: it was raised in {exception.origin.where} of {who}{where}")
    if code in ("MC110", "MC601") and (path := _file_being_read(rank, crash.root.began)):
        extra.append(f"observed: it was reading {path}")
        facts["file"] = path
    words = _own_words(exception)
    if code == "MC601" and not words:
        fix = list(_DAMAGED_FILE)
    if code == "MC216":
        killed = "observed: the worker was ended by SIGKILL"
        gone = "inferred: a worker that goes without a word was killed (SIGKILL, often for memory) or called exit"
        extra.append(killed if "signal: Killed" in message else gone)
    title = about.replace("{who}", who) if about else f"{who} raised {quoted(exception, 160)}"
    place = f" at {frame.site} in {frame.function}" if frame is not None else ""
    observed = f"observed: {who} raised {quoted(exception, 400)}{place}"
    if words and (frame is None or not frame.is_user_code):
        # Our own sentence about somebody's files or settings: no line of ours is at fault.
        title, frame, observed = shorten(words, 200, placeholder=" …"), None, f"observed: {who} stopped: {words}"
    reasons = [observed, *led_to_it(exception), *extra, *caught]
    return crash.finding(code, title, frame, reasons, facts, fix=fix)


def _address_space_limit(evidence: Evidence) -> list[str]:
    said = evidence.said(AddressSpaceLimit)[-1:]
    return [f"observed: {_limit_setting(evidence)}={limit.gb} is the address space of each rank" for limit in said]


def _own_words(exception: ExceptionEvent) -> str:
    """The sentence of an error that is ours and has a code; empty for all others."""
    code = exception.own_code
    of_numbers = code.startswith("MC4")  # the guard's: the line is the script's
    return " ".join(exception.message.removeprefix(f"[{code}]").split()) if code and not of_numbers else ""


def _file_being_read(rank: RankEvidence, before: float) -> str:
    crumbs = (
        c for c in reversed(rank.crumbs) if c.phase == "load" and c.event == "begin" and c.time_ns / 1e9 <= before
    )
    crumb = next(crumbs, None)
    return crumb.detail if crumb is not None else ""


def _memory_history(rank: RankEvidence) -> list[str]:
    history = [s.rss for s in rank.samples if s.rss] + [mark.rss for mark in rank.happened(MemoryMark)]
    if not history:
        return []
    first, most = history[0] / _GIB, max(history) / _GIB
    return [f"observed: resident memory (RSS) {first:.2f} GiB at first, {most:.2f} GiB at its highest"]


def _signal_finding(crash: _Crash, number: int) -> Finding:
    rank, name = crash.rank, signal_name(number)
    death = _explain_signal(crash.evidence, rank, number, name)
    last = death.frame if death.by_a_kill else None
    reasons = [
        f"observed: process {rank.exit.pid if rank.exit is not None else '?'} of rank {rank.rank} ended by {name}",
        *([f"observed: its last recorded line is {last.site}"] if last is not None else []),
        *death.evidence,
    ]
    facts = {"signal": name, **({"last_recorded": True} if last is not None else {})}
    fix = _TIDY_END if death.cause == "after_the_script" else ()
    title = f"rank {rank.rank} {death.title}"
    return crash.finding(death.code, title, death.frame, reasons, facts, fix=fix, cause=death.cause)


def _limit_setting(evidence: Evidence) -> str:
    return "launch.memory_limit_gb" if evidence.ours else "--memory-limit-gb"


@dataclass(frozen=True)
class _Death:
    """What a death by a signal means. `by_a_kill`: the frame is where the rank was last seen, not the cause."""

    code: str
    title: str
    evidence: list[str]
    frame: Frame | None
    cause: str | None = None
    by_a_kill: bool = False


def _explain_signal(evidence: Evidence, rank: RankEvidence, number: int, name: str) -> _Death:
    memory = _memory_history(rank)
    pid = rank.exit.pid if rank.exit is not None else rank.pid
    if number == signal.SIGKILL:
        kills = [kill for kill in evidence.said(MemoryKill) if kill.pid in (0, pid)]
        by_limit = next((kill for kill in kills if kill.source in ("cgroup", "limit")), None)
        if by_limit is not None:
            of_cgroup = by_limit.source == "cgroup"
            whose = "its cgroup's memory limit" if of_cgroup else _limit_setting(evidence)
            cause = "cgroup" if of_cgroup else "own_limit"
            known = [f"observed: {by_limit.detail}", *memory]
            return _Death("MC305", f"was killed by {whose}", known, rank.last_site(), cause, by_a_kill=True)
        if kills:
            known = [f"observed: {kills[0].detail}", *memory]
            return _Death("MC304", "was killed by the kernel's OOM killer", known, rank.last_site(), by_a_kill=True)
    if number in _FATAL_SIGNALS:
        return _explain_abort(rank, "a segmentation fault" if number == signal.SIGSEGV else name, memory)
    if number == signal.SIGINT and (interrupt := _interrupt(rank)) is not None:
        frame = user_frame(interrupt)
        raised = [f"observed: KeyboardInterrupt was raised at {frame.site}"] if frame is not None else []
        return _Death("MC303", f"was ended by KeyboardInterrupt ({name})", [*raised, _NOBODY], frame, "interrupt")
    return _Death("MC303", f"was ended by {name}", [_NOBODY, *memory], rank.last_site(), by_a_kill=True)


def _explain_abort(rank: RankEvidence, what: str, memory: list[str]) -> _Death:
    """The rank's own code, or a library, crashed."""
    frame = innermost_user(rank.fault_frames) or rank.last_site()
    if "bad_alloc" in rank.log_tail or "annot allocate memory" in rank.log_tail:
        known = ["observed: its log ends with a failed allocation", *memory]
        return _Death("MC307", "ran out of host memory and aborted", known, frame, "aborted")
    if sizes := unexpected_size(rank.log_tail):
        where = f" in {inside}" if (inside := _waiting_in(rank)) else ""
        known = [
            f"observed: its log ends with gloo's complaint: {sizes[0]} bytes came, {sizes[1]} were expected",
            "inferred: the other side sent a tensor of another size; which of the two is wrong is not recorded",
        ]
        title = f"received {sizes[0]} bytes{where} where it expected {sizes[1]}, and aborted"
        return _Death("MC202", title, known, frame)
    if _script_was_over(rank):
        over = "observed: the script had ended with code 0; what crashed is the interpreter on its way out"
        return _Death("MC306", f"crashed with {what} after its script had ended", [over], None, "after_the_script")
    stack = [f"observed: the crashed thread was at {f.site} in {f.function}" for f in rank.fault_frames[:1]]
    return _Death("MC306", f"crashed with {what}", stack, frame)


def _interrupt(rank: RankEvidence) -> UncaughtException | None:
    """A KeyboardInterrupt that nobody caught: the interpreter then ends itself by SIGINT."""
    return next((error for error in reversed(rank.exceptions) if error.type == "KeyboardInterrupt"), None)


def _waiting_in(rank: RankEvidence) -> str:
    """recv from rank 0; broadcast; empty where it was in no recorded call"""
    crumb = rank.blocking
    if crumb is None:
        return ""
    return f"{crumb.op} from rank {crumb.peer}" if crumb.op == "recv" and crumb.peer >= 0 else crumb.op


def _script_was_over(rank: RankEvidence) -> bool:
    """It had come to the end of its script, and no line of it ran any more (a __del__ or an atexit handler does)."""
    return rank.announced_exit.code == 0 and innermost_user(rank.fault_frames) is None


def _exit_code_finding(crash: _Crash) -> Finding:
    evidence, rank = crash.evidence, crash.rank
    code = rank.exit.code if rank.exit is not None else None
    said = rank.announced_exit
    # It called no exit and left with a code all the same: what is raised and not called is not seen from inside.
    guessed = said.via == "return" and bool(code) and code != _UNFLUSHED
    via = "" if guessed else said.via
    words = (said.message or "").split("\n")[0][:160]
    last = rank.last_site()
    raising = only_system_exit(last, code) if (guessed or via == "SystemExit") and last is not None else None
    frame = said.user_frame or raising or last
    missed = bool(crash.victims) or _others_go_on(evidence, rank)
    swallowed = last_swallowed(evidence, rank.rank)
    if swallowed is not None and missed and not went_on(rank, swallowed):
        place = f" at {frame.site}" if frame is not None else ""
        left = f"observed: the script caught it and exited with code {code}" + (f" through {via}{place}" if via else "")
        return _exception_finding(crash, swallowed, [left])
    if swallowed is not None and missed:
        return swallowed_finding(evidence, rank.rank, swallowed, crash.victims, crash.aftermath)
    who = ranks_text(crash.ranks)
    reasons = [
        f"observed: {who} exited with code {code}" + (f" through {via}" if via else ""),
        *(["inferred: it raised SystemExit, since it called no exit and no exception was left"] if guessed else []),
        *([f"inferred: {raising.site} is the only `raise SystemExit` of that file"] if raising else []),
    ]
    return crash.finding(
        "MC313",
        f"{who} exited with code {code}" + (f": {words}" if words else " without an exception"),
        frame,
        reasons,
        {"exit_code": code, **({"via": via} if via else {}), **({"message": words} if words else {})},
        certainty="proven" if missed else "observed",
        # All ranks that end with a code of their own choice, and nobody waiting, is a decision of the script.
        severity="error" if missed else "warning",
        phase="exit",
    )


def _others_go_on(evidence: Evidence, rank: RankEvidence) -> bool:
    """Another rank made more steps, so this one was expected to go on too."""
    steps = [r.step for r in evidence.ranks.values() if r.rank != rank.rank and r.step is not None]
    return bool(steps) and rank.step is not None and max(steps) > rank.step


def _only_victims(
    evidence: Evidence, tables: Sequence[GroupTable], failures: Sequence[Failure], waits: Mapping[int, Wait]
) -> list[Finding]:
    """Every failure says that somebody else is gone: look for whoever left without one."""
    lost = [f for f in failures if f.exception is not None or lost_its_peer(None, f.rank.exit, f.rank.log_tail)]
    if not lost:
        return []
    first = lost[0]
    victims = sorted(f.rank.rank for f in failures)
    gone = [
        r.rank for r in evidence.ranks.values() if r.exit is not None and r.exit.ok and r.exit.t <= first.began + 2.0
    ]
    error = first.exception or UncaughtException()
    text = error.message.split("\n")[0][:200]
    waiting = [v for v in victims if _fatal_exception(evidence.of(v)) is None]
    known = [f"observed: rank {first.rank.rank} lost its peer: {text}", *waiting_text(waits, waiting)]
    if gone:
        return [departed_finding(evidence, tables, gone, victims, known)]
    apart = met_the_wrong_members(evidence, victims, known)
    if apart is not None:
        return [apart]
    held_up = gave_up_finding(evidence, tables, first.rank.rank, error, victims, waits)
    if held_up is not None:
        return [held_up]
    for number in evidence.all_ranks:
        caught = last_swallowed(evidence, number)
        if caught is not None and not (evidence.live and _leaves(evidence.of(number), caught)):
            return [swallowed_finding(evidence, number, caught, [v for v in victims if v != number], known)]
    if any(r.alive for r in evidence.ranks.values()) and evidence.live:
        return []
    return [
        make_finding(
            "MC217",
            "a peer was lost, and no rank known here failed by itself",
            ranks=[],
            victims=victims,
            frame=user_frame(error) or first.rank.last_site(),
            evidence=known,
            certainty="suspected",
            step=first.rank.step,
            phase="collective",
            began=first.began,
            now=evidence.now,
        )
    ]


def _leaves(rank: RankEvidence, caught: CaughtException) -> bool:
    """It caught an exception and does nothing more: with which code it ends is about to be known."""
    return rank.alive and not went_on(rank, caught)
