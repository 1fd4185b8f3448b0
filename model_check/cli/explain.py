"""`model-check explain`: the long form of an error code, or the list of all of them."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import asdict
from typing import Annotated, Any

import typer

from model_check.cli.options import AsJson
from model_check.errors import UsageError


def explain(
    code: Annotated[
        str | None, typer.Argument(help="A code such as MC204, or a word to find codes by. None: list all codes.")
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The documentation's page of all codes.")] = False,
) -> None:
    """Print what a code means, how it is detected, and what to do about it.

    Example: model-check explain MC204
    """
    from model_check.config.codes import MEANINGS as short
    from model_check.diagnose import catalogue

    if markdown:
        typer.echo(catalogue.errors_page(), nl=False)
        return
    titles = {**{known: entry.title for known, entry in catalogue.CATALOGUE.items()}, **short}
    if code is None:
        _list(titles, as_json)
        return
    if not any(letter.isdigit() for letter in code):
        texts = {known: f"{entry.title} {entry.what} {entry.why}" for known, entry in catalogue.CATALOGUE.items()}
        _list({known: titles[known] for known in _with_word(code, {**texts, **short})}, as_json)
        return
    wanted = _normal(code)
    if wanted in catalogue.CATALOGUE:
        entry: dict[str, Any] = {"code": wanted, **asdict(catalogue.CATALOGUE[wanted])}
        typer.echo(json.dumps(entry, indent=2) if as_json else catalogue.explain(wanted), nl=as_json)
    elif wanted in short:
        typer.echo(json.dumps({"code": wanted, "title": short[wanted]}) if as_json else f"{wanted}: {short[wanted]}")
    else:
        near = difflib.get_close_matches(wanted, titles, n=1, cutoff=0.0)
        raise UsageError(
            f"there is no code {code}", remedy=f"the nearest is {near[0]}; `model-check explain` lists all"
        )


def _normal(code: str) -> str:
    """mc204, 204 and MC-204 are MC204."""
    digits = code.upper().removeprefix("MC").lstrip("-_ ")
    return f"MC{digits}"


def _with_word(word: str, texts: dict[str, str]) -> list[str]:
    """The codes whose texts have a word that begins like this one."""
    begins = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    found = [code for code, text in texts.items() if begins.search(text)]
    if not found:
        raise UsageError(f"no code speaks of '{word}'", remedy="`model-check explain` lists all of them")
    return found


def _list(titles: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([{"code": code, "title": titles[code]} for code in sorted(titles)], indent=2))
        return
    for code in sorted(titles):
        typer.echo(f"{code}  {titles[code]}")
