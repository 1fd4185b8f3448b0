"""Rules on ranks that do not move: who holds the others up, and in what: MC102, MC204, MC209-MC220.

Severity is a warning as long as the job could still come back; circles of waits and peers that are gone cannot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model_check.diagnose import frames
from model_check.diagnose.circles import all_wait_finding, cycle_finding
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.departures import departed_finding
from model_check.diagnose.evidence import Evidence
from model_check.diagnose.findings import make_finding, no_progress_text, waiting_text
from model_check.diagnose.issues import GroupTable
from model_check.diagnose.joining import joining_findings
from model_check.diagnose.life import sign_of_life
from model_check.diagnose.raised import raised_at
from model_check.diagnose.source import source_text
from model_check.diagnose.stuck_rank import BUSY_SHARE, StuckRank
from model_check.diagnose.waits import Wait, find_cycle, holders
from model_check.record import Finding
from model_check.record.ring import DOING
from model_check.record.stacks import Frame

_SLOW_BUT_FINE = frozenset({"save", "load", "eval", "compile", "model", "import", "start", "gate"})
_COMPUTING = frozenset({"forward", "backward", "optimizer"})
_MOST_THREADS = 4  # that are named

_LET_IT_END = (
    "tell the thread to end before the script does, or make it one that does not count: Thread(…, daemon=True)",
    "where other ranks wait for a call of this one: it has returned before that call",
)
_WITH_A_TIMEOUT = (
    "look at what the other threads do, or why none is left",
    "queue.get(timeout=…), future.result(timeout=…) and event.wait(timeout=…) turn the wait into an error",
)
_OPEN_CALLS = frozenset({"open", "openat"})
_READ_CALLS = frozenset({"read", "pread64", "readv"})
_FROM_ELSEWHERE = (
    "look at who should write what the named line reads: a pipe has no writer yet, or its writer writes nothing",
    "where it is a file: check its file system with df, mount, dmesg",
)
_LOCK_CALLS = frozenset({"flock", "fcntl"})
_LOCKED_FILE = (
    "find the process that holds the lock of this file: lslocks, or /proc/locks",
    "flock with LOCK_NB, or filelock's timeout=…, turn the wait into an error",
)
_WHILE_COMPILING = (
    "nothing: the first step of a compiled model takes long; a cache that outlives the job makes the next start short",
)
_CALM_S = 60.0


def hang_findings(evidence: Evidence, tables: Sequence[GroupTable], waits: Mapping[int, Wait]) -> list[Finding]:
    """Proofs first (a circle, a peer that is gone); guesses only while the job stands still."""
    cycle = find_cycle(waits)
    if cycle:
        return [cycle_finding(evidence, cycle, waits)]
    held = holders(waits, evidence)
    gone = [rank for rank in held if (end := evidence.of(rank).exit) is not None and (end.ok or end.unknown)]
    if gone:
        victims = sorted({victim for rank in gone for victim in held[rank]})
        return [departed_finding(evidence, tables, gone, victims, waiting_text(waits, victims))]
    if not evidence.stalled:
        return []
    if apart := joining_findings(evidence, waits):
        return apart
    stopped = [r for r in evidence.ranks.values() if evidence.stands(r.rank) and StuckRank(evidence, r).stopped]
    others = [r for r in evidence.all_ranks if evidence.stands(r)]
    suspects = {r.rank: others for r in stopped} or {rank: held[rank] for rank in held if evidence.stands(rank)}
    if not suspects:
        suspects = _idle_alone(evidence, waits)
    if not suspects and waits:
        if evidence.live and any(evidence.got_further(rank) or _is_starved(evidence, rank) for rank in others):
            return []
        cycle = find_cycle(waits, firm=False)
        return [cycle_finding(evidence, cycle, waits)] if cycle else [all_wait_finding(evidence, waits)]
    return _merged([_explained(evidence, rank, suspects[rank], waits) for rank in sorted(suspects)])


def _idle_alone(evidence: Evidence, waits: Mapping[int, Wait]) -> dict[int, list[int]]:
    """Ranks nobody is known to wait for, which are quiet themselves."""
    quiet = {}
    for rank in evidence.ranks.values():
        since = rank.last_progress_t
        if (
            evidence.stands(rank.rank)
            and rank.rank not in waits
            and since is not None
            and evidence.now - since >= evidence.stall_threshold_s
        ):
            quiet[rank.rank] = sorted(waits)
    return quiet


def _is_starved(evidence: Evidence, number: int) -> bool:
    """Whether the rank is ready to compute but gets little CPU time, because the machine is overloaded."""
    stuck = StuckRank(evidence, evidence.of(number))
    return stuck.busy and (stuck.cpu_share or 0.0) < BUSY_SHARE


@dataclass(frozen=True)
class Explanation:
    """What a rank that does not move is doing."""

    code: str
    title: str  # {who} is the subject, {is|are} a verb of it: ranks that are stuck alike share one title
    frame: Frame | None
    evidence: list[str]
    fix: Sequence[str] = ()
    cause: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def title_of(self, ranks: Sequence[int]) -> str:
        verbs = re.sub(r"\{(\w+)\|(\w+)\}", r"\1" if len(ranks) == 1 else r"\2", self.title)
        return verbs.replace("{who}", ranks_text(ranks))


def classify_stuck_rank(evidence: Evidence, number: int, victims: Iterable[int], waits: Mapping[int, Wait]) -> Finding:
    """What a rank that does not move is doing, as a finding."""
    return _explained(evidence, number, victims, waits)[1]


def _explained(
    evidence: Evidence, number: int, victims: Iterable[int], waits: Mapping[int, Wait]
) -> tuple[Explanation, Finding]:
    rank = evidence.of(number)
    stuck = StuckRank(evidence, rank)
    waiting = sorted(set(victims) - {number})
    joining = any(w.kind == "init" and number in w.on for w in waits.values())
    found = _explain(stuck, joining)
    quiet_since = rank.last_progress_t
    finding = make_finding(
        found.code,
        found.title_of([number]),
        ranks=[number],
        victims=waiting,
        frame=found.frame,
        evidence=[
            *found.evidence,
            *no_progress_text(evidence, number, quiet_since),
            *waiting_text(waits, waiting),
            *([_what_follows(stuck, waiting)] if waiting else []),
        ],
        severity="error" if evidence.killed_as_hung else "info" if _is_calm(found.code, stuck) else "warning",
        step=rank.step,
        phase=stuck.phase,
        fix=found.fix,
        began=quiet_since,
        now=evidence.now,
        cause=found.cause,
        facts=found.facts,
    )
    return found, finding


def _is_calm(code: str, s: StuckRank) -> bool:
    """Whether nothing is wrong: the rank makes progress, or works slowly and was quiet for less than a minute."""
    if code != "MC220":
        return False
    return s.quiet_s is None or s.quiet_s < _CALM_S or s.busy or s.compiles or bool(sign_of_life(s))


def _what_follows(s: StuckRank, waiting: Sequence[int]) -> str:
    if s.script_over:
        return f"inferred: rank {s.rank.rank} will not make the call that is missing: its script is over"
    return f"inferred: {ranks_text(waiting)} can go on when rank {s.rank.rank} does"


def _explain(stuck: StuckRank, joining: bool) -> Explanation:
    """The first explanation that fits, from the most specific to the least."""
    return (
        _stopped(stuck)
        or _input(stuck)
        or _dead_worker(stuck)
        or _at_work(stuck)
        or _loader(stuck)
        or _network(stuck)
        or _write(stuck)
        or _gil(stuck)
        or _dead_thread(stuck)
        or _lock(stuck)
        or (_never_joined(stuck) if joining else None)
        or _spinning(stuck)
        or _blocked_open(stuck)
        or _slow(stuck)
        or _works_on(stuck)
        or _other_thread(stuck)
        or _user_code(stuck)
    )


def _stopped(s: StuckRank) -> Explanation | None:
    if not s.stopped:
        return None
    fact = f"observed: the kernel says process {s.rank.pid} is stopped (state {s.state})"
    fix = [f"continue it: kill -CONT {s.rank.pid}", "find out who sent SIGSTOP: a debugger, a batch system, Ctrl-Z"]
    return Explanation("MC209", "{who} {is|are} stopped (SIGSTOP)", s.frame, [fact], fix)


def _input(s: StuckRank) -> Explanation | None:
    if not s.waits_for_input:
        return None
    facts = [f"observed: {_doing(s)}"]
    if s.in_debugger:
        facts.append("observed: its stack is inside the Python debugger, which waits for a command")
    if s.sample is not None and s.sample.fd0:
        facts.append(f"observed: its standard input is {s.sample.fd0}")
    cause = "debugger" if s.in_debugger else "input"
    return Explanation("MC215", "{who} {waits|wait} for standard input", s.frame, facts, cause=cause)


def _dead_worker(s: StuckRank) -> Explanation | None:
    if not s.in_loader or not s.dead_workers:
        return None
    pids = ", ".join(map(str, s.dead_workers))
    fact = f"observed: loader worker {pids} is no longer alive and rank {s.rank.rank} still waits for its batch"
    return Explanation("MC216", "a loader worker of {who} died", s.frame, [fact])


def _loader(s: StuckRank) -> Explanation | None:
    if not s.in_loader:
        return None
    workers = [(dump, frames.fetching_at(dump.main.frames)) for dump in s.worker_dumps() if dump.main is not None]
    stuck = next(((dump, frame) for dump, frame in workers if frame is not None), None)
    title, facts = "{who} {is|are} stuck in the data loader", [f"observed: {_doing(s)}"]
    if stuck is None:
        return Explanation("MC204", title, s.frame, facts, cause="rank")
    dump, frame = stuck
    facts.append(f"observed: its loader worker {dump.pid} stands at {frame.site} in {frame.function}")
    return Explanation("MC204", title, frame, facts, cause="worker")


def _network(s: StuckRank) -> Explanation | None:
    package = s.network
    if package is None or s.busy:
        return None
    title = f"{{who}} {{is|are}} stuck in a call to {package}"
    return Explanation("MC214", title, s.frame, [f"observed: {_doing(s)}"])


def _gil(s: StuckRank) -> Explanation | None:
    holder = s.gil_holder
    if holder is None:
        return None
    frame = holder.user_frame or s.frame
    text = source_text(frame) if frame is not None else ""
    facts = [
        f"observed: {_doing(s)}",
        f"observed: thread {holder.name or holder.native_id} held the interpreter lock at the same line in two looks"
        + (f": {text}" if text else ""),
        "inferred: a call into C code keeps the GIL, so no other Python thread of this rank can run",
    ]
    return Explanation("MC210", "{who} {holds|hold} the GIL in C code", frame, facts)


def _dead_thread(s: StuckRank) -> Explanation | None:
    """MC222: it waits between threads, and one of its threads has died of an exception."""
    died = s.failed_threads
    if not died or s.main is None or not frames.waits_between_threads(s.main):
        return None
    name, kind = died[-1].thread or "?", died[-1].type or "an exception"
    raised = raised_at(s.rank, died[-1])
    where = f" at {raised.site} in {raised.function}" if raised is not None else ""
    facts = [
        *_failed_threads(s),
        f"observed: {_doing(s)}",
        f"inferred: the main thread waits for what thread {name} can no longer give",
    ]
    title = f"{{who}} {{waits|wait}} for its thread {name}, which died of {kind}{where}"
    return Explanation("MC222", title, raised or s.frame, facts, facts={"thread": name, "exception": kind})


def _failed_threads(s: StuckRank) -> list[str]:
    lines = []
    for error in s.failed_threads[-_MOST_THREADS:]:
        message = error.message.split("\n")[0][:200]
        raised = raised_at(s.rank, error)
        where = f" at {raised.site} in {raised.function}" if raised is not None else ""
        lines.append(
            f"observed: thread {error.thread or '?'} of rank {s.rank.rank} died of "
            f"{error.type or 'an exception'}: {message}{where}"
        )
    return lines


def _lock(s: StuckRank) -> Explanation | None:
    waiters = s.lock_waiters
    if not waiters:
        return None
    facts = []
    for thread in waiters:
        frame = thread.user_frame
        if frame is not None:
            text, name = source_text(frame), thread.name or thread.native_id
            facts.append(
                f"observed: thread {name} waits for a lock at {frame.site} in {frame.function}"
                + (f": {text}" if text else "")
            )
    if len(waiters) > 1:
        facts.append(
            "inferred: these threads each hold what another one waits for; a plain lock does not record its owner"
        )
        title, cause = "threads of {who} wait for each other's locks", "locks"
    else:
        facts.append("observed: no other thread of this process is about to release it")
        facts.append("inferred: the lock was taken by the same thread, or its owner ended without releasing it")
        title, cause = "{who} {waits|wait} for a lock that nobody releases", "lock"
    return Explanation("MC211", title, waiters[0].user_frame or s.frame, facts, cause=cause)


def _other_thread(s: StuckRank) -> Explanation | None:
    """It waits for an item, an event or the end of another thread: what matters is where those threads stand."""
    if s.main is None or not (s.script_over or frames.waits_between_threads(s.main)):
        return None
    others = [t for t in s.dumps[-1].threads if t is not s.dumps[-1].main and t.user_frame is not None]
    over = f"observed: rank {s.rank.rank} has come to the end of its script and waits for its threads to end"
    facts = [over if s.script_over else f"observed: {_doing(s)}"]
    for thread in others[:_MOST_THREADS]:
        assert thread.user_frame is not None, f"thread {thread.native_id} was chosen for its frame"
        where = f"{thread.user_frame.site} in {thread.user_frame.function}"
        facts.append(f"observed: its thread {thread.name or thread.native_id} is at {where}")
    if not others:
        facts.append("observed: none of its other threads runs a line of the script: who should end the wait is gone")
    if s.script_over:
        title = "the script of {who} is over, and a thread keeps it from ending"
        frame = others[0].user_frame if others else None
        return Explanation("MC211", title, frame, facts, _LET_IT_END, "script_over")
    title = "{who} {waits|wait} for another of its threads" + (f" at {s.frame.site}" if s.frame else "")
    return Explanation("MC211", title, s.frame, facts, _WITH_A_TIMEOUT, "thread")


def _write(s: StuckRank) -> Explanation | None:
    if not s.write_is_stuck or s.sample is None:
        return None
    target = f" on {s.sample.syscall_target}" if s.sample.syscall_target else ""
    call = s.sample.syscall or s.sample.wchan or f"state {s.state}"
    facts = [f"observed: {_doing(s)}", f"observed: the kernel has it wait in {call}{target}; no bytes move"]
    return Explanation("MC213", "{who} {is|are} stuck writing a file", s.frame, facts)


def _never_joined(s: StuckRank) -> Explanation:
    known = "it has left no black box yet" if not s.rank.header else _doing(s)
    fix = [f"look at {s.frame.site}: the rank is there, before init_process_group"] if s.frame is not None else []
    facts = [f"observed: {known}", "observed: it has not entered init_process_group"]
    return Explanation("MC102", "{who} never joined the process group", s.frame, facts, fix)


def _spinning(s: StuckRank) -> Explanation | None:
    frame = s.spinning
    if frame is None:
        return None
    share = "wakes up again and again"
    if s.busy:
        share = f"uses {100 * s.cpu_share:.0f} % of a core" if s.cpu_share is not None else "is running"
    facts = [f"observed: the process {share} and stays in {frame.function}", f"observed: {_doing(s)}"]
    title = f"{{who}} {{loops|loop}} in {frame.function} without getting anywhere"
    return Explanation("MC212", title, frame, facts)


def _at_work(s: StuckRank) -> Explanation | None:
    """It writes no records but still makes progress. A rank that was ended as hung did not."""
    if s.evidence.killed_as_hung:
        return None
    if s.compiles:
        return _alive(s, "compiling", [])
    sign = sign_of_life(s)
    if not sign:
        return None
    inside = f"at work in {s.frame.function}" if s.frame is not None and s.frame.function else "at work"
    doing = DOING[s.phase] if s.phase in _SLOW_BUT_FINE else "loading data" if s.in_loader else inside
    return _alive(s, doing, [f"observed: {sign}"])


def _slow(s: StuckRank) -> Explanation | None:
    slow = s.phase in _SLOW_BUT_FINE or (s.busy and s.phase in _COMPUTING)
    return _alive(s, DOING[s.phase], []) if slow else None


def _works_on(s: StuckRank) -> Explanation | None:
    """Its peers have finished and nobody waits for it: an export, an upload."""
    ends = [s.evidence.of(number).exit for number in s.evidence.all_ranks if number != s.rank.rank]
    if s.script_over or s.evidence.killed_as_hung or not ends or not all(end is not None and end.ok for end in ends):
        return None
    return _alive(s, "working on after its peers have finished", [f"observed: {_doing(s)}"])


def _alive(s: StuckRank, doing: str, facts: Sequence[str]) -> Explanation:
    began = s.rank.innermost.time_ns / 1e9 if s.rank.innermost is not None else s.rank.last_progress_t
    spent = f"{max(0.0, s.evidence.now - began):.0f} s" if began is not None else "long"
    fix = _WHILE_COMPILING if doing == "compiling" else ()
    share = [f"observed: it uses {100 * s.cpu_share:.0f} % of a core"] if s.cpu_share is not None else []
    seen = [f"observed: rank {s.rank.rank} has been {doing} for {spent}", *facts, *share]
    return Explanation("MC220", f"{{who}} {{has|have}} been {doing} for {spent}", s.frame, seen, fix, "at_work")


def _blocked_open(s: StuckRank) -> Explanation | None:
    """The rank stays in an interruptible `open`, such as that of a pipe without a writer, in whatever phase."""
    opens = s.sample is not None and s.sample.syscall in _OPEN_CALLS and s.state == "S"
    return _user_code(s) if opens and not s.wakes else None


def _user_code(s: StuckRank) -> Explanation:
    where = f" at {s.frame.site}" if s.frame is not None else ""
    facts: list[str] = [f"observed: {_doing(s)}"]
    known: dict[str, Any] = {}
    if s.sample is not None:
        call = f", system call {s.sample.syscall}" if s.sample.syscall else ""
        facts.append(f"observed: process state {s.state or '?'}{call}")
        if children := sorted({child.comm for child in s.sample.children if child.comm}):
            facts.append(f"observed: it has child processes: {', '.join(children)}")
            known["children"] = children
    facts += _failed_threads(s)
    if not s.evidence.killed_as_hung and (awaited := _awaited_input(s)) is not None:
        cause, what, file = awaited
        facts.append(f"observed: it waits in the kernel {what}")
        fix = _LOCKED_FILE if cause == "file_lock" else _FROM_ELSEWHERE
        known = {**known, "file": file}
        return Explanation("MC219", f"{{who}} {{waits|wait}} {what}{where}", s.frame, facts, fix, cause, known)
    quiet = "{is|are} stuck" if s.evidence.killed_as_hung else "{makes|make} no progress"
    if s.quiet_s is not None and not s.evidence.killed_as_hung:
        quiet = f"{{has|have}} made no progress for {s.quiet_s:.0f} s"
    return Explanation("MC219", f"{{who}} {quiet}{where}", s.frame, facts, cause="own_code", facts=known)


def _awaited_input(s: StuckRank) -> tuple[str, str, str] | None:
    """If it is blocked in a system call that reads: the finding's cause, what it waits for in words, and the file."""
    if s.busy or s.sample is None:
        return None
    call, target = s.sample.syscall, s.sample.syscall_target
    if call in _LOCK_CALLS:
        return "file_lock", f"for the lock of {target or 'a file'}", target
    if call in _OPEN_CALLS:
        own = source_text(s.frame) if s.frame is not None else ""
        return "opening", "to open a file for reading" if "open(" in own else "to open a file", target
    if call in _READ_CALLS:
        kind = "a pipe" if target.startswith("pipe:") else "a socket" if target.startswith("socket:") else target
        return "reading", f"for data while reading {kind or 'a file'}", kind
    return None


