"""What a rank has assembled, and what of it a checkpoint holds: `Session.state` is exactly what resume restores."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from model_check.blackbox.box import BOX
from model_check.blackbox.spans import span
from model_check.checkpoint.verify import Checkpoint
from model_check.config import Config, to_jsonable
from model_check.data import Cursor, PackedCache
from model_check.engine import resume
from model_check.engine.place import Place
from model_check.engine.step import TrainStep
from model_check.models import Llama
from model_check.plan.layout import Layout


class Batches(Protocol):
    """What the loop needs of a loader: micro-batches, a cursor, and in which order of which data it points."""

    @property
    def cursor(self) -> Cursor: ...

    @property
    def identity(self) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[Any]: ...

    def seek(self, cursor: Cursor) -> None: ...

    def close(self) -> None: ...


@dataclass
class Session:
    """Everything a rank has assembled. `state` below is exactly what resume restores."""

    config: Config
    place: Place
    layout: Layout
    bare_model: nn.Module
    train_step: TrainStep
    loader: Batches
    held_out: PackedCache | None
    first_step: int = 0
    tokens_before: int = 0
    continued: Path | None = None  # the checkpoint it goes on from

    @property
    def experiment(self) -> str:
        """Identifies what is trained and how. Runs that differ only in their number of steps have the same value."""
        values = to_jsonable(self.config)["values"]
        training = {key: value for key, value in values["training"].items() if key != "max_steps"}
        what = [training, values["model"], values["data"], self.config.system.seed]
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """Every tensor that a checkpoint holds, by name."""
        return {
            **resume.model_tensors(self.bare_model),
            **resume.optimizer_tensors(self.bare_model, self.train_step.optimizer),
            **resume.random_tensors(self.place.rank, self.place.device),
        }

    def extra(self, step: int, tokens: int, val_loss: float | None = None) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        cursor = self.loader.cursor
        shape = asdict(self.bare_model.shape) if isinstance(self.bare_model, Llama) else None
        return {
            "step": step,
            "tokens": tokens,
            "cursor": {"epoch": cursor.epoch, "position": cursor.position},
            "data": self.loader.identity,
            "loss_scale": self.train_step.loss_scale.state_dict(),
            "val_loss": val_loss,
            "experiment": self.experiment,
            "strategy": self.config.parallel.strategy,
            "shape": shape,
        }

    def restore(self, checkpoint: Checkpoint) -> list[str]:
        """Puts back what `state` and `extra` saved; returns what to tell the user."""
        from model_check.checkpoint.shards import load_into

        manifest, optimizer = checkpoint.manifest, self.train_step.optimizer
        whole = any(name.startswith("optimizer.") for name in manifest.tensors)
        progress = resume.progress_of(manifest) if whole else None
        with span("load", str(checkpoint.path)):
            state = resume.model_tensors(self.bare_model)
            if whole:
                resume.materialize_optimizer(optimizer)
                moments = resume.optimizer_tensors(self.bare_model, optimizer)
                resume.check_moments(manifest, moments)
                state.update(moments)
            load_into(checkpoint.path, manifest, {k: v for k, v in state.items() if k in manifest.tensors})
            if whole:
                resume.carry_masters(checkpoint.path, manifest, self.bare_model, optimizer)
        if progress is None:
            return ["it holds weights only: optimizer, data and step count start fresh"]
        self.continued = checkpoint.path
        self.first_step, self.tokens_before = progress.step + 1, progress.tokens
        BOX.continue_at(self.first_step)
        self.train_step.loss_scale.load_state_dict(progress.loss_scale)
        notes = resume.data_changes(progress.data, self.loader.identity)
        self.loader.seek(Cursor() if notes else progress.cursor)
        if manifest.world_size != self.place.world_size:
            seed_everything(self.config.system.seed + self.first_step, self.place.rank)
            return [*notes, resume.other_ranks_note(manifest.world_size, self.place.world_size)]
        resume.restore_random(checkpoint.path, manifest, self.place.rank, self.place.device)
        return notes


def seed_everything(seed: int, rank: int) -> None:
    """Weights and sample order have generators of their own; this is for everything else."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)
