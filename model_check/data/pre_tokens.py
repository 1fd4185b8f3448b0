"""Where byte-level BPE tokenizers cut a text before they merge, so that the parts can be tokenized one by one.

The tokenizers of the GPT-2, Llama 3 and Qwen families cut with a regular expression and merge inside each part only.
For those (`splitter` says which) a text can be cut here, in Python, and every distinct part tokenized once:

- ASCII text is cut with the tokenizer's own expression, in which letters, digits and whitespace mean the same to
  Python's `re` as to `tokenizers`.
- Other text is cut at places that are cuts for every known expression, whatever edition of Unicode the two follow: none
  of them looks behind, a match that ends in a letter or digit ends before whitespace and before ASCII punctuation, no
  match runs from non-space into a plain space, and the last space of a run of whitespace before a word begins a new
  match. A part may then hold several of the tokenizer's own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_PATTERNS = frozenset(
    {
        _GPT2,
        _GPT2.replace("'(?:[sdmt]|ll|ve|re)", "'s|'t|'re|'ve|'m|'ll|'d"),
        _LLAMA3,
        _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    }
)

_WORD = r"[^\W_\U00010000-\U0010ffff]"
"""Letters and digits of the basic plane: beyond it Python and `tokenizers` may know different ones."""
_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_AFTER_WORD = r"[\s!-/:-@\[-`{-~]"
_SAFE_CUTS = re.compile(
    rf" ?{_WORD}+(?={_AFTER_WORD})"
    rf"| ?{_PUNCTUATION}+(?:(?= )|\n(?={_WORD})|{_WORD}+(?={_AFTER_WORD}))"
    r"|\s+(?= \S)"
    rf"|\n(?={_WORD})"
    rf"|\s*\S[\s\S]*?(?:(?<={_WORD})(?={_AFTER_WORD})|(?<=\S)(?= )|\Z)"
    r"|\s+"
)
"""Frequent shapes first; the last but one runs to the next safe cut, whatever it meets on the way."""


@dataclass(frozen=True)
class Splitter:
    """Cuts texts for one tokenizer. `added` finds its added tokens, which are no part of any cut; None: it has none."""

    own: re.Pattern[str]
    added: re.Pattern[str] | None

    def split(self, text: str) -> list[str]:
        """The parts of a text: joined they are the text, and their ids one after another are its ids."""
        find = self.own.findall if text.isascii() else _SAFE_CUTS.findall
        if self.added is None or self.added.search(text) is None:
            return find(text)
        parts: list[str] = []
        for i, between in enumerate(self.added.split(text)):  # text, token, text, token, …, text
            if i % 2:
                parts.append(between)
            else:
                parts += find(between)
        return parts


def splitter(serialised: str) -> Splitter | None:
    """For this tokenizer.json; None where its structure does not prove that its texts can be cut."""
    parts: dict[str, Any] = json.loads(serialised)
    model = parts.get("model") or {}
    normalizer = parts.get("normalizer")
    pattern = _pattern(parts.get("pre_tokenizer"))
    # NFC joins letters with marks, never across a cut, and leaves ASCII as it is.
    plain = model.get("type") == "BPE" and not model.get("dropout")
    plain = plain and (normalizer is None or normalizer.get("type") == "NFC")
    if pattern is None or not plain or not _found_by_letters(parts):
        return None
    return Splitter(re.compile(_in_ascii(pattern), re.ASCII), _finder(parts))


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The expression it cuts with, if it is one we know and nothing else is done to the text."""
    if not pre_tokenizer:
        return None
    if pre_tokenizer["type"] == "ByteLevel":
        plain = not pre_tokenizer.get("add_prefix_space") and pre_tokenizer.get("use_regex", True)
        return _GPT2 if plain else None
    steps = pre_tokenizer.get("pretokenizers") or []
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = steps
    isolates = (split.get("behavior"), bool(split.get("invert"))) in {("Isolated", False), ("Removed", True)}
    plain = isolates and not byte_level.get("add_prefix_space") and not byte_level.get("use_regex", True)
    pattern = (split.get("pattern") or {}).get("Regex")
    return pattern if plain and pattern in KNOWN_PATTERNS else None


def _in_ascii(pattern: str) -> str:
    """The expression with its Unicode classes spelt out: `\\p{L}` is A-Za-z, in brackets where it has none yet."""
    inside = False
    spelt = []
    for part in re.split(r"(\\p\{[LN]\}|[\[\]])", pattern):
        if part in ("[", "]"):
            inside = part == "["
        elif part.startswith(r"\p"):
            ranges = "A-Za-z" if "L" in part else "0-9"
            part = ranges if inside else f"[{ranges}]"
        spelt.append(part)
    return "".join(spelt)


def _found_by_letters(parts: dict[str, Any]) -> bool:
    """Whether the added tokens are found in a text by their letters alone, all in one pass."""
    tokens = parts.get("added_tokens") or []
    plain = all(
        token["content"] and not (token.get("lstrip") or token.get("rstrip") or token.get("single_word"))
        for token in tokens
    )
    passes = {bool(token.get("normalized")) for token in tokens}
    return plain and len(passes) <= 1 and (True not in passes or parts.get("normalizer") is None)


def _finder(parts: dict[str, Any]) -> re.Pattern[str] | None:
    """Finds the added tokens of a text, the longest first, as `tokenizers` does before anything else."""
    contents = sorted((token["content"] for token in parts.get("added_tokens") or []), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, contents)) + ")") if contents else None
