"""Turns what the schema refuses into problems a person can act on: value, origin, remedy, nearest known key."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from model_check.config import codes
from model_check.errors import Problem

# What other trainers call our keys, where spelling alone would not find them.
_NAMES_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "checkpoint.interval": ("save_steps",),
    "model.attention_backend": ("attn_implementation",),
    "model.hidden_size": ("n_embd",),
    "model.init_std": ("initializer_range",),
    "model.intermediate_size": ("ffn_dim",),
    "model.model_path": ("model_name", "model_name_or_path"),
    "model.num_heads": ("n_head", "num_attention_heads"),
    "model.num_kv_heads": ("num_key_value_heads",),
    "model.num_layers": ("n_layer", "num_hidden_layers"),
    "model.tie_embeddings": ("tie_word_embeddings",),
    "parallel.activation_checkpointing": ("gradient_checkpointing",),
    "parallel.pipeline": ("pp",),
    "parallel.strategy": ("dp",),
    "parallel.tensor": ("tp",),
    "system.device_id": ("gpu",),
    "training.batch_size": ("bs", "micro_batch_size"),
    "training.context_length": ("block_size", "max_seq_len", "seq_len", "seq_length"),
    "training.global_batch": ("global_batch_size",),
    "training.grad_accum_nums": ("accumulate_grad_batches", "gradient_accumulation_steps"),
    "training.max_grad_norm": ("clip_grad", "grad_clip", "gradient_clipping"),
    "training.max_steps": ("steps", "train_steps"),
    "training.precision": ("bf16", "dtype", "fp16", "mixed_precision", "torch_dtype"),
    "training.scheduler.type": ("lr_scheduler_type",),
    "training.scheduler.warmup_steps": ("warmup",),
    "training.use_amp": ("amp",),
}
SYNONYMS = {name: key for key, names in _NAMES_ELSEWHERE.items() for name in names}

# What other trainers call our choices.
CHOICE_SYNONYMS: dict[str, str] = {
    "bfloat16": "bf16",
    "eager": "math",
    "flash_attention_2": "flash_attn",
    "float16": "fp16",
    "float32": "fp32",
    "gpu": "cuda",
    "half": "fp16",
}

_SHOWN_CHARACTERS = 80

_RELATIONS = {
    "greater_than": (">", "gt", "raise it above"),
    "greater_than_equal": ("≥", "ge", "raise it to"),
    "less_than": ("<", "lt", "lower it below"),
    "less_than_equal": ("≤", "le", "lower it to"),
}

_EXPECTED_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
}


def shown(value: Any) -> str:
    """A value as it would stand in a JSON file, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def came_from(origin: str) -> str:
    """The words that say where a value was set; a default needs none."""
    return "" if origin == "default" else f" (from {origin})"


