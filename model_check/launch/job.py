"""One job on this host, from the first import to the exit code."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from model_check.blackbox.box import RANK_PID_VARIABLE
from model_check.blackbox.gate import FOLDER_VARIABLE, LINES_VARIABLE, SLOTS_VARIABLE
from model_check.errors import LaunchError, UsageError
from model_check.launch.console import Console, ConsoleOptions
from model_check.launch.gate import plan_compilations, plan_gate
from model_check.launch.gpus import Gpu
from model_check.launch.limits import ResidentWatch, check_address_space
from model_check.launch.log_files import LogDir, remove_old_logs
from model_check.launch.nursery import Nursery
from model_check.launch.placement import Hosts, Placement
from model_check.launch.programs import ColdFunction, Command, Entry, Program, WarmFunction
from model_check.launch.signals import StopBeforeStart, StopRequest
from model_check.launch.warmstart import DEFAULT_PRELOAD, preload, why_not_warm
from model_check.record import RunDir
from model_check.record.events import job as events
from model_check.record.events.crashes import UncaughtException
from model_check.record.events.job import CLEAN_CODES, EXIT_STOPPED_AND_SAVED, RankExit
from model_check.record.events.process import JobOver, JobStarted
from model_check.record.journal import Journal
from model_check.record.rank_exits import describe
from model_check.supervise.hooks import Graces, Hooks, JobEnded, JobStopped, Outcome

T = TypeVar("T")


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `exits` are those of the last attempt, in the order in which they came."""

    exit_code: int
    outcome: Literal["completed", "failed", "interrupted"]
    exits: tuple[RankExit, ...]
    log_dir: Path
    message: str = ""
    first_failure: RankExit | None = None
    error: UncaughtException | None = None


@dataclass(frozen=True)
class Job:
    """What one job on this host is run with."""

    placement: Placement
    journal: Journal
    logs: LogDir
    stop: StopRequest
    graces: Graces
    hooks: Hooks
    max_restarts: int


def launch_job(
    entry: Entry | Command,
    payload: Any = None,
    *,
    nproc: int,
    run_dir: RunDir,
    gpus: Sequence[Gpu] = (),
    isolate_gpus: bool = True,
    start: Literal["warm", "cold", "gate"] = "warm",
    preload_modules: tuple[str, ...] = DEFAULT_PRELOAD,
    max_restarts: int = 0,
    hosts: Hosts | None = None,
    graces: Graces | None = None,
    hooks: Hooks | None = None,
    console: ConsoleOptions | None = None,
    env: dict[str, str] | None = None,
    memory_limit_gb: float | None = None,
) -> JobResult:
    """Runs `entry(context, payload)`, or a command, on `nproc` ranks of this host and returns when all are gone.

    `gpus` empty: CPU ranks. `isolate_gpus`: each rank sees its own GPU only, as cuda:0. `env` goes to every rank.
    `start`: `warm` forks ranks that have imported everything, `cold` gives each an interpreter of its own, `gate` does
    that and lets only as many import at once as the host has room for. `memory_limit_gb` ends a rank that takes more.
    """
    if gpus and isolate_gpus and len(gpus) != nproc:
        raise UsageError(f"{nproc} ranks do not fit {len(gpus)} GPUs", remedy="start one rank per GPU")
    forget_outer_job()
    gate = plan_gate(run_dir, nproc, followed=True) if start == "gate" else None
    alone = plan_compilations(run_dir) if start == "warm" and nproc > 1 else gate
    env = {**(alone.variables() if alone is not None else {}), **(env or {})}
    placement = Placement(run_dir, nproc, tuple(gpus), isolate_gpus, hosts or Hosts(), env)
    needs_cuda = bool(gpus)
    # CUDA maps far more than it uses: its ranks are watched, those of the CPU are limited by the kernel.
    address_space_gb = None if needs_cuda else memory_limit_gb
    hooks = hooks or Hooks()
    if needs_cuda and memory_limit_gb is not None:
        hooks = ResidentWatch(memory_limit_gb).added_to(hooks)
    logs = LogDir.create(run_dir)
    with closing(Journal(run_dir)) as journal:
        if old := remove_old_logs(logs.path.parent):
            journal.write(events.OldLogsRemoved(folders=tuple(folder.name for folder in old)))
        if address_space_gb is not None:
            journal.write(events.AddressSpaceLimit(gb=address_space_gb))
        stop = StopRequest(as_received=isinstance(entry, Command))
        job = Job(placement, journal, logs, stop, graces or Graces(), hooks, max_restarts)
        with stop:
            result = _run(
                job,
                lambda: _open_nursery(entry, payload, start, preload_modules, needs_cuda, address_space_gb),
                console or ConsoleOptions(),
                gate.lines if gate is not None else None,
            )
        journal.write(JobOver(outcome=result.outcome, exit_code=result.exit_code))
    return result


def forget_outer_job() -> None:
    """A job that a rank starts, or a notebook that trained before, is a job of its own.

    With the outer rank's mark in their environment its ranks would take themselves for helpers of that rank: no black
    box, no gate. How long to wait at a gate is the user's word and stays.
    """
    for name in (RANK_PID_VARIABLE, FOLDER_VARIABLE, SLOTS_VARIABLE, LINES_VARIABLE):
        os.environ.pop(name, None)


