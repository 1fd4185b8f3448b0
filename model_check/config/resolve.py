"""From the model section to the shape that is built: model_path's shape, overridden by explicit sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from model_check.config import codes
from model_check.config.folder import read_folder_shape
from model_check.config.sections import ModelSection
from model_check.config.shapes import ModelShape, built_in_shape, nearest_shapes
from model_check.errors import ConfigError, Problem, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "intermediate_size",
    "vocab_size",
    "tie_embeddings",
    "rope_theta",
)


def resolve_shape(model: ModelSection, vocab_size: int | None = None) -> ModelShape:
    """The shape to build. `vocab_size` is the tokenizer's: used where nothing else says it, and checked always."""
    base = base_shape(model.model_path)
    rows = model.vocab_size or (base.vocab_size if base else vocab_size)
    problems = [*size_problems(model, base), *_vocabulary_problems(rows, vocab_size)]
    if problems or rows is None:
        raise ConfigError(problems, "the model section")
    return _assemble(model, base, rows)


def _vocabulary_problems(rows: int | None, tokens: int | None) -> Iterator[Problem]:
    if rows is None:
        yield Problem(
            codes.SIZES_MISSING,
            "model.vocab_size",
            "model.vocab_size is null, and neither model.model_path nor a tokenizer says how many tokens there are",
            "set model.vocab_size",
        )
    elif tokens is not None and tokens > rows:
        yield Problem(
            codes.VOCABULARY_TOO_SMALL,
            "model.vocab_size",
            f"the model's vocabulary of {rows} is smaller than the tokenizer's {tokens}",
            f"set model.vocab_size to {tokens} or more, or use the tokenizer that belongs to the model",
        )


def base_shape(model_path: str | None) -> ModelShape | None:
    """The shape a path names: a folder that is there wins over a built-in name. None for null, or plain weights."""
    if model_path is None or weights_file(model_path) is not None:
        return None
    folder = existing_folder(model_path)
    if folder is not None:
        return read_folder_shape(folder)
    shape = built_in_shape(model_path)
    if shape is None:
        raise UsageError(
            f"model.model_path={model_path} is neither a built-in shape nor a folder",
            remedy=f"name a folder with a config.json, or one of {', '.join(nearest_shapes(model_path))}",
            code=codes.UNKNOWN_MODEL,
        )
    return shape


def weights_file(model_path: str | None) -> Path | None:
    """The path, where it is a plain file of weights: it holds tensors of some shape, but does not say which model."""
    if model_path is None or Path(model_path).suffix not in _WEIGHTS_SUFFIXES:
        return None
    return _existing(model_path, Path.is_file)


def may_be_hub_id(model_path: str) -> bool:
    """Whether only the hub can tell what this path names."""
    return bool(_HUB_ID.fullmatch(model_path)) and not existing_folder(model_path) and not built_in_shape(model_path)


def existing_folder(model_path: str) -> Path | None:
    """The path, where it is a folder that is there."""
    return _existing(model_path, Path.is_dir)


def _existing(model_path: str, is_kind: Callable[[Path], bool]) -> Path | None:
    try:
        path = Path(model_path).expanduser()
        return path if is_kind(path) else None
    except (OSError, RuntimeError, ValueError):  # a name too long, a home that nobody has, a NUL byte: nothing there
        return None


def size_problems(model: ModelSection, base: ModelShape | None) -> Iterator[Problem]:
    """What is wrong with the sizes, as far as they are known: a hub id may not have told its shape yet."""
    weights = weights_file(model.model_path)
    missing = [name for name in ("num_layers", "hidden_size", "num_heads") if getattr(model, name) is None]
    if model.init == "pretrained" and base is not None:
        yield from _reshaped(model, base)
    elif model.init == "random" and weights is not None:
        yield Problem(
            codes.NOTHING_PRETRAINED,
            "model.model_path",
            f"model.model_path={model.model_path} is a file of weights, and model.init=random takes none",
            "set model.init to pretrained, or model.model_path to a shape",
        )
    elif missing and (model.model_path is None or weights is not None):
        file = f"={model.model_path} is a file of weights, which says no sizes," if weights else " is null"
        names = " and ".join(f"model.{name}" for name in missing)
        yield Problem(
            codes.SIZES_MISSING,
            f"model.{missing[0]}",
            f"model.model_path{file} and {names} {'is' if len(missing) == 1 else 'are'} null too",
            "set the sizes, or set model.model_path to a shape such as llama-3.1-8b",
        )
    else:
        yield from _head_problems(model, base)


