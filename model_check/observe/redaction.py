"""Keeps secrets out of everything that is written: variables, command lines, messages.

Imports nothing but the standard library: it also runs inside scripts whose interpreter has none of our packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

REDACTED = "[redacted]"

# "tokenizer" and "author" are no secrets, and what a run's tokenizer was matters.
_SECRET_NAME = re.compile(
    r"key|token(?!iz)|secret|passw|passphrase|credential|cookie|webhook|auth(?!or)|jwt|_pass(?:$|_)|_pwd$",
    re.IGNORECASE,
)
# One slash where a URL went through a path library.
_URL_USER = re.compile(r"(?<=:/)(/?)[^/?#\s]*@")
_URL_PARAMETER = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s\"'<>]+)")
_KNOWN_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_SHORTEST_SECRET = 6  # shorter values ("1", "true") would be blanked out of every other text they occur in


def looks_secret(name: str) -> bool:
    """Whether a variable or flag of this name holds something that nobody else may read."""
    return _SECRET_NAME.search(name) is not None


def redact_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with every secret replaced: by name, by shape, and wherever a secret's value is repeated."""
    secrets = secret_values(environ)
    return {
        name: REDACTED if looks_secret(name) and value else redact_text(value, secrets)
        for name, value in sorted(environ.items())
    }


def redact_argv(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line with secrets replaced: `--token=x`, `--token x`, `a.key=x`, and values of secret variables."""
    secrets = secret_values(environ)
    shown: list[str] = []
    value_is_secret = False
    for word in argv:
        secret_name = next((name for name in _names_in(word) if looks_secret(name)), None)
        if value_is_secret and not word.startswith("--"):
            shown.append(REDACTED)
        elif secret_name is not None:
            shown.append(f"{redact_text(secret_name, secrets)}={REDACTED}")
        else:
            shown.append(redact_text(word, secrets))
        value_is_secret = word.startswith("-") and "=" not in word and looks_secret(word)
    return shown


def _names_in(word: str) -> list[str]:
    """What may name a value in `--set=hub.token=abc`: `--set` and `--set=hub.token`."""
    return [word[:place] for place, character in enumerate(word) if character == "="]


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """The text without the given secrets, what URLs hold of them, and tokens of well-known shape."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _URL_PARAMETER.sub(_without_secret, _URL_USER.sub(rf"\1{REDACTED}@", text))
    return _KNOWN_SHAPE.sub(REDACTED, text)


def _without_secret(parameter: re.Match[str]) -> str:
    return f"{parameter[1]}={REDACTED}" if looks_secret(parameter[1]) else parameter[0]


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """The values that must not be written anywhere."""
    # The longest first: one secret may contain another.
    values = {value for name, value in environ.items() if looks_secret(name) and len(value) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)
