"""What a failing rank can still save by itself: weights only, in a local file, without collectives.

One file per job. The first failing rank creates `error_step.claim` and writes; the others find the claim and do not.
The first is the rank that caused the failure: its peers fail only once it is gone. If it was killed, a peer writes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model_check.checkpoint.layout import owner, owner_lives

_CLAIM = "error_step.claim"
_SCRATCH = "error_step_*.tmp"


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
    """Removes claims and half-written files of dead jobs. One rank of the job calls it before training.

    A fresh run has a directory of its own, so half-written files in the directories beside it are removed too. Files
    there may belong to a live job on another host, so only files of dead processes of this host are removed.
    """
    for path in [directory / _CLAIM, *directory.glob(_SCRATCH)]:
        with suppress(FileNotFoundError):
            if not owner_lives(path.read_text() if path.name == _CLAIM else _owner_of(path)):
                path.unlink()
    for path in directory.parent.glob(f"*/{_SCRATCH}"):
        if owner_lives(_owner_of(path)) is False:
            path.unlink(missing_ok=True)


def _owner_of(scratch: Path) -> str:
    return scratch.stem.rpartition("@")[2]


def _is_whole(tensor: Any) -> bool:
    """Whether this rank holds the whole tensor, not a shard of a DTensor."""
    placements = getattr(tensor, "placements", ())
    return not any(placement.is_shard() for placement in placements) or tensor.device_mesh.size() == 1
