"""The torchelastic agent: rendezvous, rank numbers and restarts are torch's; processes and exits are ours.

torch's own agent runs a function entry point through torch.multiprocessing, which names the wrong rank as the cause of
a failure and leaves ranks behind when it is killed. This one starts ranks through the nursery instead.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from model_check.launch.console import Console
from model_check.launch.group import RankGroup
from model_check.launch.log_files import LogRoom
from model_check.launch.nursery import Nursery, StartRank
from model_check.record.events.job import EndedByHook, Restart, StopRequested
from model_check.record.rank_exits import FailedRank, first_failure, read_error, weigh
from model_check.supervise.hooks import JobEnded, JobStopped, JobView, Outcome

if TYPE_CHECKING:
    from model_check.launch.job import Job

POLL_S = 0.1
# A victim can be seen before the rank that caused it, whose exit may take a moment longer.
_CULPRIT_PATIENCE_S = 0.5


class RankAgent(SimpleElasticAgent):
    """Runs one host's ranks, with the context and environment that the job's placement adds to torch's variables."""

    def __init__(self, spec: WorkerSpec, job: Job, nursery: Nursery, console: Console) -> None:
        super().__init__(spec)
        self._nursery = nursery
        self._console = console
        self._placement = job.placement
        self._journal = job.journal
        self._logs = job.logs
        self._stop = job.stop
        self._graces = job.graces
        self._hooks = job.hooks
        self._ranks: RankGroup | None = None
        self._started_at = 0.0
        self._log_room = LogRoom()
        self._logs_are_full = False
        self.labels: dict[int, str] = {}
        self.outcome = Outcome()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._stop.disarm()
        super()._rendezvous(worker_group)
        self._stop.arm()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        attempt = spec.max_restarts - self._remaining_restarts
        if attempt:
            self._journal.write(Restart(attempt=attempt, max_restarts=spec.max_restarts))
            self._console.say(f"restarting all ranks, attempt {attempt} of {spec.max_restarts}")
        requests: list[StartRank] = []
        for worker in worker_group.workers:
            context, env = self._placement.describe(worker, worker_group, attempt)
            self.labels[context.rank] = context.label
            log = self._logs.rank(context.rank)
            self._console.follow(context.label, log)
            error_file = self._logs.error_file(context.rank, attempt)
            env = {
                **_torch_variables(worker, worker_group, attempt),
                "TORCHELASTIC_ERROR_FILE": str(error_file),
                **env,
            }
            requests.append(StartRank(context, env, log))
        self._started_at = time.monotonic()
        self._ranks = RankGroup(self._nursery, self._journal, requests, self._hooks.on_exit)
        self._ranks.start()
        if self._hooks.on_start is not None:
            self._hooks.on_start(self._view(self._ranks))
        return {worker.local_rank: self._ranks.pids[worker.global_rank] for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = self._ranks
        assert ranks is not None, "torchelastic monitors workers only after it has started them"
        ranks.wait(POLL_S)
        self._make_room_for_logs()
        self.outcome = Outcome(exits=ranks.exits)
        while self._stop.messages:
            ranks.pass_on(self._stop.messages.popleft())
        if self._stop.number is not None:
            self._end_on_request(ranks)
        if any(exit.failed for exit in ranks.exits):
            return self._end_on_failure(ranks)
        if not ranks.running:
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks.pids))
        order = self._hooks.on_poll(self._view(ranks)) if self._hooks.on_poll is not None else None
        if order is not None:
            self._journal.write(EndedByHook(reason=order.reason))
            self._end_after_failure(ranks)
            raise JobEnded(order)
        return RunResult(WorkerState.HEALTHY)

    def _end_on_request(self, ranks: RankGroup) -> None:
        name = signal.Signals(self._stop.number or signal.SIGTERM).name
        self._journal.write(StopRequested(signal=name))
        again = {"SIGINT": "; Ctrl-C again ends them now", "SIGTERM": "; SIGTERM again ends them now"}.get(name, "")
        self._console.say(f"{name}: the ranks have {self._graces.stop_s:g} s to save and stop{again}")
        ranks.end(self._graces.stop_s, self._stop.for_ranks, hurry=self._asked_again, lost_s=self._graces.lost_s)
        raise JobStopped

    def _make_room_for_logs(self) -> None:
        full = self._log_room.look(map(self._logs.rank, self.labels))
        if full is not None and not self._logs_are_full:
            self._logs_are_full = True
            said = f"the disk of the logs in {self._logs.path} is full ({full.strerror}): parts of them are dropped"
            self._console.say(said)
            if self._hooks.on_trouble is not None:
                self._hooks.on_trouble(said)

    def give_back_log_room(self) -> None:
        self._log_room.close()

    def _asked_again(self) -> bool:
        """Polled while the ranks have their grace, until it is true: that is the moment to say so."""
        if self._stop.again is None:
            return False
        name = signal.Signals(self._stop.again).name
        self._console.say(f"{name} again: the ranks are ended now, saved or not")
        return True

    def _end_on_failure(self, ranks: RankGroup) -> RunResult:
        deadline = time.monotonic() + _CULPRIT_PATIENCE_S
        while ranks.running and all(f.victim for f in self._failed(ranks)) and time.monotonic() < deadline:
            ranks.wait(deadline - time.monotonic())
        self._end_after_failure(ranks)
        failure = first_failure(self._failed(ranks))
        assert failure is not None, f"no failed rank among {ranks.exits}"
        self.outcome = Outcome(exits=ranks.exits, failure=failure)
        return RunResult(WorkerState.FAILED)  # whom to blame is in our own outcome

    def _end_after_failure(self, ranks: RankGroup) -> None:
        ranks.end(
            self._graces.failure_s,
            busy_s=self._graces.busy_s,
            interrupted=lambda: self._stop.number is not None,
        )

    def _failed(self, ranks: RankGroup) -> list[FailedRank]:
        return [
            weigh(
                exit,
                read_error(self._placement.run_dir, exit, self._logs.error_file(exit.rank, exit.attempt)),
                self._logs.rank(exit.rank),
            )
            for exit in ranks.exits
            if exit.failed
        ]

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self._shutdown()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 30, is_restart: bool = False
    ) -> None:
        if self._ranks is not None and self._ranks.running:
            self._ranks.end(self._graces.failure_s)

    def _view(self, ranks: RankGroup) -> JobView:
        return JobView(
            run_dir=self._placement.run_dir,
            attempt=ranks.attempt,
            pids=dict(ranks.pids),
            running=tuple(ranks.running),
            started_at=self._started_at,
            journal=self._journal,
        )


def _torch_variables(worker: Worker, group: WorkerGroup, attempt: int) -> dict[str, str]:
    """The environment that torchrun gives its workers, which scripts and libraries rely on."""
    spec = group.spec
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_RANK": str(group.group_rank),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
