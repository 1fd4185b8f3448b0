"""Joins the supervisor to the agent: the agent's hooks feed it, its decision ends the job."""

from __future__ import annotations

from model_check.launch.agent import EndJob, Hooks, JobView
from model_check.launch.supervisor import Supervisor


def watched_by(supervisor: Supervisor) -> Hooks:
    """Hooks for `launch_job` that put every rank under the supervisor's eyes."""

    def on_start(view: JobView) -> None:
        for rank, pid in view.pids.items():
            supervisor.rank_started(rank, pid, view.started_at)

    def on_poll(view: JobView) -> EndJob | None:
        ending = supervisor.poll()
        return EndJob(ending.reason, ending.exit_code) if ending is not None else None

    return Hooks(on_start=on_start, on_poll=on_poll, on_exit=supervisor.rank_exited)
