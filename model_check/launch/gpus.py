"""Which GPUs a job may see, and which of them it takes. Asks the driver only: the launcher never starts CUDA."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from model_check.errors import UsageError
from model_check.record.nvml import Gpu, GpuProcess, read_gpus

__all__ = ["Gpu", "GpuProcess", "choose_gpus", "list_gpus", "parse_gpu_ids", "visible_gpus"]

# CUDA reads these as "no device": the empty string, a negative index, and Slurm's word for no GPUs.
_NO_DEVICES = re.compile(r"\s*|-\d+.*|NoDevFiles")


def list_gpus(environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs this process may use, in the order CUDA_VISIBLE_DEVICES gives them; [] where there is none."""
    environment = os.environ if environ is None else environ
    return visible_gpus(read_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """What CUDA_VISIBLE_DEVICES=`setting` leaves of the machine's GPUs; None means that it is not set."""
    if setting is None or not gpus:
        return list(gpus)
    if _NO_DEVICES.fullmatch(setting):
        return []
    chosen: list[Gpu] = []
    for entry in setting.split(","):
        if _NO_DEVICES.fullmatch(entry):
            break  # CUDA ignores everything after such an entry
        gpu = _find(gpus, entry.strip())
        if gpu in chosen:
            raise UsageError(f"CUDA_VISIBLE_DEVICES={setting} names {entry.strip()} twice", remedy="name each GPU once")
        chosen.append(gpu)
    return chosen


def _find(gpus: Sequence[Gpu], entry: str) -> Gpu:
    if entry.isdecimal():
        matches = [gpu for gpu in gpus if gpu.index == int(entry)][:1]
    else:
        # CUDA takes any unique beginning of a UUID; older drivers write MIG-GPU-<uuid>/<gi>/<ci>.
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(matches) != 1:
        what = "no GPU" if not matches else f"{len(matches)} GPUs"
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES names {entry}, which is {what} of this machine",
            remedy=f"use {_names(gpus)}, or unset it",
        )
    return matches[0]


def choose_gpus(spec: str | None, nproc: int | None, gpus: Sequence[Gpu]) -> list[Gpu]:
    """One GPU per rank. `spec`: all (default), auto (the least used), or ids such as 3, 0,3 or 0-3.

    An empty list means CPU ranks: there is no GPU and none was named.
    """
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc} starts no rank", remedy="use --nproc 1 or more")
    wish = (spec or "all").strip().lower()
    if not gpus:
        if wish in ("all", "auto"):
            return []
        raise UsageError(f"--gpus {spec} asks for GPUs and this machine shows none", remedy="leave out --gpus")
    if wish == "auto":
        chosen = sorted(gpus, key=_how_busy)[: nproc or 1]
    elif wish == "all":
        chosen = list(gpus[:nproc])
    else:
        chosen = _by_ids(parse_gpu_ids(wish), gpus)
    if nproc is not None and len(chosen) != nproc:
        raise UsageError(
            f"--nproc {nproc} does not fit {len(chosen)} GPUs ({_names(chosen)})",
            remedy=f"use --nproc {len(chosen)}: one rank per GPU",
        )
    return chosen


def parse_gpu_ids(spec: str) -> list[int]:
    """`3`, `0,3`, `0-3` and mixtures, in the order written."""
    ids: list[int] = []
    for part in spec.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,4})\s*(?:-\s*([0-9]{1,4})\s*)?", part)
        if match is None:
            raise UsageError(f"--gpus {spec} cannot be read at '{part.strip()}'", remedy="use all, auto, 3, 0,3 or 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"--gpus {spec} counts down in {first}-{last}", remedy=f"write {last}-{first}")
        ids += range(first, last + 1)
    twice = [gpu_id for gpu_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise UsageError(f"--gpus {spec} names GPU {twice[0]} twice", remedy="name each GPU once")
    return ids


def _by_ids(ids: Sequence[int], gpus: Sequence[Gpu]) -> list[Gpu]:
    by_index: dict[int, list[Gpu]] = {}
    for gpu in gpus:
        by_index.setdefault(gpu.index, []).append(gpu)
    missing = [i for i in ids if i not in by_index]
    if missing:
        raise UsageError(
            f"--gpus names {', '.join(map(str, missing))}, which this machine does not have",
            remedy=f"use {_names(gpus)}",
        )
    return [gpu for i in ids for gpu in by_index[i]]


def _how_busy(gpu: Gpu) -> tuple[int, int, int]:
    """Sorts the least used first, then the one with the most free memory, then by number."""
    return (gpu.utilization or 0, -gpu.memory_free, gpu.index)


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(str(i) for i in sorted({gpu.index for gpu in gpus})) or "none"
