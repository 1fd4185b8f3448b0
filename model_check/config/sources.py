"""Reads configuration text: JSON, JSON with comments and trailing commas, YAML, and the values of --set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from model_check.config import codes
from model_check.config.presets import PRESETS
from model_check.errors import ConfigError, Problem

_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n\r]*|/\*.*?\*/|\s+|.', re.DOTALL)


class _DuplicateKey(ValueError):
    """A key stands twice in one object: one of the two values would be lost without a word."""


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2 scalars: 1e-4 is a number, `on` and `no` are words, a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written = [
            self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"
        ]
        for position, key in enumerate(written):
            if key in written[:position]:
                raise _DuplicateKey(f"{key} stands twice, line {node.start_mark.line + 1} and below")
        return super().construct_mapping(node, deep)


_YamlLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def strip_json_comments(text: str) -> str:
    """Plain JSON of the same length: comments and trailing commas become spaces, so that positions stay true."""
    pieces: list[str] = []
    last, before_last = "", ""
    last_at = 0
    for match in _JSON_TOKEN.finditer(text):
        token = match.group()
        if token.startswith(("//", "/*")) and len(token) > 1:
            pieces.append(re.sub(r"[^\n\r]", " ", token))
            continue
        if not token.isspace():
            if token in "}]" and last == "," and before_last not in ("", "[", "{", ",", ":"):
                pieces[last_at] = " "
            last, before_last, last_at = token, last, len(pieces)
        pieces.append(token)
    return "".join(pieces)


def parse_json(text: str) -> Any:
    """The value of a JSON text that may have comments and trailing commas; ValueError where it is none."""
    return json.loads(strip_json_comments(text), object_pairs_hook=_object_without_duplicates)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKey(f"{key} stands twice in one object")
        result[key] = value
    return result


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; ValueError where it is none."""
    try:
        return yaml.load(text, _YamlLoader)  # a subclass of SafeLoader: plain data only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f": line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem}{place}") from error
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_config_file(path: Path) -> Any:
    """What a file says: YAML by its suffix, else JSON. ConfigError where it cannot be read or parsed."""
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    try:
        text = path.read_text(encoding="utf-8-sig")
        return parse_yaml(text) if is_yaml else parse_json(text)
    except OSError as error:
        # Earlier guides keep today's presets in files such as config_stable.json.
        preset = next((name for name in PRESETS if name in path.stem.split("_")), None)
        code, fact = codes.FILE_UNREADABLE, f"{path} cannot be read: {error.strerror or error}"
        remedy = f"did you mean --preset {preset}?" if preset else "check the path given to --config"
    except UnicodeDecodeError as error:
        code, fact = codes.FILE_SYNTAX, f"{path} is not UTF-8 text (byte {error.start})"
        remedy = "save the file as UTF-8"
    except _DuplicateKey as error:
        code, fact, remedy = codes.FILE_SYNTAX, f"in {path}, {error}", "keep one of them"
    except (ValueError, RecursionError) as error:
        code, fact = codes.FILE_SYNTAX, f"{path} is not valid {'YAML' if is_yaml else 'JSON'}: {error}"
        remedy = "correct that place" + ("" if is_yaml else ", or name the file .yaml if it is YAML")
    raise ConfigError([Problem(code, "", fact, remedy)], str(path))