def _doing(s: StuckRank) -> str:
    """Where the main thread stands, in words."""
    inside = s.rank.innermost
    phase = f"in phase {inside.phase}" if inside is not None else "in code outside any recorded phase"
    if s.main is not None and s.main.innermost is not None and s.frame is not None:
        inner = s.main.innermost
        below = f", inside {inner.function} ({inner.site})" if inner != s.frame else ""
        return f"rank {s.rank.rank} is {phase}, its main thread at {s.frame.site} in {s.frame.function}{below}"
    place = f", last seen at {s.frame.site}" if s.frame is not None else ""
    return f"rank {s.rank.rank} is {phase}{place}"


def _merged(found: Iterable[tuple[Explanation, Finding]]) -> list[Finding]:
    """Ranks that are stuck in the same way at the same line are one finding."""
    merged: dict[tuple[str, str | None], Finding] = {}
    for explanation, finding in found:
        held = merged.setdefault((finding.code, finding.location), finding)
        if held is finding:
            continue
        held.ranks = sorted({*held.ranks, *finding.ranks})
        held.victims = sorted({*held.victims, *finding.victims} - set(held.ranks))
        held.title = explanation.title_of(held.ranks)
        held.evidence += [line for line in finding.evidence if line not in held.evidence]
    return sorted(merged.values(), key=lambda f: (f.code == "MC220", -len(f.victims)))
