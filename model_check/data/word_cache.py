"""Byte-level BPE several times faster: every distinct piece of text goes through the tokenizer once.

The pre-tokenizers of the GPT-2, Llama 3, Qwen and GPT-4 families cut a text into pieces that are merged independently.
We cut it at a subset of the same places, remember the ids of every piece seen, and hand only unseen ones to
`tokenizers`. The ids are exactly those of the plain call. Where a tokenizer's structure does not prove that, the cache
is not used (`can_split`).

Why the cuts are safe, for every pattern in `KNOWN_PATTERNS`: none looks behind, a match that ends in a letter or digit
ends before whitespace and before ASCII punctuation (the apostrophe excepted: one family joins contractions), no match
runs from non-space into a plain space, and in a run of whitespace that ends in a space before a word, that last space
begins a new match.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any

import numpy as np
import tokenizers

from model_check.data.encoded import EncodedDocuments

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
"""Letters and digits of the basic plane: beyond it Python and `tokenizers` may follow different editions of Unicode."""
_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_AFTER_WORD = r"[\s!-&(-/:-@\[-`{-~]"
PIECE = re.compile(
    rf" ?{_WORD}+(?={_AFTER_WORD})"
    rf"| ?{_PUNCTUATION}+(?:(?= )|\n(?={_WORD})|{_WORD}+(?={_AFTER_WORD}))"
    r"|\s+(?= \S)"
    rf"|\n(?={_WORD})"
    rf"|\s*\S[\s\S]*?(?:(?<={_WORD})(?={_AFTER_WORD})|(?<=\S)(?= )|\Z)"
    r"|\s+"
)
"""Frequent shapes first; the last but one runs to the next safe cut, whatever it meets on the way."""

MAX_PIECES = 1 << 20
"""Pieces remembered before the cache starts anew: about 200 MB."""
_SEPARATOR = "\U0010fffe\U0010ffff"
_PIECES_PER_CALL = 512


def can_split(serialised: str) -> bool:
    """Whether this tokenizer.json is one whose pre-tokenizer provably respects the cuts of `PIECE`."""
    parts: dict[str, Any] = json.loads(serialised)
    model = parts.get("model") or {}
    plain_model = model.get("type") == "BPE" and not model.get("dropout")
    normalizer = parts.get("normalizer")
    plain_normalizer = normalizer is None or normalizer.get("type") == "NFC"
    return (
        plain_model
        and plain_normalizer
        and _plain_added_tokens(parts)
        and _known_pre_tokenizer(parts.get("pre_tokenizer"))
    )


def _plain_added_tokens(parts: dict[str, Any]) -> bool:
    """Added tokens that are found in the text by their letters alone, all in one pass."""
    tokens = parts.get("added_tokens") or []
    by_letters = all(
        token["content"] and not (token.get("lstrip") or token.get("rstrip") or token.get("single_word"))
        for token in tokens
    )
    passes = {bool(token.get("normalized")) for token in tokens}
    return by_letters and len(passes) <= 1 and (True not in passes or parts.get("normalizer") is None)


def _added_tokens(serialised: str) -> re.Pattern[str] | None:
    """Finds the added tokens of a text, the longest first, as `tokenizers` does before anything else."""
    contents = [token["content"] for token in json.loads(serialised).get("added_tokens") or []]
    if not contents:
        return None
    return re.compile("(" + "|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True)) + ")")


def _known_pre_tokenizer(pre_tokenizer: dict[str, Any] | None) -> bool:
    if not pre_tokenizer:
        return False
    if pre_tokenizer["type"] == "ByteLevel":
        return not pre_tokenizer.get("add_prefix_space") and pre_tokenizer.get("use_regex", True)
    if pre_tokenizer["type"] != "Sequence":
        return False
    steps = pre_tokenizer.get("pretokenizers") or []
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, byte_level = steps
    isolates = (split.get("behavior"), bool(split.get("invert"))) in {("Isolated", False), ("Removed", True)}
    plain_bytes = not byte_level.get("add_prefix_space") and not byte_level.get("use_regex", True)
    return isolates and plain_bytes and (split.get("pattern") or {}).get("Regex") in KNOWN_PATTERNS


class _PieceNumbers(dict[str, int]):
    """Piece -> its number; an unseen piece gets the next one and waits in `unseen`."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen: list[str] = []

    def __missing__(self, piece: str) -> int:
        number = self[piece] = len(self)
        self.unseen.append(piece)
        return number