def _run(
    job: Job,
    open_nursery: Callable[[], tuple[Nursery, str | None]],
    options: ConsoleOptions,
    gate_lines: Path | None,
) -> JobResult:
    """Opens what a job needs in the order in which it must be closed again: nursery, console."""
    try:
        nursery, cold_because = open_nursery()
        with closing(nursery), closing(Console(job.placement.run_dir.metrics, options)) as screen:
            if gate_lines is not None:
                screen.follow("gate", gate_lines)
            if cold_because:
                job.journal.write(events.ColdStart(reason=cold_because))
                screen.say(f"cold start: {cold_because}")
            result = _supervise(job, nursery, screen)
            if result.message:
                screen.say(result.message)
            return result
    except StopBeforeStart:
        return _interrupted(job, Outcome())


def _open_nursery(
    entry: Entry | Command,
    payload: Any,
    start: str,
    modules: tuple[str, ...],
    needs_cuda: bool,
    address_space_gb: float | None,
) -> tuple[Nursery, str | None]:
    """The nursery for this entry, and the reason if it had to be a cold one against the wish."""
    if address_space_gb is not None:
        check_address_space(address_space_gb, forked=False)
    because = None
    if start == "warm" and not isinstance(entry, Command):
        preload(modules)
        because = why_not_warm()
        if because is None:
            if address_space_gb is not None:
                check_address_space(address_space_gb, forked=True)
            nursery = Nursery(WarmFunction(entry, payload), address_space_gb=address_space_gb)
            if not (needs_cuda and nursery.cuda_spoiled):
                return nursery, None
            nursery.close()
            because = "CUDA was already asked for devices in the launcher"
    program: Program = entry if isinstance(entry, Command) else ColdFunction.pickle(entry, payload)
    return Nursery(program, address_space_gb=address_space_gb), because


def _supervise(job: Job, nursery: Nursery, screen: Console) -> JobResult:
    # Torch is first imported in the preload, or here where ranks start cold: never with this module.
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from model_check.launch.agent import RankAgent
    from model_check.launch.rendezvous import open_rendezvous

    placement, journal = job.placement, job.journal
    handler = _meeting(placement.hosts, lambda: open_rendezvous(placement.hosts, screen.say))
    spec = WorkerSpec(
        role="rank",
        local_world_size=placement.nproc,
        rdzv_handler=handler,
        max_restarts=job.max_restarts,
        monitor_interval=0.01,  # torch's pause between two looks; ours returns the moment a rank ends
        local_addr=placement.hosts.local_addr,
        entrypoint="model-check",
    )
    journal.write(
        JobStarted(
            nproc=placement.nproc,
            hosts=placement.hosts.count,
            launcher_pid=os.getpid(),
            host=socket.gethostname(),
        )
    )
    agent = RankAgent(spec, job, nursery, screen)
    try:
        _meeting(placement.hosts, agent.run)
    except JobStopped:
        return _interrupted(job, agent.outcome)
    except JobEnded as ended:
        exits, order = tuple(agent.outcome.exits), ended.order
        return JobResult(order.exit_code, "failed", exits, job.logs.path, order.reason)
    finally:
        agent.give_back_log_room()
        handler.shutdown()
    return _result(job, agent.outcome, agent.labels)


def _meeting(hosts: Hosts, act: Callable[[], T]) -> T:
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        return act()
    except RendezvousError as error:
        raise LaunchError(
            f"the hosts of the job did not meet at {hosts.endpoint}: {error}",
            remedy="start the same command on every host, and check that the endpoint can be reached from each",
        ) from error


def _result(job: Job, outcome: Outcome, labels: Mapping[int, str]) -> JobResult:
    """After the last rank: the failure that came first; else 75 if a rank saved and stopped, or 0."""
    exits, logs, failure = tuple(outcome.exits), job.logs, outcome.failure
    if failure is not None:
        said = describe(failure.exit, failure.error, labels[failure.exit.rank])
        message = f"{said}; its log: {logs.rank(failure.exit.rank)}"
        return JobResult(
            failure.exit.exit_code, "failed", exits, logs.path, message, first_failure=failure.exit, error=failure.error
        )
    if any(exit.code == EXIT_STOPPED_AND_SAVED for exit in exits):
        message = "the ranks saved their state and stopped"
        return JobResult(EXIT_STOPPED_AND_SAVED, "interrupted", exits, logs.path, message)
    return JobResult(0, "completed", exits, logs.path)


def _interrupted(job: Job, outcome: Outcome) -> JobResult:
    """After a request to stop: what the ranks made of it if all of them ended well, else what a shell expects."""
    exits = tuple(outcome.exits)
    if exits and all(exit.code in CLEAN_CODES for exit in exits):
        return _result(job, outcome, {})
    number = job.stop.number or signal.SIGTERM
    message = f"stopped by {signal.Signals(number).name} without a save"
    return JobResult(128 + number, "interrupted", exits, job.logs.path, message)
