"""The supervisor: watches the ranks from outside, suspects a stall, gathers evidence, and ends the job only on proof.

`poll` is called about ten times a second by whoever runs the ranks. It is a state machine that never sleeps:

    quiet ──(no progress past the threshold)──> suspected: sample, stacks, flight; looks at ranks that do not wait
    suspected ──(0.8 s later)──> stalled: second round of stacks, examine, say the finding once
    stalled ──(alive: it compiles, its lines change)──> one calm line, and more looks now and then
    stalled ──(progress)──> quiet: the finding is withdrawn
    stalled ──(a proven error, or hang_kill_after_s)──> ending

While some rank works, the ranks that wait for it are not stalled, however long they wait: a calm line says so.

The rules that name a fault live elsewhere; they come in as `examine`, which reads the run directory.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from model_check.record import Finding, RunDir, Verdict
from model_check.record.events.crashes import Exit, UncaughtException
from model_check.record.events.process import Stalled, StallWithdrawn, Stopped, StopReason
from model_check.record.journal import Journal
from model_check.record.process_sample import RankSample
from model_check.record.rank_exits import EXIT_CODE_OF_A_HANG, RankExit
from model_check.record.ring import read_header
from model_check.record.stalls import STALL_FLOOR_S, stall_after_s
from model_check.record.verdict import DetectionTimes, Outcome, VerdictFile
from model_check.supervise import processes, waiting
from model_check.supervise.announcements import Announcements, CalmLine, calm_line
from model_check.supervise.collect import FlightRequest, Gatherer
from model_check.supervise.hooks import EndJob, Hooks, JobView
from model_check.supervise.process_exits import exit_code_recorded
from model_check.supervise.watched_rank import Pulse, Rank, Stall

Examine = Callable[[RunDir, bool], Verdict]
_CRASHES = ("MC1", "MC3", "MC4", "MC5", "MC6", "MC9")  # the families in which a rank ends by itself
_ACTIVITIES_FRESH_S = 1.0
_MOST_ROUNDS = 12  # of stacks in one stall; by then hours have passed
_LOOKS = 6  # in one burst, at ranks that do not wait
_LOOK_AGAIN_S = 3.0  # until the next burst at a live rank; later bursts come after a tenth of the time passed so far
_LOOK_AGAIN_SHARE = 0.1
_LONGEST_BLINDNESS_S = 8.0
_CLOSE_LOOKS_S = (0.1, 0.4, 0.8, 1.2)
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_LAST_WORDS = frozenset({UncaughtException.kind, Exit.kind})
_SAMPLE_CLOSELY_S = 120.0
_SAMPLE_HOURLY_S = 3600.0


@dataclass(frozen=True)
class Limits:
    """All in seconds. `kill_after_s` 0: a stall is never ended without proof.

    `io_kill_after_s`: the same for a rank in uninterruptible I/O (state D), where a slow filesystem may hold it for a
    long time; 0: never.
    `own_exit_s` is what a failing rank gets to leave by itself, and `own_work_s` what it gets while it or a child is at
    work, such as a tracker that uploads its last lines. `own_launcher_s` is what a launcher that the job brought along
    gets to end the others.
    """

    stall_floor_s: float = STALL_FLOOR_S
    stall_before_first_step_s: float = 12.0
    stall_while_peers_wait_s: float = 6.0
    second_round_after_s: float = 0.8
    gather_again_s: float = 15.0
    sample_every_s: float = 1.0
    examine_every_s: float = 1.5
    examine_cost_share: float = 0.006  # of a core, while all is well
    say_every_s: float = 30.0
    own_exit_s: float = 1.5
    own_work_s: float = 10.0
    own_launcher_s: float = 0.0
    kill_after_s: float = 300.0
    io_kill_after_s: float = 0.0
    away_after_s: float = 5.0  # between two turns: we did not run, so the ranks may not have run either


class Supervisor:
    """Watches ranks that others start and end. All times are CLOCK_MONOTONIC seconds."""

    def __init__(
        self,
        run_dir: RunDir,
        examine: Examine,
        say: Callable[[str], None],
        *,
        show: Callable[[Verdict], None],
        fall_silent: Callable[[], None] = lambda: None,
        request_flight: FlightRequest | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._examine = examine
        self.say = say
        self.fall_silent = fall_silent
        self.announcements = Announcements(show)
        self._limits = limits or Limits()
        self.journal = Journal(run_dir)
        self._gather = Gatherer(run_dir, self.journal, request_flight)
        self._ranks: dict[int, Rank] = {}
        self._stall: Stall | None = None
        self._calm_line_due = 0.0  # 0: no calm line since all ranks last moved
        self._crashed = False
        self._in_trouble = False
        self._verdict_file = VerdictFile(run_dir.verdict)
        self.notes: set[str] = set()  # failures of our own code, for the verdict
        self._sampled_at = 0.0
        self._examined_at = 0.0
        self._examine_cost_s = 0.0
        self._life_at = time.monotonic()
        self._turned_at = math.inf
        self._in_io_since: float | None = None
        self._proven_at: float | None = None
        self._last_active: set[int] = set()  # ranks at work in the newest sample
        self._close_looks: list[float] = []
        self._detection_times = DetectionTimes()
        self._ended = False
        self._activities_at = 0.0
        self._last_activities: list[waiting.Activity] = []
        self.verdict = Verdict()

    # What the owner of the processes tells us. Starts, exits and signals are written down by the owner itself.

    def rank_started(self, rank: int, pid: int, at: float | None = None) -> None:
        started = time.monotonic() if at is None else at
        if not self._ranks:
            self._life_at = started
        self._ranks[rank] = Rank(rank, pid, Pulse(self._run_dir.ring(rank), started), started)
        self._crashed = False

    def rank_exited(self, exit: RankExit) -> None:
        """On the first failure takes evidence of the survivors at once: their launcher is about to end them."""
        known = self._ranks.get(exit.rank)
        if known is None or known.pid != exit.pid:
            return
        known.exit = exit
        if exit.signalled_at is not None:
            return
        if not exit.failed:
            # Peers that still need it show within moments, or never.
            self._look_closely(exit.t)
        elif not self._crashed:
            self._crashed = True
            try:
                self._on_first_failure(exit)
            except Exception as error:  # failing to take evidence must not change how the job ends
                self.say_trouble(f"no evidence of the survivors ({type(error).__name__}: {error}); the job goes on")

    def hooks(self) -> Hooks:
        """For `launch_job`: puts every rank of the job under these eyes."""

        def on_start(view: JobView) -> None:
            for rank, pid in view.pids.items():
                self.rank_started(rank, pid, view.started_at)

        return Hooks(
            on_start=on_start,
            on_poll=lambda _: self.poll(),
            on_exit=self.rank_exited,
            on_trouble=self.notes.add,
        )

    # The loop.

    def poll(self) -> EndJob | None:
        """One turn. Returns not None if the job must end. Our own errors never end it."""
        if time.monotonic() - self._turned_at > self._limits.away_after_s:
            self._forget_the_time_away()
        try:
            return self._turn()
        except OSError as error:
            self.say_trouble(f"the run directory cannot be used ({error}); the job goes on without a watch")
        except Exception as error:  # a bug of ours costs the job one turn of supervision, nothing else
            self.say_trouble(f"the watch failed ({type(error).__name__}: {error}); the job goes on")
        finally:
            self._turned_at = time.monotonic()
        return None

    def _forget_the_time_away(self) -> None:
        """Counts silence from now on: Ctrl-Z, a scheduler or a debugger may have suspended the job together with us."""
        now = time.monotonic()
        self._life_at = now
        self._in_io_since = None
        if self._stall is None:
            for rank in self._alive():
                rank.pulse.last_at = max(rank.pulse.last_at, now)

    def _write(self, verdict: Verdict) -> None:
        """What cannot be written is still known, and shown."""
        try:
            self._verdict_file.write(verdict)
        except OSError as error:
            self.say_trouble(f"the run directory cannot be used ({error}); the verdict is only shown")

    def say_trouble(self, trouble: str) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            self.say(trouble)

    def _turn(self) -> EndJob | None:
        now = time.monotonic()
        alive = self._alive()
        if not alive:
            return None
        moved = [rank for rank in alive if rank.pulse.beat()]
        if moved:
            self._life_at = now
        if now - self._sampled_at >= self._sample_pause(now):
            self._take_sample(now)
        self._follow_stall(alive, now)
        if self._hear(now) or self._examination_due(now):
            self._examine_now(now)
        return self._decide(now)

    def finish(self, outcome: Outcome, exits: Sequence[RankExit] | None, exit_code: int) -> Verdict:
        """The last word, when all ranks are gone. The guilty rank's own code goes before `exit_code`.

        `exits` None: a launcher that the job brought along has made its own code of them, and that one stands.
        """
        before = self.verdict.findings
        try:
            self._gather.memory_kills()
            self._examine_now(time.monotonic(), live=False)
        except Exception as error:  # the job keeps its exit code even if its records cannot be read
            note = f"the run could not be examined at its end ({type(error).__name__}: {error})"
            self.verdict = replace(self.verdict, notes=sorted({*self.verdict.notes, note}))
        if (outcome == "interrupted" or self._ended) and before:
            # Our own signals have changed the records since: the findings made while the ranks lived name the cause.
            self.verdict = replace(self.verdict, findings=before)
        if outcome == "failed" and exits is not None:
            exit_code = self._code_of_the_guilty(exits, exit_code)
        self.verdict = replace(self.verdict, outcome=outcome, exit_code=exit_code)
        self._write(self.verdict)
        self._verdict_file.close()
        if outcome == "completed":
            self._say_what_ended(time.monotonic(), last=True)
        for rank in self._ranks.values():
            rank.pulse.close()
        self._gather.close()
        self.journal.close()
        return self.verdict

    def note_stop(self, reason: StopReason, why: str) -> None:
        """Records why the job is being ended, for the rules; `why` is the sentence for people."""
        self.journal.write(Stopped(reason=reason, why=why))

    @property
    def stalled(self) -> bool:
        return self._stall is not None and self._stall.examined

    def _code_of_the_guilty(self, exits: Sequence[RankExit], otherwise: int) -> int:
        named = [rank for finding in self.verdict.findings if finding.severity == "error" for rank in finding.ranks]
        codes = {exit.rank: exit.exit_code for exit in exits if exit.failed and exit.signalled_at is None}
        for known in (self._ranks[rank] for rank in named if rank in self._ranks):
            # A rank that was slow to leave, and that we ended, had already said with which code it would.
            code = codes.get(known.rank) or exit_code_recorded(self._run_dir, known.rank, known.pid)
            if code:
                return code
        return otherwise

    def _alive(self) -> list[Rank]:
        return [rank for rank in self._ranks.values() if rank.exit is None]

    def _pids(self) -> dict[int, int]:
        return {rank.rank: rank.pid for rank in self._alive()}

    # Crashes.

    def _on_first_failure(self, exit: RankExit) -> None:
        if exit.signal is not None:
            self._gather.memory_kills()
        survivors = self._pids()
        self._gather.sample(survivors)
        self._gather.stacks(survivors, timeout_s=0.5)
        self._examine_now(time.monotonic())

    # Stalls.

    def _threshold(self, rank: Rank) -> float:
        steps = [seconds for r in self._ranks.values() if (seconds := r.pulse.step_seconds()) is not None]
        if steps:
            return stall_after_s(statistics.median(steps), self._limits.stall_floor_s)
        return self._limits.stall_while_peers_wait_s if rank.pulse.has_ring else self._limits.stall_before_first_step_s

    def _quiet_ranks(self, alive: list[Rank], now: float) -> list[Rank]:
        # No threshold is below the floor, so a healthy turn computes no median.
        silent = [rank for rank in alive if now - rank.pulse.last_at > self._limits.stall_floor_s]
        # A rank whose recording failed is silent for good: neither its silence nor its peers' waits say anything.
        if any(read_header(self._run_dir.ring(rank.rank)).gave_up for rank in silent):
            return []
        return [rank for rank in silent if now - rank.pulse.last_at > self._threshold(rank)]

    def _follow_stall(self, alive: list[Rank], now: float) -> None:
        quiet = self._quiet_ranks(alive, now)
        if not quiet:
            self._calm_line_due = 0.0
        elif self._waited_for_work(quiet, alive, now):
            quiet = []
        if self._stall is None:
            if quiet and self._suspicious(quiet, now):
                since = min(rank.pulse.last_at for rank in quiet)
                self._stall = Stall(
                    since, self._threshold(quiet[0]), now, line_due=since + self._limits.say_every_s, looked_at=now
                )
                self._gather.sample(self._pids())
                self._gather.stacks(self._pids())
                self._gather.flight(self._pids())
            return
        stall = self._stall
        if not quiet:
            self._withdraw(stall, now)
            return
        self._look(stall, now)
        if stall.rounds == 1 and now - stall.gathered_at >= self._limits.second_round_after_s:
            self._confirm(stall, now)
        elif stall.rounds < _MOST_ROUNDS and now - stall.gathered_at >= self._limits.gather_again_s * stall.rounds:
            stall.rounds += 1
            stall.gathered_at = now
            self._gather.stacks(self._pids())
            self._gather.flight(self._pids())
            self._examine_now(now)
        if now >= stall.line_due and self._calm_line() is None:
            stall.line_due = now + self._limits.say_every_s
            start = waiting.start_line(self._run_dir, self._pids(), now)
            for line in filter(None, (waiting.waiting_line(self._activities(), now), start)):
                self.say(line)

    def _waited_for_work(self, quiet: list[Rank], alive: list[Rank], now: float) -> bool:
        """Whether all quiet ranks wait, and a rank that does not wait has just recorded work, such as an evaluation."""
        working = [
            rank
            for rank in alive
            if rank.pulse.worked_at is not None and now - rank.pulse.worked_at <= self._threshold(rank)
        ]
        if not working:
            return False
        where = {activity.rank: activity for activity in self._activities()}
        waits = {number for number, activity in where.items() if activity.waits}
        if not all(rank.rank in waits for rank in quiet) or not any(rank.rank not in waits for rank in working):
            return False
        since = min(rank.pulse.last_at for rank in quiet)
        doing = [where[rank.rank] for rank in working if rank.rank in where and rank.rank not in waits]
        line = waiting.work_line(doing, len(waits))
        self._say_calmly(CalmLine(line, line), now - since, now)
        return True

    def _say_calmly(self, line: CalmLine, waited_s: float, now: float) -> None:
        """Prints one line while ranks wait and nothing is wrong, and another every half minute."""
        if now < self._calm_line_due or (not self._calm_line_due and not self.announcements.is_news(line, waited_s)):
            return
        self._calm_line_due = now + self._limits.say_every_s
        self.say(line.text)

    def _look(self, stall: Stall, now: float) -> None:
        """Takes bursts of stacks of ranks that do not wait: only several looks tell progress from an endless loop."""
        pause = max(_LOOK_AGAIN_S, _LOOK_AGAIN_SHARE * (now - stall.since))
        in_burst = stall.looks % _LOOKS != 0 or stall.rounds == 1
        if not in_burst and (now - stall.looked_at < pause or self._calm_line() is None):
            return
        stall.looks += 1
        stall.looked_at = now
        pids = self._pids()
        working = [activity for activity in self._activities() if not activity.waits and activity.rank in pids]
        # A stopped process never moves between two looks, and looking at it takes a long time.
        seen = {activity.rank: pids[activity.rank] for activity in working}
        seen = {rank: pid for rank, pid in seen.items() if not processes.is_stopped(pid)}
        self._gather.look(seen, with_children={activity.rank for activity in working if activity.phase == "data"})

    def _calm_line(self) -> CalmLine | None:
        """What the ranks wait for, if the verdict on the stall is that nothing is wrong."""
        told = [finding for finding in self.verdict.findings if finding.code.startswith("MC2")]
        return calm_line(told[0]) if told and all(finding.severity == "info" for finding in told) else None

    def _suspicious(self, quiet: list[Rank], now: float) -> bool:
        """Before the first step long silence is normal (imports, compilation), unless peers already wait."""
        if any(rank.pulse.step_seconds() is not None for rank in self._ranks.values()):
            return True
        if any(now - rank.pulse.last_at > self._limits.stall_before_first_step_s for rank in quiet):
            return True
        return any(activity.waits for activity in self._activities())

    def _confirm(self, stall: Stall, now: float) -> None:
        stall.rounds = 2
        stall.gathered_at = now
        stall.examined = True
        self._take_sample(now)
        self._gather.stacks(self._pids())
        self.journal.write(Stalled(since_t=stall.since, threshold_s=stall.threshold_s, waiting_s=now - stall.since))
        self._examine_now(time.monotonic())

    def _withdraw(self, stall: Stall, now: float) -> None:
        self._stall = None
        self._in_io_since = None
        if not stall.examined or self._crashed:
            return
        self.journal.write(StallWithdrawn(after_s=now - stall.since))
        self._detection_times = DetectionTimes()
        if self.announcements.withdraw(now - stall.since):
            self.say(f"progress again after {now - stall.since:.0f} s; the warning is withdrawn")
        self._examine_now(now)

    def _activities(self) -> list[waiting.Activity]:
        """Reading whole rings takes milliseconds: one reading serves a second."""
        now = time.monotonic()
        if now - self._activities_at > _ACTIVITIES_FRESH_S:
            self._activities_at = now
            self._last_activities = waiting.activities(
                self._run_dir, {rank.rank: rank.started_at for rank in self._alive()}
            )
        return self._last_activities

    def _sample_pause(self, now: float) -> float:
        """Every second at the start and while something is wrong; a healthy day must not fill the disk."""
        age = now - min(rank.started_at for rank in self._ranks.values())
        if self._stall is not None or self._proven_at is not None or age < _SAMPLE_CLOSELY_S:
            return self._limits.sample_every_s
        return self._limits.sample_every_s * (5 if age < _SAMPLE_HOURLY_S else 30)

    def _take_sample(self, now: float) -> None:
        self._sampled_at = now
        samples = self._gather.sample(self._pids())
        active = {rank for rank, seen in samples.items() if self._ranks[rank].was_active(seen)}
        if self._stall is None and self._proven_at is None:
            return
        # On a machine with too much to do a rank that wants to compute gets hardly any time; it is not idle.
        states = {
            rank: processes.thread_states([seen.pid, *(child.pid for child in seen.children)])
            for rank, seen in samples.items()
        }
        self._last_active = active = active | {rank for rank, seen in states.items() if "R" in seen}
        if self._stall is None:
            return
        in_io = any("D" in seen for seen in states.values())
        self._in_io_since = (self._in_io_since or now) if in_io else None
        if in_io or self._is_at_a_prompt(samples) or not self._is_idle_hang(active):
            self._life_at = now

    def _is_at_a_prompt(self, samples: Mapping[int, RankSample]) -> bool:
        """A rank waits for input from a terminal: a person who debugs may think for as long as they like."""
        asking = {activity.rank for activity in self._activities() if activity.phase == "input"}
        return any(rank in asking and seen.fd0.startswith(_TERMINALS) for rank, seen in samples.items())

    def _is_idle_hang(self, active: set[int]) -> bool:
        """Ranks wait, and whoever they wait for does nothing: a rank that computes or moves bytes is slow, not hung."""
        where = self._activities()
        working = [activity for activity in where if not activity.waits]
        if any(activity.rank in active for activity in working):
            return False
        return len(working) < len(where) or any(activity.phase in waiting.NEVER_IDLE_PHASES for activity in working)

    # Examinations and decisions.

    def _examination_due(self, now: float) -> bool:
        affordable = min(_LONGEST_BLINDNESS_S, self._examine_cost_s / self._limits.examine_cost_share)
        pause = max(self._limits.examine_every_s, 0.0 if self._stall is not None else affordable)
        if self._close_looks and now >= self._close_looks[0]:
            del self._close_looks[0]
            return True
        return now - self._examined_at >= pause

    def _hear(self, now: float) -> bool:
        """True where a rank says that it fails or leaves. After any bad news its peers are looked at more often."""
        news = self._gather.hear(self._ranks)
        if news:
            self._look_closely(now)
        return bool(news & _LAST_WORDS)

    def _look_closely(self, since: float) -> None:
        self._close_looks = [since + seconds for seconds in _CLOSE_LOOKS_S]

    def _examine_now(self, now: float, *, live: bool = True) -> None:
        cpu_s = time.thread_time()
        self._hear(now)
        verdict = self._judged(live)
        self._examined_at = time.monotonic()
        self._examine_cost_s = time.thread_time() - cpu_s
        began = self._stall.since if self._stall is not None else self._first_failure_at()
        for finding in verdict.findings:
            self._detection_times.settle(finding, now - began if began is not None else None)
        changed = verdict.to_json() != self.verdict.to_json()
        self.verdict = verdict
        if changed or not self._run_dir.verdict.exists():
            self._write(verdict)
        if live and not self._crashed:  # after a crash the last word is a second away
            waited_s = now - self._stall.since if self._stall is not None else 0.0
            self.announcements.tell(verdict, waited_s)
            if self._stall is not None and (line := self._calm_line()) is not None:
                self._say_calmly(line, waited_s, now)
            self._say_what_ended(now)

    def _judged(self, live: bool) -> Verdict:
        """The rules' verdict. If the examination itself fails, the previous verdict stands, with a note."""
        if self.journal.lost is not None:
            self.notes.add(f"the launcher could not write its events: {self.journal.lost.strerror}")
        try:
            verdict = self._examine(self._run_dir, live)
        except Exception as error:
            note = f"the run could not be examined ({type(error).__name__}: {error})"
            verdict = replace(self.verdict, notes=sorted({*self.verdict.notes, note}))
        return replace(verdict, notes=sorted({*verdict.notes, *self.notes})) if self.notes else verdict

    def _say_what_ended(self, now: float, *, last: bool = False) -> None:
        for line in self.announcements.trends_ended(self.verdict, now, last=last):
            self.say(line)

    def _first_failure_at(self) -> float | None:
        times = [r.exit.t for r in self._ranks.values() if r.exit is not None and r.exit.failed]
        return min(times, default=None)

    def _decide(self, now: float) -> EndJob | None:
        proven = [f for f in self.verdict.findings if f.severity == "error" and f.certainty == "proven"]
        if proven:
            return self._end_proven(proven[0], now)
        self._proven_at = None
        # Not before the stall is confirmed: until then nobody has looked whether a rank computes or moves bytes.
        why = self._out_of_patience(now) if self.stalled else None
        if why is not None:
            self.note_stop("hang", why)
            self._take_sample(now)
            self._gather.stacks(self._pids())
            self._examine_now(now)
            self._raise_to_error()
            self._ended = True
            return EndJob(why, EXIT_CODE_OF_A_HANG)
        return None

    def _out_of_patience(self, now: float) -> str | None:
        """Why the stall has lasted too long and the job must end; None while it has not."""
        kill_after, io_kill_after = self._limits.kill_after_s, self._limits.io_kill_after_s
        if kill_after and now - self._life_at > kill_after:
            return f"hang: no progress for {now - self._life_at:.0f} s (hang_kill_after_s is {kill_after:g})"
        blocked_s = now - self._in_io_since if self._in_io_since is not None else 0.0
        if io_kill_after and blocked_s > io_kill_after:
            return f"hang: uninterruptible I/O for {blocked_s:.0f} s (io_kill_after_s is {io_kill_after:g})"
        return None

    def _end_proven(self, finding: Finding, now: float) -> EndJob | None:
        """A rank that fails by itself gets a moment to end with its own exit code, and its launcher to act on it."""
        if self._proven_at is None:
            self._proven_at = now
        if finding.code[:3] in _CRASHES:
            leaving = self._pids().keys() & set(finding.ranks)
            exit_s = self._limits.own_work_s if leaving & self._last_active else self._limits.own_exit_s
            patience = max(self._limits.own_launcher_s, exit_s if leaving else 0.0)
            if now - self._proven_at < patience:
                return None
        why = f"{finding.code}: {finding.title}"
        self.note_stop("proven", f"proven: {why}")
        self._ended = True
        return EndJob(why, EXIT_CODE_OF_A_HANG)

    def _raise_to_error(self) -> None:
        """The stall has outlived its patience: what was a warning is now why the job ends."""
        if self.verdict.findings and self.verdict.findings[0].severity != "error":
            self.verdict.findings[0].severity = "error"
            self._write(self.verdict)
