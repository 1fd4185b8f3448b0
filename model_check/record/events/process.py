"""Events about processes and the job: joining, groups, threads, starts, signals, stalls, the job's begin and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from model_check.record.events.base import Event
from model_check.record.process_sample import RankSample
from model_check.record.verdict import Outcome

StopReason = Literal["hang", "proven", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class JobStarted(Event, kind="job_started"):
    """A launcher has started a job in this run directory."""

    nproc: int | None = None  # ranks on this host; None: the command that was given starts them itself
    hosts: int | None = None
    host: str = ""  # where the launcher runs
    launcher_pid: int = 0
    command: tuple[str, ...] | None = None  # without secrets; only of a job with a launcher of its own
    command_pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobOver(Event, kind="job_ended"):
    """All ranks of the job are gone."""

    outcome: Outcome | None = None
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stopped(Event, kind="stopped"):
    """The job is being ended before its ranks have finished."""

    why: str = ""  # a sentence for people
    reason: StopReason | None = None  # None: written by a version that only gave the sentence

    @property
    def because(self) -> StopReason:
        """The reason; sentences of earlier versions begin with it, unless somebody asked for the end."""
        if self.reason is not None:
            return self.reason
        return "hang" if self.why.startswith("hang") else "proven" if self.why.startswith("proven") else "interrupted"


@dataclass(frozen=True, kw_only=True)
class GroupJoined(Event, kind="group"):
    """A process group that this rank takes part in."""

    name: str = ""  # as the ring's records name it
    ranks: tuple[int, ...] = ()
    torch_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Joining(Event, kind="joining"):
    """This rank is about to enter init_process_group."""

    world_size: int | None = None  # how many ranks it expects to meet; None: not known before


@dataclass(frozen=True, kw_only=True)
class Stalled(Event, kind="stall"):
    """Some ranks have made no progress for longer than the supervisor's threshold, and nobody works for them."""

    since_t: float = 0.0  # their last progress, CLOCK_MONOTONIC seconds
    threshold_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StallWithdrawn(Event, kind="stall_withdrawn"):
    """The ranks of the last stall make progress again."""

    after_s: float = 0.0  # length of the stall


@dataclass(frozen=True, kw_only=True)
class FlightRefused(Event, kind="flight_refused"):
    """A rank did not hand out its flight recorder."""

    rank: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class PortHeld(Event, kind="port"):
    """A rank found its port taken; who listened on it a moment later."""

    port: int = 0
    holder_pid: int | None = None  # 0: a process of another user; None: nobody any more
    holder_cmd: str = ""


@dataclass(frozen=True, kw_only=True)
class Attached(Event, kind="attached"):
    """`model-check attach` began to look at a job that was started without us."""

    nproc: int = 0  # its ranks on this host


@dataclass(frozen=True, kw_only=True)
class Picture(Event, kind="picture"):
    """What `attach` printed about the job."""

    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Threads(Event, kind="threads"):
    """How many threads torch computes with in this rank."""

    compute: int = 0


@dataclass(frozen=True, kw_only=True)
class LoaderWorker(Event, kind="loader_worker"):
    """A data loader of this rank started a worker process."""

    worker_pid: int = 0
    worker_id: int = 0  # its place in the loader: 0 begins a new set of workers


@dataclass(frozen=True, kw_only=True)
class Versions(Event, kind="versions"):
    """What this rank runs, told when it has joined its peers."""

    torch: str = ""
    python: str = ""
    cuda: str | None = None
    script: str = ""
    script_sha256: str | None = None  # None: the script cannot be read
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StartMark(Event, kind="checkpoint_mark"):
    """A rank of our trainer has passed one of the checkpoints of its start (record/start_marks.py)."""

    number: int = 0
    name: str = ""
    off: str | None = None  # why the component that the checkpoint is named after is switched off


@dataclass(frozen=True, kw_only=True)
class Samples(Event, kind="sample"):
    """One look of the launcher at every rank through /proc."""

    machine_cpu_s: float | None = None  # what all processors together have worked since the machine started
    ranks: Mapping[int, RankSample] = field(default_factory=dict)