class WordCache:
    """Encodes batches of documents; keeps what it learned between batches."""

    def __init__(self, serialised: str, eos_id: int) -> None:
        self._serialised = serialised
        # One call for many pieces is twice as fast as one text a piece; the marker keeps them apart.
        self._marked = tokenizers.Tokenizer.from_str(serialised)
        self._marked.no_truncation()
        self._marked.no_padding()
        self._marked.add_special_tokens([tokenizers.AddedToken(_SEPARATOR, special=True, normalized=False)])
        self._separator_id = self._marked.token_to_id(_SEPARATOR)
        self._added = _added_tokens(serialised)
        self._eos_id = eos_id
        self._forget()

    def _forget(self) -> None:
        self._numbers = _PieceNumbers()
        self._numbers[""] = 0  # no piece is empty: this one stands for the end of a document
        self._ids = np.array([self._eos_id], dtype=np.uint32)
        self._starts = np.zeros(1, dtype=np.int64)
        self._counts = np.ones(1, dtype=np.int64)

    def encode(self, texts: list[str]) -> EncodedDocuments:
        """Ids of all documents, an end-of-text token after each."""
        if len(self._numbers) > MAX_PIECES:
            self._forget()
        pieces: list[str] = []
        piece_ends = np.empty(len(texts), dtype=np.int64)
        for i, text in enumerate(texts):
            if self._added is None:
                pieces += PIECE.findall(text)
            else:
                between = self._added.split(text)  # text, token, text, token, …, text
                pieces += PIECE.findall(between[0])
                for token, rest in zip(between[1::2], between[2::2], strict=True):
                    pieces.append(token)
                    pieces += PIECE.findall(rest)
            pieces.append("")
            piece_ends[i] = len(pieces)
        numbers = np.fromiter(map(self._numbers.__getitem__, pieces), dtype=np.int32, count=len(pieces))
        if self._numbers.unseen:
            self._learn(self._numbers.unseen)
            self._numbers.unseen = []
        counts = self._counts[numbers]
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        gather = np.repeat(self._starts[numbers] - (ends - counts), counts) + np.arange(total)
        lengths = np.diff(ends[piece_ends - 1], prepend=0) if len(texts) else np.zeros(0, dtype=np.int64)
        return EncodedDocuments(ids=self._ids[gather], lengths=lengths)

    def _learn(self, pieces: list[str]) -> None:
        ids, counts = self._encode_marked(pieces) or self._encode_one_by_one(pieces)
        first = len(self._ids)
        self._starts = np.concatenate([self._starts, first + np.cumsum(counts) - counts])
        self._counts = np.concatenate([self._counts, counts])
        self._ids = np.concatenate([self._ids, ids])

    def _encode_marked(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids and their count per piece; None where a piece contains the marker itself."""
        groups = [pieces[i : i + _PIECES_PER_CALL] for i in range(0, len(pieces), _PIECES_PER_CALL)]
        texts = ["".join(piece + _SEPARATOR for piece in group) for group in groups]
        encodings = self._marked.encode_batch_fast(texts, add_special_tokens=False)
        marked = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), dtype=np.uint32)
        marks = np.flatnonzero(marked == self._separator_id)
        if len(marks) != len(pieces):
            return None
        counts = np.diff(marks, prepend=-1) - 1
        return np.delete(marked, marks), counts

    def _encode_one_by_one(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        plain = tokenizers.Tokenizer.from_str(self._serialised)
        plain.no_truncation()
        plain.no_padding()
        lists = [encoding.ids for encoding in plain.encode_batch_fast(pieces, add_special_tokens=False)]
        counts = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        return np.fromiter(chain.from_iterable(lists), dtype=np.uint32, count=int(counts.sum())), counts
