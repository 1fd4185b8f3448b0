"""The c10d flight recorder's dumps, in one form for gloo and NCCL.

On gloo `state` stays "scheduled" for ever and point-to-point calls are absent: what is not retired is in flight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_check.diagnose.evidence import FlightEntry
from model_check.record import read_json
from model_check.record.stacks import Frame
from model_check.record.values import whole

_OPS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_allgather_base": "all_gather",
    "_all_gather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}


def op_name(profiling_name: str) -> str:
    """ "nccl:_all_gather_base" and "gloo:all_gather" are both an all_gather."""
    name = profiling_name.rpartition(":")[2].strip().lower()
    return _OPS.get(name, name or "other")


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        return ()
    return tuple(tuple(d for d in shape if isinstance(d, int)) for shape in value if isinstance(shape, list))


def _dtypes(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(str(v).removeprefix("torch.").lower() for v in values if v)


def _group(entry: dict[str, Any]) -> str:
    name = entry.get("process_group") or entry.get("pg_name") or ""
    if isinstance(name, list):
        return str(name[0]) if name else ""
    return str(name)


def _user_site(frames: Any) -> tuple[str, str]:
    for body in frames if isinstance(frames, list) else []:
        if isinstance(body, dict):
            frame = Frame(str(body.get("filename") or ""), whole(body.get("line")), str(body.get("name") or ""))
            if frame.is_user_code:
                return frame.site, frame.function
    return "", ""


def _entry(body: dict[str, Any]) -> FlightEntry:
    retired = body.get("retired")
    state = str(body.get("state") or "")
    site, function = _user_site(body.get("frames"))
    return FlightEntry(
        group=_group(body),
        seq=whole(body.get("collective_seq_id")) or whole(body.get("seq_id")),
        op=op_name(str(body.get("profiling_name") or "")),
        dtypes=_dtypes(body.get("input_dtypes")),
        shapes=_shapes(body.get("input_sizes")),
        in_flight=retired is False and state != "completed",
        site=site,
        function=function,
    )


def read_flight(path: Path) -> tuple[FlightEntry, ...]:
    """The collectives of a dump, oldest first; nothing where the file is not a dump."""
    body = read_json(path)
    if isinstance(body, dict) and isinstance(body.get("flight"), dict):
        body = body["flight"]
    entries = body.get("entries") if isinstance(body, dict) else None
    if not isinstance(entries, list):
        return ()
    found = [_entry(entry) for entry in entries if isinstance(entry, dict) and not entry.get("is_p2p")]
    return tuple(sorted((e for e in found if e.seq > 0), key=lambda e: (e.group, e.seq)))