def _reshaped(model: ModelSection, base: ModelShape) -> Iterator[Problem]:
    for name in SIZES:
        asked, has = getattr(model, name), getattr(base, name)
        if asked is not None and asked != has:
            yield Problem(
                codes.PRETRAINED_RESHAPED,
                f"model.{name}",
                f"model.{name}={asked} differs from the {has} of the weights that model.init=pretrained takes "
                f"from model.model_path={model.model_path}",
                f"set model.{name} to null, or model.init to random",
            )


def _head_problems(model: ModelSection, base: ModelShape | None) -> Iterator[Problem]:
    hidden = model.hidden_size or (base.hidden_size if base else None)
    heads = model.num_heads or (base.num_heads if base else None)
    kv_heads = _kv_heads(model, base)
    if hidden and heads and not _keeps_heads(model, base):
        if hidden % heads:
            below = hidden - hidden % (2 * heads)
            choices = " or ".join(str(size) for size in (below, below + 2 * heads) if size)
            yield Problem(
                codes.HIDDEN_NOT_DIVISIBLE,
                "model.hidden_size",
                f"model.hidden_size must be divisible by model.num_heads, but {hidden} / {heads} = {hidden / heads:g}",
                f"set model.hidden_size to {choices}, or change model.num_heads",
            )
        elif (hidden // heads) % 2:
            yield Problem(
                codes.ODD_HEAD,
                "model.num_heads",
                f"model.hidden_size={hidden} over model.num_heads={heads} gives an odd head dimension of "
                f"{hidden // heads}, which rotary positions cannot use",
                "choose sizes whose quotient is even, such as 64 or 128",
            )
    if heads and kv_heads and heads % kv_heads:
        divisors = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        yield Problem(
            codes.HEADS_NOT_DIVISIBLE,
            "model.num_kv_heads",
            f"model.num_heads must be divisible by model.num_kv_heads, but {heads} / {kv_heads} = {heads / kv_heads:g}",
            f"set model.num_kv_heads to one of {', '.join(divisors)}",
        )


def _kv_heads(model: ModelSection, base: ModelShape | None) -> int | None:
    """As asked; else the shape's own, unless other num_heads were asked for that it does not divide."""
    heads = model.num_heads or (base.num_heads if base else None)
    if model.num_kv_heads or base is None:
        return model.num_kv_heads or heads
    return heads if heads and heads % base.num_kv_heads else base.num_kv_heads


def _keeps_heads(model: ModelSection, base: ModelShape | None) -> bool:
    """Whether the head dimension is the base's own (which a folder may set apart from hidden_size / num_heads)."""
    return (
        base is not None and model.hidden_size in (None, base.hidden_size) and model.num_heads in (None, base.num_heads)
    )


def _assemble(model: ModelSection, base: ModelShape | None, vocab_size: int) -> ModelShape:
    explicit = {name: getattr(model, name) for name in SIZES if getattr(model, name) is not None}
    explicit["vocab_size"] = vocab_size
    if base is None:
        hidden, heads = explicit["hidden_size"], explicit["num_heads"]
        derived = {"num_kv_heads": heads, "intermediate_size": _default_intermediate(hidden)}
        return ModelShape(**{**derived, **explicit, "head_dim": hidden // heads})
    explicit["num_kv_heads"] = _kv_heads(model, base)
    shape = replace(base, **explicit)
    return shape if _keeps_heads(model, base) else replace(shape, head_dim=shape.hidden_size // shape.num_heads)


def _default_intermediate(hidden_size: int) -> int:
    """LLaMA's own rule: a gated MLP of two thirds of 4 × hidden_size has as many weights as a plain one."""
    return -(-8 * hidden_size // (3 * 256)) * 256
