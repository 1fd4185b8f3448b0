"""Finds the ranks of jobs that were started without us, by what their launchers put into their environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from model_check.errors import UsageError
from model_check.supervise import processes
from model_check.supervise.stacks import py_spy_dump

# (rank, world size) as the launchers spell them, and what else tells two jobs on one host apart.
_SPELLINGS = (
    ("RANK", "WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")),
    ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("PMI_RANK", "PMI_SIZE", ("PMI_JOBID", "HYDRA_LAUNCHER_JOBID")),
)
_RING = re.compile(r"(/.*)/blackbox/rank-\d+\.ring")
_RANK_LOCAL = re.compile(r"^(global_)?rank$")


@dataclass(frozen=True)
class FoundRank:
    """A process that is a rank; `rank` is None where nothing says which one."""

    pid: int
    rank: int | None
    command: tuple[str, ...]
    run_dir: str | None = None  # set where the rank has a black box


@dataclass(frozen=True)
class FoundJob:
    """The ranks of one job on this host, in order. `world_size` counts those on other hosts too."""

    name: str
    world_size: int | None
    ranks: tuple[FoundRank, ...]


def _identity(environ: Mapping[str, str]) -> tuple[int, int, tuple[str, ...]] | None:
    for rank, size, names in _SPELLINGS:
        if environ.get(rank, "").isdigit() and environ.get(size, "").isdigit():
            job = tuple(f"{name}={environ[name]}" for name in names if environ.get(name))
            return int(environ[rank]), int(environ[size]), job
    return None


def find_jobs(pids: Iterable[int] | None = None) -> list[FoundJob]:
    """Every job whose ranks are known by their environment, among the given processes or all of this host.

    Loader workers and other children inherit a rank's environment: the rank is the one whose parent is not in it.
    """
    identities: dict[int, tuple[int, int, tuple[str, ...]]] = {}
    for pid in psutil.pids() if pids is None else pids:
        identity = _identity(processes.environment_of(pid))
        if identity is not None and processes.is_alive(pid):
            identities[pid] = identity
    jobs: dict[tuple[int, tuple[str, ...]], list[FoundRank]] = {}
    for pid, (rank, size, job) in identities.items():
        stat = processes.read_stat(pid)
        if stat is None or identities.get(stat.ppid) == (rank, size, job):
            continue
        jobs.setdefault((size, job), []).append(_found(pid, rank))
    return [
        FoundJob(_name(job), size, tuple(sorted(ranks, key=lambda r: (r.rank or 0, r.pid))))
        for (size, job), ranks in sorted(jobs.items(), key=lambda item: item[1][0].pid)
    ]


def _found(pid: int, rank: int | None) -> FoundRank:
    return FoundRank(pid, rank, tuple(processes.command_of(pid)), _recorded_in(pid))


def _recorded_in(pid: int) -> str | None:
    """The run directory of a rank that records itself, from the ring file that is mapped into its memory."""
    rings = (_RING.fullmatch(path) for path in processes.mapped_files(pid))
    return next((found[1] for found in rings if found), None)


def _name(job: Sequence[str]) -> str:
    values = dict(part.partition("=")[::2] for part in job)
    if "MASTER_PORT" in values:
        return f"{values.get('MASTER_ADDR', 'localhost')}:{values['MASTER_PORT']}"
    return ", ".join(job) or "a job without a name"


def jobs_of(pids: Sequence[int]) -> list[FoundJob]:
    """The jobs that the given processes belong to: as ranks, or as the parents of ranks."""
    for pid in pids:
        if not processes.is_alive(pid):
            raise UsageError(f"there is no process {pid}", remedy="give the pid of the launcher or of the ranks")
    family = {member for pid in pids for member in [pid, *processes.descendants_of(pid)]}
    found = find_jobs(family)
    if found:
        return found
    return [_job_without_environment(pids)]


def _job_without_environment(pids: Sequence[int]) -> FoundJob:
    """mp.spawn and its like tell a rank its number in an argument: it is a local variable of its frames."""
    candidates = list(pids)
    if len(pids) == 1:
        children = [child for child in processes.children_of(pids[0]) if _runs_python(child)]
        candidates = children or candidates
    ranks = [_found(pid, _rank_in_locals(pid)) for pid in candidates]
    if len({rank.rank for rank in ranks}) < len(ranks):
        ranks = [FoundRank(rank.pid, None, rank.command, rank.run_dir) for rank in ranks]
    known = [rank for rank in ranks if rank.rank is not None]
    ordered = tuple(sorted(known or ranks, key=lambda r: (r.rank if r.rank is not None else -1, r.pid)))
    return FoundJob(f"processes below {pids[0]}" if len(pids) == 1 else "the given processes", None, ordered)


def _runs_python(pid: int) -> bool:
    command = processes.command_of(pid)
    is_python = bool(command) and "python" in command[0].rpartition("/")[2]
    return is_python and not any("resource_tracker" in word or "forkserver" in word for word in command)


def _rank_in_locals(pid: int) -> int | None:
    """The outermost local variable named rank. No other variable is looked at: they may hold secrets."""
    threads, _ = py_spy_dump(pid, "--locals")
    for thread in threads:
        if thread.get("os_thread_id") != pid:
            continue
        for frame in reversed(thread.get("frames", [])):
            for variable in frame.get("locals") or []:
                if _RANK_LOCAL.match(str(variable.get("name", ""))):
                    return _small_number(variable.get("repr"))
    return None


def _small_number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isdigit() and len(text) < 7 else None
