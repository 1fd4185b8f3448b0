"""A job that brings its own launcher (torchrun, accelerate launch, a script that spawns its ranks).

We start the command as it is, with the black box injected, and keep out of its way: its output and its terminal are
its own. Ranks are found by the rings that appear in the run directory. Exits are noticed by pidfd.

Processes that a clean command leaves running live on, and so do the children of a clean rank, even if other ranks fail.
Only a second Ctrl-C or SIGTERM ends them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from model_check.errors import UsageError
from model_check.launch import orphans
from model_check.launch.job import forget_outer_job
from model_check.launch.reaper import Guard, JobMark
from model_check.launch.signals import KEYS, Requests
from model_check.record import RunDir
from model_check.record.events.job import CLEAN_CODES, RankExit, RankStarted, SignalSent
from model_check.record.events.process import JobStarted
from model_check.record.process_identity import is_near, live_pid
from model_check.record.redaction import redact_argv
from model_check.record.ring import RingHeader, read_header
from model_check.record.signal_handlers import handle
from model_check.supervise import processes
from model_check.supervise.hooks import EndJob
from model_check.supervise.process_exits import ExitWatcher, ProcessExit, exit_code_recorded
from model_check.supervise.supervisor import Supervisor

_TURN_S = 0.1
_HANG_GRACE_S = 2.0
_RING_NAME = re.compile(r"rank-(\d+)\.ring$")


@dataclass(frozen=True)
class CommandResult:
    """How the command ended. `interrupted`: by a signal to us."""

    exit_code: int
    exits: tuple[RankExit, ...]
    ending: EndJob | None
    interrupted: bool


def run_command(
    argv: Sequence[str], *, run_dir: RunDir, env: dict[str, str], supervisor: Supervisor, stop_grace_s: float = 30.0
) -> CommandResult:
    """Runs the command to its end, watching the ranks it starts. `env` comes on top of our own environment.

    `stop_grace_s`: seconds between a request to stop and SIGKILL for everything.
    """
    forget_outer_job()
    mark = JobMark(os.environ)
    with Guard(mark, run_dir) as guard:
        # Ranks whose launcher dies become our children, so that we can still end them.
        orphans.adopt_orphans()
        try:
            process = subprocess.Popen(list(argv), env={**os.environ, **env, **mark.variables()})
        except OSError as error:
            raise UsageError(
                f"{argv[0]} cannot be started: {error.strerror}", remedy="check the command after --"
            ) from error
        supervisor.journal.write(
            JobStarted(
                command=tuple(redact_argv(argv, os.environ)),
                launcher_pid=os.getpid(),
                host=socket.gethostname(),
                command_pid=process.pid,
            )
        )
        return _CommandJob(process, guard.pid, mark, run_dir, supervisor, stop_grace_s).run()


@dataclass
class _CommandJob:
    """The loop around one command."""

    _process: subprocess.Popen[bytes]
    _guard_pid: int
    _mark: JobMark
    _run_dir: RunDir
    _supervisor: Supervisor
    _stop_grace_s: float

    def __post_init__(self) -> None:
        self._watcher = ExitWatcher()
        self._rank_of: dict[int, int] = {}
        self._identities: dict[int, RingHeader] = {}
        self._exits: list[RankExit] = []
        self._stop = Requests()
        self._signalled_at: float | None = None
        self._ending: EndJob | None = None
        self._stop_noted = False
        self._again_said = False

    def run(self) -> CommandResult:
        handlers = {
            **dict.fromkeys((*KEYS, signal.SIGTERM, signal.SIGHUP), self._on_signal),
            **dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), self._pass_on),
        }
        previous = handle(handlers)
        self._watcher.watch(self._process.pid)
        try:
            while self._process.poll() is None:
                self._watcher.woken.wait(_TURN_S)
                self._turn()
            self._turn()
            self._leave_or_end_ranks()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._watcher.close()
        return CommandResult(
            exit_code=self._exit_code(),
            exits=tuple(self._exits),
            ending=self._ending,
            interrupted=self._stop.number is not None,
        )

    def _exit_code(self) -> int:
        """The command's own, unless it ended because of us: torchrun makes 1 of every signal that ends it."""
        if self._ending is not None:
            return self._ending.exit_code
        code = self._process.returncode
        code = code if code >= 0 else 128 - code
        if self._stop.number is not None and code not in CLEAN_CODES:
            return 128 + self._stop.number
        return code

    def _turn(self) -> None:
        try:
            self._watch()
        except OSError as error:  # a file server that is away for a while must not end the launcher
            self._supervisor.say_trouble(f"the run directory cannot be used ({error}); the command goes on")
        if self._stop.number is not None or self._ending:
            self._press_on()
            return
        self._ending = self._supervisor.poll()
        if self._ending is not None:
            self._signal_job(signal.SIGTERM, self._ending.reason)

    def _watch(self) -> None:
        ended = [pid for pid in orphans.children_of_main_thread() if not processes.is_alive(pid)]
        self._find_ranks()
        if self._stop.number is not None and not self._stop_noted:
            self._note_stop(self._stop.number)
        for exit in self._watcher.take():
            self._note_exit(exit)
        self._collect(ended)

    def _collect(self, ended: list[int]) -> None:
        """Reaps processes that ended before this turn, except those whose exit code is still needed."""
        ranks = set(self._rank_of) - {exit.pid for exit in self._exits}
        waited_for = {self._process.pid, self._guard_pid, *ranks}  # the command itself may be a rank
        orphans.collect(set(ended) - waited_for)
        orphans.end_loader_workers(orphans.children_of_main_thread())

    def _find_ranks(self) -> None:
        for path in self._run_dir.blackbox_dir.glob("rank-*.ring"):
            header = read_header(path)
            # The PID of a rank on another host or in another container belongs to a different process here.
            if (match := _RING_NAME.search(path.name)) and is_near(header) and header.pid not in self._rank_of:
                self._add_rank(int(match[1]), header)

    def _add_rank(self, rank: int, header: RingHeader) -> None:
        pid = header.pid
        self._rank_of[pid] = rank
        self._identities[pid] = header
        started = header.start_monotonic_ns / 1e9 or time.monotonic()
        self._supervisor.rank_started(rank, pid, started)
        self._supervisor.journal.write(RankStarted(t=started, rank=rank, pid=pid))
        if live_pid(header) is None or not self._watcher.watch(pid):
            self._note_exit(ProcessExit(pid, None, None, time.monotonic()))

    def _note_exit(self, exit: ProcessExit) -> None:
        rank = self._rank_of.get(exit.pid)
        if rank is None:
            return
        code = exit.code
        if code is None and exit.signal is None:
            code = exit_code_recorded(self._run_dir, rank, exit.pid)
        noted = RankExit(
            t=exit.at, rank=rank, pid=exit.pid, code=code, signal=exit.signal, signalled_at=self._signalled_at
        )
        self._exits.append(noted)
        self._supervisor.journal.write(noted)
        self._supervisor.rank_exited(noted)

    # Ending.

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stop.note(number)
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
            # A key reaches every process of the terminal's foreground group, the command included.
            if not (number in KEYS and _in_the_foreground()):
                self._process.send_signal(number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        """Passes on signals whose meaning only the command knows, such as SIGUSR1, Slurm's warning."""
        self._process.send_signal(number)

    def _note_stop(self, number: int) -> None:
        """Records the request as ours for every rank, whoever passes the signal on to it."""
        self._stop_noted = True
        name = signal.Signals(number).name
        for pid, rank in self._rank_of.items():
            told = SignalSent(
                t=self._signalled_at or 0.0, rank=rank, pid=pid, signal=name, why="passed on to the command"
            )
            self._supervisor.journal.write(told)

    def _press_on(self) -> None:
        """Ends the command and its ranks after the grace period, or when a second request comes."""
        if self._stop.again is not None:
            why = f"{signal.Signals(self._stop.again).name} again"
            if not self._again_said:
                self._again_said = True
                self._supervisor.say(f"{why}: the command and its ranks are ended now, saved or not")
            self._signal_job(signal.SIGKILL, why)
            for pid in self._mark.holders():
                processes.send_signal(pid, signal.SIGKILL)
            return
        grace = self._stop_grace_s if self._stop.number is not None else _HANG_GRACE_S
        if self._signalled_at is not None and time.monotonic() - self._signalled_at > grace:
            self._signal_job(signal.SIGKILL, "it did not end in time")

    def _signal_job(self, number: signal.Signals, why: str) -> None:
        """Ranks first: their launcher would otherwise report the first one that it saw die of our own signal."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()
        ranks = self._living_ranks()
        for pid, rank in ranks.items():
            self._supervisor.journal.write(SignalSent(rank=rank, pid=pid, signal=number.name, why=why))
        for pid in [*ranks, *processes.descendants_of(self._process.pid), self._process.pid]:
            processes.send_signal(pid, number)

    def _leave_or_end_ranks(self) -> None:
        """A clean command may leave ranks running. Ranks of a failed command only waste memory and devices."""
        left = self._living_ranks()
        clean = self._process.returncode in CLEAN_CODES and self._ending is None and self._stop.again is None
        if left and clean:
            names = ", ".join(
                f"rank {rank} (pid {pid})" for pid, rank in sorted(left.items(), key=lambda item: item[1])
            )
            self._supervisor.say(f"the command has ended and left {names} running")
            return
        for pid, rank in left.items():
            self._supervisor.journal.write(SignalSent(rank=rank, pid=pid, signal="SIGKILL", why="its launcher is gone"))
            for child in [*processes.descendants_of(pid), pid]:
                processes.send_signal(child, signal.SIGKILL)

    def _living_ranks(self) -> dict[int, int]:
        return {pid: rank for pid, rank in self._rank_of.items() if live_pid(self._identities[pid]) is not None}


def _in_the_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
