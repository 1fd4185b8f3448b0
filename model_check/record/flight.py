"""What a rank's c10d flight recorder holds: `flight/rank-00001.2.json`, as torch writes it, for gloo and NCCL alike.

On gloo `state` stays "scheduled" for ever and point-to-point calls are absent: what is not retired is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from model_check.record.files import read_json
from model_check.record.stacks import Frame
from model_check.record.typed import from_json

_OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_allgather_base": "all_gather",
    "_all_gather_base": "all_gather",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
}


@dataclass(frozen=True)
class FlightFrame:
    """One frame of the stack that started a collective."""

    filename: str = ""
    line: int = 0
    name: str = ""


@dataclass(frozen=True)
class FlightEntry:
    """One collective."""

    process_group: tuple[str, ...] = ()  # its number and its description
    collective_seq_id: int = 0
    profiling_name: str = ""  # "gloo:all_reduce"
    input_dtypes: tuple[str, ...] = ()
    input_sizes: tuple[tuple[int, ...], ...] = ()
    state: str = ""
    retired: bool = True
    is_p2p: bool = False
    frames: tuple[FlightFrame, ...] = ()  # innermost first

    @property
    def group(self) -> str:
        return self.process_group[0] if self.process_group else ""

    @property
    def op(self) -> str:
        return op_name(self.profiling_name)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(name.removeprefix("torch.").lower() for name in self.input_dtypes)

    @property
    def in_flight(self) -> bool:
        return not self.retired and self.state != "completed"

    @property
    def user_frame(self) -> Frame | None:
        """The script's line that started it."""
        frames = (Frame(frame.filename, frame.line, frame.name) for frame in self.frames)
        return next((frame for frame in frames if frame.is_user_code), None)


@dataclass(frozen=True)
class _Dump:
    entries: list[FlightEntry] = field(default_factory=list)


def op_name(profiling_name: str) -> str:
    """ "nccl:_all_gather_base" and "gloo:all_gather" are both an all_gather."""
    name = profiling_name.rpartition(":")[2].strip().lower()
    return _OPS.get(name, name or "other")


def read_flight(path: Path) -> tuple[FlightEntry, ...]:
    """The collectives of a dump, oldest first; nothing where the file is not a dump."""
    found = [e for e in from_json(_Dump, read_json(path)).entries if not e.is_p2p and e.collective_seq_id > 0]
    return tuple(sorted(found, key=lambda e: (e.group, e.collective_seq_id)))
