"""What the argument parser refuses, in our own words: one sentence with the value, and the nearest known flag."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from model_check.errors import UsageError

# typer brings its own copy of click's exceptions in newer versions and uses click's in older ones: these are in use.
_parser: Any = sys.modules[typer.BadParameter.__module__]
ParserError: type[Exception] = _parser.ClickException

# How the two of them say that a text is not of the kind that a flag takes.
_WRONG_KIND = re.compile(r"valid (int|integer|number|float)\b")


def in_our_words(error: Any, verb: str) -> UsageError:
    """The parser's exception as one of ours. `verb` is what was called, e.g. "train" or "checkpoint"."""
    context = getattr(error, "ctx", None)
    called = context.command_path.removeprefix("model-check ") if context is not None else verb
    flags = _flags(context)
    if isinstance(error, _parser.NoSuchOption):
        return UsageError(f"{called} has no flag {error.option_name}", remedy=_near(error.option_name, flags, called))
    if isinstance(error, _parser.MissingParameter) and context is not None:
        needed = [_name(parameter) for parameter in context.command.get_params(context) if parameter.required]
        return UsageError(
            f"{called} needs {_name(error.param)}", remedy=f"write model-check {called} {' '.join(needed)}"
        )
    if isinstance(error, _parser.BadParameter):
        return _bad_value(error, called)
    if isinstance(error, _parser.BadOptionUsage):
        return _bad_use(error.option_name, error.message, called)
    return _wrong_words(error.message, called, context, flags)


def _flags(context: Any) -> list[str]:
    if context is None:
        return []
    parameters = context.command.get_params(context)
    return [flag for parameter in parameters for flag in parameter.opts if flag.startswith("-")]


def _name(parameter: Any) -> str:
    """RUN_DIR, or --nproc."""
    flags = [flag for flag in parameter.opts if flag.startswith("-")]
    return str(flags[0] if flags else parameter.name.upper())


def _near(word: str, known: Sequence[str], called: str) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"model-check {called} --help lists its flags"


def _bad_value(error: Any, called: str) -> UsageError:
    if error.param is None:
        return UsageError(_sentence(error.message), remedy=f"see model-check {called} --help")
    name, value = _name(error.param), _refused_value(error)
    wrong = _WRONG_KIND.search(error.message)
    if wrong and value is not None:
        kind = "a whole number" if wrong[1].startswith("int") else "a number"
        return UsageError(f"{name} {value} is not {kind}", remedy=f"give {name} {kind}")
    said = _sentence(error.message).replace("input should be", "must be")
    fact = f"{name} {said}" if value is None else f"{name} {value} {said}"
    return UsageError(fact, remedy=f"see model-check {called} --help")


def _refused_value(error: Any) -> str | None:
    """The text that could not be read: in the cause's details (typer) or in the message itself (click)."""
    details = getattr(error.__cause__, "errors", None)
    if callable(details):
        refused = details()
        return str(refused[0]["input"]) if refused else None
    quoted = re.match(r"'(.*)' is not a valid (?:int|integer|float)", error.message)
    return quoted[1] if quoted else None


def _bad_use(flag: str, message: str, called: str) -> UsageError:
    if "does not take a value" in message:
        return UsageError(f"{flag} takes no value", remedy=f"write {flag} alone")
    return UsageError(f"{flag} needs a value", remedy=f"write {flag} VALUE, as model-check {called} --help shows")


def _wrong_words(message: str, called: str, context: Any, flags: Sequence[str]) -> UsageError:
    """What the parser has no class of its own for: words that are no flag, and verbs below a verb."""
    verbs = list(getattr(context.command, "commands", ())) if context is not None else []
    if verbs:
        asked = re.search(r"'([^']*)'", message)
        near = difflib.get_close_matches(asked[1], verbs, n=1) if asked else []
        fact = f"{called} has no verb '{asked[1]}'" if asked else f"{called} needs a verb"
        return UsageError(fact, remedy=f"did you mean {near[0]}?" if near else f"use one of {', '.join(verbs)}")
    extra = re.search(r"unexpected extra argument\S* \((.*)\)", message)
    if extra:
        word = extra[1].split()[0]
        return UsageError(f"{called} takes no word '{word}'", remedy=_near(f"--{word}", flags, called))
    return UsageError(_sentence(message), remedy=f"see model-check {called} --help")


def _sentence(message: str) -> str:
    text = message.strip().removesuffix(".")
    return text[:1].lower() + text[1:]
