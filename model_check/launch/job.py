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

from model_check.errors import LaunchError, UsageError
from model_check.launch.console import Console, ConsoleOptions
from model_check.launch.gate import plan_compilations, plan_gate
from model_check.launch.gpus import Gpu
from model_check.launch.injection import forget_outer_job
from model_check.launch.limits import ResidentWatch, check_address_space
from model_check.launch.logfiles import LogDir
from model_check.launch.nursery import Nursery
from model_check.launch.oldlogs import remove_old_logs
from model_check.launch.placement import Hosts, Placement
from model_check.launch.programs import ColdFunction, Command, Entry, Program, WarmFunction
from model_check.launch.signals import StopBeforeStart, StopRequest
from model_check.launch.warmstart import DEFAULT_PRELOAD, preload, why_not_warm
from model_check.record import RunDir
from model_check.record.events import job as events
from model_check.record.events.crashes import UncaughtException
from model_check.record.events.job import EXIT_STOPPED_AND_SAVED, RankExit
from model_check.record.events.process import JobOver, JobStarted
from model_check.record.journal import Journal
from model_check.record.rank_exits import describe
from model_check.supervise.hooks import EndJob, Graces, Hooks, JobEnded, JobStopped, Outcome

T = TypeVar("T")


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `exits` are those of the last attempt, in the order in which they came."""

    exit_code: int
    outcome: Literal["completed", "failed", "interrupted"]
    exits: tuple[RankExit, ...]
    first_failure: RankExit | None
    error: UncaughtException | None
    message: str
    log_dir: Path


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
        result = _run(
            lambda: _open_nursery(entry, payload, start, preload_modules, needs_cuda, address_space_gb),
            placement,
            journal,
            logs,
            console or ConsoleOptions(),
            max_restarts,
            graces or Graces(),
            hooks,
            gate.lines if gate is not None else None,
            StopRequest(as_received=isinstance(entry, Command)),
        )
        journal.write(JobOver(outcome=result.outcome, exit_code=result.exit_code))
    return result


def _run(
    open_nursery: Callable[[], tuple[Nursery, str | None]],
    placement: Placement,
    journal: Journal,
    logs: LogDir,
    options: ConsoleOptions,
    max_restarts: int,
    graces: Graces,
    hooks: Hooks,
    gate_lines: Path | None,
    stop: StopRequest,
) -> JobResult:
    """Opens what a job needs in the order in which it must be closed again: signals, nursery, console."""
    with stop:
        try:
            nursery, cold_because = open_nursery()
            with closing(nursery), closing(Console(placement.run_dir.metrics, options)) as screen:
                if gate_lines is not None:
                    screen.follow("gate", gate_lines)
                if cold_because:
                    journal.write(events.ColdStart(reason=cold_because))
                    screen.say(f"cold start: {cold_because}")
                result = _supervise(placement, nursery, journal, logs, stop, screen, max_restarts, graces, hooks)
                if result.message:
                    screen.say(result.message)
                return result
        except StopBeforeStart:
            return _interrupted(Outcome(), stop, logs)


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
    if isinstance(entry, Command):
        return Nursery(entry, address_space_gb=address_space_gb), None
    if start != "warm":
        return Nursery(ColdFunction.pickle(entry, payload), address_space_gb=address_space_gb), None
    preload(modules)
    because = why_not_warm()
    if because is None:
        if address_space_gb is not None:
            check_address_space(address_space_gb, forked=True)
        program: Program = WarmFunction(entry, payload)
        nursery = Nursery(program, address_space_gb=address_space_gb)
        if not (needs_cuda and nursery.cuda_spoiled):
            return nursery, None
        nursery.close()
        because = "CUDA was already asked for devices in the launcher"
    return Nursery(ColdFunction.pickle(entry, payload), address_space_gb=address_space_gb), because


def _supervise(
    placement: Placement,
    nursery: Nursery,
    journal: Journal,
    logs: LogDir,
    stop: StopRequest,
    screen: Console,
    max_restarts: int,
    graces: Graces,
    hooks: Hooks,
) -> JobResult:
    # Torch is first imported in the preload, or here where ranks start cold: never with this module.
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from model_check.launch.agent import RankAgent
    from model_check.launch.rendezvous import open_rendezvous

    handler = _meeting(placement.hosts, lambda: open_rendezvous(placement.hosts, screen.say))
    spec = WorkerSpec(
        role="rank",
        local_world_size=placement.nproc,
        rdzv_handler=handler,
        max_restarts=max_restarts,
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
    agent = RankAgent(
        spec,
        nursery=nursery,
        journal=journal,
        logs=logs,
        run_dir=placement.run_dir,
        describe_rank=placement.describe,
        stop=stop,
        graces=graces,
        hooks=hooks,
        console=screen,
    )
    try:
        _meeting(placement.hosts, agent.run)
    except JobStopped:
        return _interrupted(agent.outcome, stop, logs)
    except JobEnded as ended:
        return _ended(agent.outcome, ended.order, logs)
    finally:
        agent.give_back_log_room()
        handler.shutdown()
    return _result(agent.outcome, agent.labels, logs)


def _meeting(hosts: Hosts, act: Callable[[], T]) -> T:
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        return act()
    except RendezvousError as error:
        raise LaunchError(
            f"the hosts of the job did not meet at {hosts.endpoint}: {error}",
            remedy="start the same command on every host, and check that the endpoint can be reached from each",
        ) from error


def _result(outcome: Outcome, labels: Mapping[int, str], logs: LogDir) -> JobResult:
    exits = tuple(outcome.exits)
    failure = outcome.failure
    if failure is not None:
        label = labels[failure.exit.rank]
        return JobResult(
            exit_code=failure.exit.exit_code,
            outcome="failed",
            exits=exits,
            first_failure=failure.exit,
            error=failure.error,
            message=f"{describe(failure.exit, failure.error, label)}; its log: {logs.rank(failure.exit.rank)}",
            log_dir=logs.path,
        )
    if any(exit.code == EXIT_STOPPED_AND_SAVED for exit in exits):
        return _stopped(EXIT_STOPPED_AND_SAVED, exits, "the ranks saved their state and stopped", logs)
    return JobResult(0, "completed", exits, None, None, "", logs.path)


def _interrupted(outcome: Outcome, stop: StopRequest, logs: LogDir) -> JobResult:
    """After a request to stop: 75 if the ranks saved, 0 if they happened to finish, else what a shell expects."""
    exits = tuple(outcome.exits)
    codes = {exit.code for exit in exits}
    if exits and codes == {0}:
        return JobResult(0, "completed", exits, None, None, "", logs.path)
    if exits and codes <= {0, EXIT_STOPPED_AND_SAVED}:
        return _stopped(EXIT_STOPPED_AND_SAVED, exits, "the ranks saved their state and stopped", logs)
    number = stop.number or signal.SIGTERM
    return _stopped(128 + number, exits, f"stopped by {signal.Signals(number).name} without a save", logs)


def _stopped(exit_code: int, exits: tuple[RankExit, ...], message: str, logs: LogDir) -> JobResult:
    return JobResult(exit_code, "interrupted", exits, None, None, message, logs.path)


def _ended(outcome: Outcome, order: EndJob, logs: LogDir) -> JobResult:
    return JobResult(order.exit_code, "failed", tuple(outcome.exits), None, None, order.reason, logs.path)
