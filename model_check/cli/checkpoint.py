"""`model-check checkpoint inspect|verify|convert`: look at saved state, prove it whole, change its form."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from model_check.cli.options import AsJson
from model_check.cli.unwinding import signals_unwind_us
from model_check.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from model_check.checkpoint.weight_files import Weights

FORMS = ("sharded", "safetensors", "hf", "pt")
_LIKE = "add --like with the built-in shape it was trained with, or a folder that has its config.json"
_FORM_OF_SUFFIX = {".safetensors": "safetensors"} | dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "pt")


def inspect(
    path: Annotated[Path, typer.Argument(help="A step_* folder, a Hugging Face folder, a .safetensors or .pt file.")],
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint holds: step, ranks, tensors with their shapes and number formats. Reads no values.

    Example: model-check checkpoint inspect .checkpoints/latest
    """
    from model_check.checkpoint.weight_files import open_weights

    weights = open_weights(_existing(path))
    tensors = {
        name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "bytes": t.bytes}
        for name, t in weights.tensors.items()
    }
    facts = {"path": str(path), "kind": weights.kind, "model_bytes": weights.bytes, **_saved_state(path, weights.kind)}
    if weights.removed_prefixes:
        facts["prefixes"] = list(weights.removed_prefixes)
    if as_json:
        typer.echo(json.dumps({**facts, "tensors": tensors}, indent=2))
        return
    for key, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        typer.echo(f"{key:<12} {shown}")
    for name, fact in tensors.items():
        typer.echo(f"{name:<48} {fact['dtype']:<9} {fact['shape']}")


def verify(
    path: Annotated[Path, typer.Argument(help="A step_* folder, or a folder of them: then every one is read.")],
    as_json: AsJson = False,
) -> int:
    """Read every byte of a checkpoint and compare it with what was saved. Exit code 1 where something differs.

    Example: model-check checkpoint verify .checkpoints
    """
    from model_check.checkpoint import layout
    from model_check.checkpoint.manifest import MANIFEST
    from model_check.checkpoint.verify import verify as read_all

    path = _existing(path)
    folders = [path]
    if path.is_dir() and not (path / MANIFEST).exists():
        below = layout.lineages(path)
        folders = [f for line in below for f in (*layout.committed(line), *layout.unfinished(line))]
        if layout.was_meant_as_one(path):
            folders.append(path)
    if not folders or path.is_file():
        raise UsageError(
            f"{path} is no checkpoint of ours and holds none, and only those have checksums to compare with",
            remedy="name a step_* folder or a folder of them; inspect and convert read other forms",
        )
    results: list[dict[str, Any]] = []
    for folder in folders:
        began = time.perf_counter()
        try:
            found = read_all(folder)
            took = time.perf_counter() - began
            results.append({"path": str(folder), "ok": True, "bytes": found.manifest.bytes, "seconds": took})
        except CheckpointError as error:
            results.append({"path": str(folder), "ok": False, "code": error.code, "message": error.message})
    if as_json:
        typer.echo(json.dumps({"checkpoints": results}, indent=2))
    else:
        for result in results:
            if result["ok"]:
                typer.echo(f"whole    {result['path']}  {result['bytes']:,} bytes in {result['seconds']:.2f} s")
            else:
                typer.echo(f"DAMAGED  {result['path']}  [{result['code']}] {result['message']}")
    return 0 if all(result["ok"] for result in results) else 1


