"""Keeps secrets out of everything that is written: variables, command lines, messages.

Imports nothing but the standard library: it also runs inside scripts whose interpreter has none of our packages.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote, unquote

REDACTED = "[redacted]"

# "tokenizer" and "author" are no secrets, and what a run's tokenizer was matters.
_SECRET_PART = (
    r"key|token(?!iz)|secret|passw|passphrase|credential|cookie|webhook|auth(?!or)|jwt|signature"
    r"|_pass(?![^\W_])|_pwd(?!\w)"
)
_SECRET_NAME = re.compile(_SECRET_PART, re.IGNORECASE)
# One slash where a URL went through a path library.
_URL_USER = re.compile(r"(?<=:/)(/?)[^/?#\s]*@")
# Also `&` as HTML and JSON escape it. Other parameters are not consumed: their value may be a URL with a secret.
_URL_PARAMETER = re.compile(
    rf"((?:[?&]|&amp;|&#38;|\\u0026|\\x26)(?:[\w.-]{{0,60}}(?:{_SECRET_PART})[\w.-]{{0,60}}|(?:[\w.-]{{0,60}}[-_.])?sig)=[\"']?)"
    r"[^&#\s\"'<>]+",
    re.IGNORECASE,
)
_KNOWN_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt|ptt|ft|soat|imt|agent|oas)-[\w-]{16,}(?:\.[\w-]+)*"
    r"|A[KS]IA[A-Z0-9]{16}|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/[\w/]+"
    r"|(?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|AIza[\w-]{35}|ya29\.[\w-]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}"
    r"|dckr_pat_[\w-]{16,}|dop_v1_[a-f0-9]{32,}|dapi[a-f0-9]{32}|nvapi-[\w-]{16,}|gsk_[A-Za-z0-9]{20,}"
    r"|r8_[A-Za-z0-9]{30,}|hv[sb]\.[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,})"
)
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:(-----END [A-Z ]*PRIVATE KEY-----)|\Z)", re.DOTALL
)
# `key=`, `token=` and `tokens=` are common in code and logs, so in free text only these names mark a secret.
_SECRET_WORD = (
    r"account_?key|shared_?access_?(?:key|signature)|(?:\w*_)?(?:password|passwd|passphrase|pwd)"
    r"|(?:\w*[_-])?api[_-]?key|(?:\w*_)?secret(?:_?access)?_?key|(?:\w*_)?(?:client|app)_?secret"
    r"|(?:\w*_)?(?:access|auth|refresh|session|bearer)[_-]?token"
)
_ASSIGNED = re.compile(
    rf"\b({_SECRET_WORD})\b(\s*=\s*)"
    # Not a call or an index, which would mean a line of code.
    r"(?:([\"'])(?:(?!\3)[^\\\n]|\\.)+\3|(?!(?:None|True|False)\b|[\w.]*[(\[])[^\s;,&\"'<>()\[\]{}]+)",
    re.IGNORECASE,
)
_QUOTED = re.compile(
    rf"([\"'](?:{_SECRET_WORD}|token|secret)[\"']\s*:\s*)([\"'])(?:(?!\2)[^\\\n]|\\.)+\2", re.IGNORECASE
)
# As YAML prints it. Only a long value with a digit counts: prose has colons too.
_IN_YAML = re.compile(rf"\b((?:{_SECRET_WORD}):[ \t]+)(?=[a-z%+/=.~_-]*\d)[\w%+/=.~-]{{16,}}", re.IGNORECASE)
_SIGNATURE = r"(?<![^\W_])sig(?:nature)?"
_SIGNED = re.compile(rf"({_SIGNATURE}=)(?![\w.]*[(\[])[\w%+/=.~-]{{16,}}", re.IGNORECASE)
# In a header, a dictionary or a list of pairs. Only a value with a digit counts: others may be names of functions.
_SIGNED_PAIR = re.compile(
    rf"({_SIGNATURE}[\"']?\s*[=:,][\s\"'\[(]*)(?![\w.]*[(\[])(?=[a-z%+/=.~_-]*\d)[\w%+/=.~-]{{16,}}", re.IGNORECASE
)
_SCHEMES = "basic|bearer|token|digest|apikey|negotiate"
_HEADER = re.compile(
    r"\b((?:(?:proxy-)?authorization|x-api-key|api-key|x-auth-token|x-amz-security-token|private-token)"
    rf"[\"']?\s*:\s*[\"']?(?:(?:{_SCHEMES})\s+)?)(?!(?:{_SCHEMES})\s)[^\s\"',\[]+",
    re.IGNORECASE,
)
_WORD = re.compile(r"\S+")
_MOST_TIMES_ENCODED = 3  # a URL that is a parameter of a URL, and so on
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/-]{16,}=*", re.IGNORECASE)
_NAME = re.compile(r"[^\s\"'{};?&]+")
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
    """Possible names in `--set=hub.token=abc`: `--set` and `--set=hub.token`. Text and URLs have no names."""
    ends = [place for place, character in enumerate(word) if character == "="]
    return [word[:end] for end in ends if _NAME.fullmatch(word[:end])]


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Redacts the given secrets, well-known tokens, and secrets in URLs, headers and connection strings.

    A percent-encoded word is decoded and searched too. If it holds a secret, it is written decoded.
    """
    secrets = list(secrets)
    shown = _redact_unencoded(text, secrets)
    return _WORD.sub(lambda word: _redact_encoded(word[0], secrets), shown) if "%" in shown else shown


def _redact_encoded(word: str, secrets: Iterable[str]) -> str:
    shown, holds_secret = word, False
    for _ in range(_MOST_TIMES_ENCODED):
        decoded = unquote(shown)
        if decoded == shown:
            break
        shown = _redact_unencoded(decoded, secrets)
        holds_secret = holds_secret or shown != decoded
    # Spaces and line breaks stay encoded, so that it remains one word. A path may hold bytes that are no text.
    return quote(shown, safe=string.punctuation, errors="backslashreplace") if holds_secret else word


def _redact_unencoded(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _PRIVATE_KEY.sub(rf"\1{REDACTED}\2", text)
    text = _URL_PARAMETER.sub(rf"\1{REDACTED}", _URL_USER.sub(rf"\1{REDACTED}@", text))
    text = _KNOWN_SHAPE.sub(REDACTED, text)
    text = _QUOTED.sub(rf"\1{REDACTED}", _ASSIGNED.sub(rf"\1\2{REDACTED}", text))
    for pattern in (_IN_YAML, _SIGNED, _SIGNED_PAIR, _HEADER, _BEARER):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """The values that must not be written anywhere."""
    # The longest first: one secret may contain another.
    values = {value for name, value in environ.items() if looks_secret(name) and len(value) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)
