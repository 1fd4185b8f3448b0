"""Renders docs/configuration.md from the schema: `python -m model_check.config.reference docs/configuration.md`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from model_check.config.codes import MEANINGS
from model_check.config.faults import shown
from model_check.config.load import load_config
from model_check.config.presets import DEFAULT_PRESET, PRESETS, preset_path
from model_check.config.resolve import resolve_shape
from model_check.config.schema import Config, flat_values
from model_check.config.shapes import SHAPES
from model_check.errors import ConfigError

_INTRODUCTION = f"""\
# Configuration

This page is generated from the schema: `python -m model_check.config.reference docs/configuration.md`.

Values come from, later ones winning: the defaults below, a preset (`--preset`, else `{DEFAULT_PRESET}`), files
(`--config`, repeatable, merged in order), flags and environment variables, `--set section.key=value`. A flag and a
`--set` with two values for one key (`--max-steps 5 --set training.max_steps=7`) are refused, and so are two flags
(`--max-steps 5 --fast-dev-run 2`).
Files are JSON, JSON with `//` and `/* */` comments and trailing commas, or YAML (`.yaml`, `.yml`). The run
directory's `config.json` holds every value with where it came from. All faults are reported at once:

```
{{example}}
```
"""

_PRESET_KEYS = (
    "model.model_path",
    "model.num_layers",
    "training.batch_size",
    "training.context_length",
    "training.max_steps",
    "training.learning_rate",
    "training.precision",
)


def render_reference() -> str:
    """The whole page."""
    schema = Config.model_json_schema()
    parts = [_INTRODUCTION.format(example=_example_of_faults())]
    for name, entry in schema["properties"].items():
        parts += _section(name, _definition(schema, entry), schema)
    parts += [_presets(), _shapes(), _codes()]
    return "\n".join(parts)


def _example_of_faults() -> str:
    """Real output, so that the page cannot drift from the program."""
    try:
        load_config(overrides=["training.lr=1e-4", "training.batch_size=0", "model.hidden_size=1000"])
    except ConfigError as error:
        return error.message
    raise AssertionError("three faulty values were accepted")


def _definition(schema: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][entry["$ref"].rpartition("/")[2]]


def _section(name: str, definition: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    lines = [
        f"## {name}",
        "",
        definition["description"],
        "",
        "| key | values | default | meaning |",
        "|---|---|---|---|",
    ]
    nested: list[str] = []
    for key, entry in definition["properties"].items():
        if "$ref" in entry:
            nested += _section(f"{name}.{key}", _definition(schema, entry), schema)
            continue
        default = f"`{shown(entry['default'])}`"
        lines.append(f"| `{name}.{key}` | {_values(entry)} | {default} | {entry['description']} |")
    return [*lines, "", *nested]


def _values(entry: dict[str, Any]) -> str:
    """Type and range of a key in words."""
    if "anyOf" in entry:
        return " or ".join(_values(option) for option in entry["anyOf"])
    if "enum" in entry:
        return ", ".join(f"`{choice}`" for choice in entry["enum"])
    kind = entry["type"]
    if kind == "array":
        if "prefixItems" not in entry:
            return f"list of {_values(entry['items'])}"
        return f"{entry['minItems']} × {_values(entry['prefixItems'][0])}"
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`true`, `false`",
        "string": "text",
        "null": "null",
    }
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {entry[bound]}" for bound, sign in signs.items() if bound in entry]
    return " ".join([words[kind], ", ".join(bounds)]).strip()


def _presets() -> str:
    lines = ["## Presets", "", f"| preset | {' | '.join(f'`{key}`' for key in _PRESET_KEYS)} |"]
    lines.append("|---" * (len(_PRESET_KEYS) + 1) + "|")
    for name in PRESETS:
        values = flat_values(load_config(preset=name))
        lines.append(f"| `{name}` | {' | '.join(shown(values[key]) for key in _PRESET_KEYS)} |")
    details = [
        f"\n`{name}` in full:\n\n```json\n{json.dumps(json.loads(preset_path(name).read_text()), indent=2)}\n```"
        for name in ("debug", "stable")
    ]
    return "\n".join([*lines, *details, ""])


def _shapes() -> str:
    lines = [
        "## Built-in shapes",
        "",
        "Names for `model.model_path`, in any case; the hub ids of meta-llama and their variants (`-Instruct`, "
        "`-chat`, `-hf`) mean the same shapes.",
        "",
        "| name | layers | hidden | heads | KV heads | MLP | vocabulary | positions | tied | parameters |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in SHAPES:
        shape = resolve_shape(load_config(overrides=[f"model.model_path={name}"]).model)
        lines.append(
            f"| `{name}` | {shape.num_layers} | {shape.hidden_size} | {shape.num_heads} | {shape.num_kv_heads} | "
            f"{shape.intermediate_size} | {shape.vocab_size} | {shape.max_position} | "
            f"{'yes' if shape.tie_embeddings else 'no'} | {shape.parameters():,} |"
        )
    return "\n".join([*lines, ""])


def _codes() -> str:
    lines = ["## Faults", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_reference(), encoding="utf-8")