def unknown_key_problems(flat: Mapping[str, Any], origins: Mapping[str, str], known: Iterable[str]) -> list[Problem]:
    """A problem for each key that the schema does not have. Its value is not repeated: it may be a secret."""
    keys = list(known)
    return [
        Problem(
            codes.UNKNOWN_KEY,
            key,
            f"{key}{came_from(origins[key])} is not a known key",
            _nearest_key_remedy(key, keys),
        )
        for key in flat
        if key not in keys
    ]


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known key (or section) that somebody who wrote `key` most likely meant."""
    section, _, leaf = key.rpartition(".")
    leaf = leaf.lower().replace("-", "_")
    if leaf in SYNONYMS:
        return SYNONYMS[leaf]
    same_leaf = [candidate for candidate in known if _leaf(candidate) == leaf]
    if same_leaf:
        return difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0)[0]
    if not section:
        sections = list(dict.fromkeys(candidate.partition(".")[0] for candidate in known))
        close = difflib.get_close_matches(leaf, sections, n=1, cutoff=0.6)
        if close:
            return close[0]
    inside = [candidate for candidate in known if section and candidate.startswith(section + ".")]
    for pool in (inside, known):
        initials = [
            candidate for candidate in pool if "".join(word[:1] for word in _leaf(candidate).split("_")) == leaf
        ]
        if initials and len(leaf) > 1:
            return initials[0]
        by_leaf = {_leaf(candidate): candidate for candidate in reversed(pool)}
        close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)
        if close:
            return by_leaf[close[0]]
    return None


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _nearest_key_remedy(key: str, known: list[str]) -> str:
    above = next((candidate for candidate in known if key.startswith(candidate + ".")), None)
    if above:
        return f"{above} takes one value, not keys below it"
    below = [candidate for candidate in known if candidate.startswith(key + ".")]
    if below:
        return f"it is a section; name a key in it, such as {below[0]}"
    nearest = nearest_key(key, known)
    if nearest:
        return f"did you mean {nearest}?"
    section = key.partition(".")[0]
    siblings = [candidate.partition(".")[2] for candidate in known if candidate.startswith(section + ".")]
    if siblings:
        return f"{section} has {', '.join(siblings)}"
    sections = dict.fromkeys(candidate.partition(".")[0] for candidate in known)
    return f"the sections are {', '.join(sections)}"


def schema_problems(error: ValidationError, flat: Mapping[str, Any], origins: Mapping[str, str]) -> list[Problem]:
    """A problem for each value that does not fit its key."""
    problems = []
    for details in error.errors():
        key = _dotted_key(details, flat)
        code, message, remedy = _explain(details)
        value = shown(flat[key])
        problems.append(Problem(code, key, f"{key}={value}{came_from(origins[key])} {message}", remedy))
    return problems


def _dotted_key(details: ErrorDetails, flat: Mapping[str, Any]) -> str:
    """The key that was set; a fault inside a list is located below it."""
    path = [str(part) for part in details["loc"]]
    while len(path) > 1 and ".".join(path) not in flat:
        path.pop()
    return ".".join(path)


def _explain(details: ErrorDetails) -> tuple[str, str, str]:
    """Code, what is wrong (the words after the value), and what to do."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind in _RELATIONS:
        sign, name, remedy = _RELATIONS[kind]
        return codes.OUT_OF_RANGE, f"must be {sign} {context[name]}", f"{remedy} {context[name]}"
    if kind == "literal_error":
        choices = [choice.strip(" '") for choice in context["expected"].replace(" or ", ", ").split(",")]
        meant = CHOICE_SYNONYMS.get(str(value).lower(), str(value).lower())
        close = difflib.get_close_matches(meant, choices, n=1, cutoff=0.6)
        remedy = f"did you mean {close[0]}?" if close else f"write {choices[0]}, for example"
        return codes.NOT_A_CHOICE, f"is not one of {', '.join(choices)}", remedy
    if kind == "finite_number":
        return codes.OUT_OF_RANGE, "is not a finite number", "write an ordinary number"
    if kind == "string_too_short":
        return codes.OUT_OF_RANGE, "is empty", "name something, or leave the key out"
    if kind in ("missing", "too_long"):
        return codes.WRONG_TYPE, "has the wrong number of entries", "write two numbers, such as [0.9, 0.95]"
    expected = _EXPECTED_TYPES.get(kind, "of another type")
    return codes.WRONG_TYPE, f"must be {expected}", _type_remedy(kind, value, expected)


def _type_remedy(kind: str, value: Any, expected: str) -> str:
    """Says how to write what was probably meant."""
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind.startswith(("int", "float")) and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return f"write {expected}"
        if not math.isfinite(number):
            return f"write {expected}"
        return f"write {int(number) if number.is_integer() else number} without quotes"
    if kind == "bool_type" and str(value).lower() in ("1", "yes", "on", "true"):
        return "write true"
    if kind == "bool_type" and str(value).lower() in ("0", "no", "off", "false"):
        return "write false"
    if kind == "string_type":
        return f"put it in quotes: {shown(str(value))}" if value is not None else "write a text"
    return f"write {expected}"
