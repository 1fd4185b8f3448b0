"""The tensors of a failed step, on disk: as the earlier guides load them, and in a form that executes nothing.

    <folder>/nan_grad_step_N.pt                 the weights, loadable with weights_only=True
    <folder>/debug/nan_debug_step_N.pkl         parameters and gradients as numpy arrays
    <folder>/debug/nan_debug_step_N.safetensors the same tensors, safe to open

The lowest rank that saw the failure writes these names; others add their rank. Each file is kept within a limit: what
is not finite goes in first, and what was left out is listed. Reports never open the pickle.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from model_check.numerics.finite import checkable, is_finite, local_part


@dataclass(frozen=True)
class Dumped:
    """The files that were written (None: too large, or not wanted) and the tensors that found no place."""

    checkpoint: Path | None
    pickle: Path | None
    safetensors: Path | None
    left_out: tuple[str, ...]

    @property
    def files(self) -> list[Path]:
        return [path for path in (self.checkpoint, self.pickle, self.safetensors) if path is not None]


@dataclass(frozen=True)
class _Piece:
    """One tensor of the dump, on the device still."""

    kind: str  # parameters or gradients
    name: str
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        return f"{self.kind}.{self.name}"

    @property
    def nbytes(self) -> int:
        # numpy has no bfloat16: it is written as float32.
        width = 4 if self.tensor.dtype == torch.bfloat16 else self.tensor.element_size()
        return self.tensor.numel() * width


def write_dump(
    folder: Path,
    step: int,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    facts: Mapping[str, Any],
    *,
    limit_bytes: int,
    rank_suffix: str = "",
) -> Dumped:
    """Writes what fits. A file that cannot be written is an OSError of the caller's to report."""
    if limit_bytes <= 0:
        return Dumped(None, None, None, ())
    parameters = [(name, parameter) for name, parameter in named_parameters]
    pieces = _pieces(parameters)
    chosen, left_out = _fitting(pieces, limit_bytes)
    debug = folder / "debug"
    debug.mkdir(parents=True, exist_ok=True)
    name = f"nan_debug_step_{step}{rank_suffix}"
    held = {piece.key: _on_host(piece.tensor) for piece in chosen}
    whole = {**facts, "step": step, "left_out": list(left_out), "shapes": {n: list(p.shape) for n, p in parameters}}
    weights = _write_weights(folder / f"nan_grad_step_{step}{rank_suffix}.pt", parameters, step, limit_bytes)
    return Dumped(
        weights,
        _write_pickle(debug / f"{name}.pkl", chosen, held, whole),
        _write_safetensors(debug / f"{name}.safetensors", held, whole),
        left_out,
    )


def _pieces(parameters: list[tuple[str, torch.Tensor]]) -> list[_Piece]:
    found = []
    for name, parameter in parameters:
        if parameter.grad is not None:
            found.append(_Piece("gradients", name, local_part(parameter.grad).detach()))
        found.append(_Piece("parameters", name, local_part(parameter).detach()))
    return found


def _fitting(pieces: list[_Piece], limit: int) -> tuple[list[_Piece], tuple[str, ...]]:
    """What is not finite first; within that the order of the model."""
    ordered = sorted(pieces, key=lambda p: not (checkable(p.tensor) and not is_finite(p.tensor)))
    chosen: set[str] = set()
    used = 0
    for piece in ordered:
        if used + piece.nbytes <= limit:
            used += piece.nbytes
            chosen.add(piece.key)
    return [p for p in pieces if p.key in chosen], tuple(p.key for p in pieces if p.key not in chosen)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wide.cpu().contiguous()


def _write_weights(target: Path, parameters: list[tuple[str, torch.Tensor]], step: int, limit: int) -> Path | None:
    if sum(local_part(p).nbytes for _, p in parameters) > limit:
        return None
    state = {name: local_part(parameter).detach().cpu() for name, parameter in parameters}
    scratch = target.with_suffix(".tmp")
    torch.save({"step": step, "model": state}, scratch)
    scratch.replace(target)
    return target


def _write_pickle(target: Path, pieces: list[_Piece], held: Mapping[str, torch.Tensor], facts: dict[str, Any]) -> Path:
    content: dict[str, Any] = {**facts, "parameters": {}, "gradients": {}}
    for piece in pieces:
        content[piece.kind][piece.name] = held[piece.key].numpy()
    scratch = target.with_suffix(".tmp")
    with scratch.open("wb") as file:
        pickle.dump(content, file, protocol=4)
    scratch.replace(target)
    return target


def _write_safetensors(target: Path, held: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Path:
    scratch = target.with_suffix(".safetensors.tmp")
    # The format refuses tensors that share memory, as gradients in one bucket do.
    own = {key: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for key, t in held.items()}
    save_file(own, str(scratch), metadata={key: json.dumps(value, default=str) for key, value in facts.items()})
    scratch.replace(target)
    return target
