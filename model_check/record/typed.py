"""Typed records of JSON files: writes a dataclass, and reads one back from a file that may come from anywhere.

A reader never fails. A key that is missing, or whose value has another type, becomes the field's default, and keys
that the dataclass does not have are ignored: an older or newer version of Model Check may have written the file.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
# Metadata of fields:
NOT_STORED = {"stored": False}  # no file holds it
NULL_TOO = {"null": True}  # written without a value too: its readers expect the key
_LARGEST = 1 << 64  # of a number; what is larger was not written by us


class _Misfit(Exception):
    """The value has another type than the field."""


def to_json(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as a JSON object. An optional field (default None) without a value is left out."""
    shown: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        stored = field.metadata.get("stored", True)
        if stored and (value is not None or field.default is not None or "null" in field.metadata):
            shown[field.name] = _plain(value)
    return shown


def from_json(kind: type[T], value: Any) -> T:
    """The object in `value` as a dataclass; every field needs a default."""
    body = value if isinstance(value, Mapping) else {}
    fitting = {}
    for name, hint in _hints(kind).items():  # type: ignore[arg-type]
        if name in body:
            try:
                fitting[name] = _fit(hint, body[name])
            except _Misfit:
                continue
    return kind(**fitting)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    stored = (field for field in fields(kind) if field.init and field.metadata.get("stored", True))
    return {field.name: hints[field.name] for field in stored}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, Mapping):
        return {key: _plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    return value


def _fit(hint: Any, value: Any) -> Any:
    """The value as the type that a field asks for."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _fit_one_of(arguments, value)
    if origin is Literal:
        return _checked(value in arguments, value)
    if origin in (tuple, list) or origin is Sequence:
        return _fit_sequence(origin, arguments, value)
    if origin in (dict, Mapping):
        _checked(isinstance(value, Mapping), value)
        return {_fit_key(arguments[0], key): _fit(arguments[1], held) for key, held in value.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return from_json(hint, _checked(isinstance(value, Mapping), value))
    return _fit_scalar(hint, value)


def _fit_one_of(hints: tuple[Any, ...], value: Any) -> Any:
    for hint in hints:
        if hint is types.NoneType:
            if value is None:
                return None
            continue
        try:
            return _fit(hint, value)
        except _Misfit:
            continue
    raise _Misfit


def _fit_sequence(origin: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    _checked(isinstance(value, (list, tuple)), value)
    if origin is tuple and Ellipsis not in arguments:  # of a fixed length
        _checked(len(value) == len(arguments), value)
        return tuple(_fit(hint, held) for hint, held in zip(arguments, value, strict=True))
    fitted = [_fit(arguments[0], held) for held in value]
    return fitted if origin is list else tuple(fitted)


def _fit_key(hint: Any, key: Any) -> Any:
    """The keys of a JSON object are texts: a number stands there in decimal digits."""
    if hint is int and isinstance(key, str):
        _checked(key.isdecimal() and len(key) < 10, key)
        return int(key)
    return _fit(hint, key)


def _fit_scalar(hint: Any, value: Any) -> Any:
    if hint is float:
        if value in ("nan", "inf", "-inf"):  # JSON has no such numbers: files.py writes their names
            return float(value)
        _checked(isinstance(value, (int, float)) and not isinstance(value, bool), value)
        return float(_checked(isinstance(value, float) or abs(value) < _LARGEST, value))
    if hint is int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        _checked(whole and not isinstance(value, bool) and abs(value) < _LARGEST, value)
        return int(value)
    return _checked(isinstance(value, hint), value)


def _checked(fits: bool, value: Any) -> Any:
    if not fits:
        raise _Misfit
    return value