def convert(
    source: Annotated[Path, typer.Argument(help="A step_* folder, a Hugging Face folder, a .safetensors or .pt file.")],
    target: Annotated[Path, typer.Argument(help="What to write; must not exist.")],
    to: Annotated[
        str | None, typer.Option(help="sharded, safetensors, hf or pt; default: by the name, hf without a suffix.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="For hf: a built-in shape or a folder with config.json, if the source has none.")
    ] = None,
) -> None:
    """Change the form of a model's weights, one tensor in memory at a time. Optimizer state stays behind.

    Example: model-check checkpoint convert .checkpoints/latest exported
    """
    from model_check.checkpoint import weight_writers
    from model_check.checkpoint.weight_files import open_weights

    form = to or _FORM_OF_SUFFIX.get(target.suffix, "hf")
    if form not in FORMS:
        raise UsageError(f"--to {form} is not a form we write", remedy=f"use one of {', '.join(FORMS)}")
    weights = open_weights(_existing(source))
    if weights.kind == "sharded":
        from model_check.checkpoint.verify import verify as read_all

        read_all(source)
    shape = _shape_of(weights.metadata, weights.kind, source, like)
    tensors = _renamed(weights.tensors, to_hugging_face=form == "hf")
    metadata = {**weights.metadata, "shape": shape}
    with signals_unwind_us():
        if form == "hf":
            weight_writers.write_hugging_face(target, tensors, _config(shape, weights))
        else:
            writers = {"safetensors": weight_writers.write_safetensors, "pt": weight_writers.write_pt}
            writers.get(form, weight_writers.write_sharded)(target, tensors, metadata)
    for prefix in weights.removed_prefixes:
        typer.echo(f"[MC605] names in {source} carried {prefix}; taken off")
    typer.echo(f"{target}: {len(tensors)} tensors, {weights.bytes:,} bytes")


def _existing(path: Path) -> Path:
    if not path.exists():
        raise UsageError(f"there is no {path}", remedy="name a step_* folder, a Hugging Face folder or a weights file")
    return path


def _saved_state(path: Path, kind: str) -> dict[str, Any]:
    """What only our own checkpoints know."""
    if kind != "sharded":
        return {}
    from model_check.checkpoint.manifest import Manifest

    manifest = Manifest.read(path)
    extra = manifest.extra
    facts: dict[str, Any] = {"step": manifest.step, "world_size": manifest.world_size, "total_bytes": manifest.bytes}
    return facts | {k: extra[k] for k in ("strategy", "tokens", "cursor", "val_loss") if extra.get(k) is not None}


def _renamed(tensors: dict[str, Any], *, to_hugging_face: bool) -> dict[str, Any]:
    """Our names for our forms, theirs for theirs; a name that belongs to neither stays as it is."""
    from model_check.models.weights import hugging_face_name, own_name

    rename = hugging_face_name if to_hugging_face else own_name
    named = {}
    for name, tensor in tensors.items():
        try:
            named[rename(name)] = tensor
        except KeyError:
            named[name] = tensor
    return named


def _shape_of(metadata: dict[str, Any], kind: str, source: Path, like: str | None) -> dict[str, Any] | None:
    """The model's shape: as the source says it, or as the model named by --like has it."""
    from dataclasses import asdict

    if like is not None:
        from model_check.config.resolve import base_shape

        shape = base_shape(like)
        return asdict(shape) if shape is not None else None
    if kind == "hf" and (source / "config.json").exists():
        from model_check.config.folder import read_folder_shape

        return asdict(read_folder_shape(source))
    found = metadata.get("shape")
    return found if isinstance(found, dict) else None


def _config(shape: dict[str, Any] | None, weights: Weights) -> dict[str, Any]:
    """What transformers needs to know of the model; raises where these are not its weights."""
    from model_check.config.shapes import ModelShape, RopeScaling
    from model_check.engine import resume
    from model_check.models import build_meta_model, config_from_shape

    if shape is None:
        raise UsageError(
            f"{weights.path} does not say the shape of its model, and config.json needs it",
            remedy=_LIKE,
        )
    try:
        scaling = shape.get("rope_scaling")
        known = ModelShape(**{**shape, "rope_scaling": RopeScaling(**scaling) if scaling else None})
        wanted = resume.model_shapes(build_meta_model(known))
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{weights.path} says a shape that is none ({error})", remedy=_LIKE, code="MC607"
        ) from error
    resume.fitting_tensors(weights, wanted, remedy=_LIKE)
    return config_from_shape(known, next(iter(weights.tensors.values())).dtype)
