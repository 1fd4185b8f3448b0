"""What a failing rank can still save by itself: weights only, in a local file, without collectives.

One file per job. The first failing rank creates `error_step.claim` and writes; the others find the claim and do not.
The first is the rank that caused the failure: its peers fail only once it is gone. If it was killed, a peer writes.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model_check.checkpoint.layout import owner, process_lives

_CLAIM = "error_step.claim"


def write_error_checkpoint(directory: Path, rank: int, step: int, model: nn.Module) -> Path | None:
    """Writes the parameters to a temporary file and renames it to `error_step_N_rank_R.pt`.

    None if another rank of the job writes it, or if this rank holds only a shard.
    """
    state = model.state_dict()
    if not all(_is_whole(tensor) for tensor in state.values()):
        return None
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with (directory / _CLAIM).open("x") as file:
            file.write(owner())
    except FileExistsError:
        return None
    target = directory / f"error_step_{step}_rank_{rank}.pt"
    scratch = directory / f"{target.stem}@{owner()}.tmp"
    try:
        held = {name: tensor.detach().cpu() for name, tensor in state.items()}
        torch.save({"step": step, "rank": rank, "model": held}, scratch)
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return target


def remove_leftovers(directory: Path) -> None:
    """Removes claims and half-written files of dead jobs. One rank of the job calls it before training."""
    for path in [directory / _CLAIM, *directory.glob("error_step_*.tmp")]:
        try:
            whose = path.read_text() if path.name == _CLAIM else path.stem.rpartition("@")[2]
            host, _, pid = whose.rpartition(".")
            if not (host == socket.gethostname() and process_lives(pid)):
                path.unlink()
        except FileNotFoundError:
            continue


def _is_whole(tensor: Any) -> bool:
    """Whether this rank holds the whole tensor, not a shard of a DTensor."""
    placements = getattr(tensor, "placements", ())
    return not any(placement.is_shard() for placement in placements) or tensor.device_mesh.size() == 1
