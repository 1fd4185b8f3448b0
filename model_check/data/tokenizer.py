"""Tokenizers: the small BPE that ships with the package, bytes, any tokenizer.json, any hub id."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from model_check.data.packed import EncodedDocuments
from model_check.errors import DataError

END_OF_TEXT = "<|endoftext|>"
BUILTIN = Path(__file__).with_name("builtin_tokenizer.json")
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")
"""Looked for in this order where no tokenizer_config.json names the end-of-text token."""


class Tokenizer(ABC):
    """Text to ids and back. `fingerprint` changes whenever the same text could give other ids."""

    name: str
    vocab_size: int
    eos_id: int
    fingerprint: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without any token added."""

    @abstractmethod
    def encode_documents(self, texts: list[str]) -> EncodedDocuments:
        """The ids of all texts in one array, an end-of-text token after each."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, end-of-text tokens included."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte, and 256 for the end of a text."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256
    fingerprint = hashlib.sha256(b"bytes, eos 256").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def encode_documents(self, texts: list[str]) -> EncodedDocuments:
        return _joined((np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts), self.eos_id)

    def decode(self, ids: Iterable[int]) -> str:
        end = END_OF_TEXT.encode()
        return b"".join(end if id_ == self.eos_id else bytes([id_]) for id_ in ids).decode("utf-8", errors="replace")


class BpeTokenizer(Tokenizer):
    """Any tokenizer.json, through `tokenizers`."""

    def __init__(self, name: str, serialised: str, eos_token: str | int | None = None) -> None:
        import tokenizers  # 0.1 s that users of bytes and readers of finished caches need not pay

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(serialised)
        except Exception as error:  # the library raises bare Exception for a file it cannot read
            raise DataError(
                f"tokenizer {name!r} is not a tokenizer.json that `tokenizers` can read: {error}",
                remedy="give a tokenizer.json saved by `tokenizers` or a fast transformers tokenizer",
                code="MC907",
            ) from error
        # Files saved after fine-tuning often carry a maximum length, which would silently cut documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = name
        self.serialised = serialised
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_id = _eos_id(name, vocabulary, eos_token)
        self.fingerprint = hashlib.sha256(f"{self.eos_id}\n{serialised}".encode()).hexdigest()
        self._encode_documents: Callable[[list[str]], EncodedDocuments] | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_documents(self, texts: list[str]) -> EncodedDocuments:
        if self._encode_documents is None:
            self._encode_documents = documents_encoder(self.serialised, self.eos_id)
        return self._encode_documents(texts)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def documents_encoder(serialised: str, eos_id: int) -> Callable[[list[str]], EncodedDocuments]:
    """Encodes many documents at a time: through the word cache where it is exact, else in one plain call."""
    from model_check.data.pre_tokens import splitter
    from model_check.data.word_cache import WordCache

    split = splitter(serialised)
    if split is not None:
        return WordCache(serialised, split, eos_id).encode
    plain = BpeTokenizer("plain", serialised, eos_id)

    return lambda texts: _joined(plain.encode_batch(texts), eos_id)


def _joined(documents: Iterable[Sequence[int] | np.ndarray], eos_id: int) -> EncodedDocuments:
    """The ids of all documents in one array, with the end-of-text token after each."""
    ended = [np.append(np.asarray(ids, dtype=np.uint32), np.uint32(eos_id)) for ids in documents]
    lengths = np.fromiter(map(len, ended), dtype=np.int64, count=len(ended))
    return EncodedDocuments(np.concatenate(ended) if ended else np.zeros(0, dtype=np.uint32), lengths)


def _eos_id(name: str, vocabulary: dict[str, int], eos_token: str | int | None) -> int:
    if isinstance(eos_token, int):
        return eos_token
    for candidate in (eos_token, *EOS_NAMES):
        if candidate is not None and candidate in vocabulary:
            return vocabulary[candidate]
    raise DataError(
        f"tokenizer {name!r} has no end-of-text token (looked for {', '.join(EOS_NAMES)})",
        remedy="name it as eos_token in a tokenizer_config.json beside the tokenizer.json",
        code="MC907",
    )


def load_tokenizer(name: str) -> Tokenizer:
    """`builtin`, `bytes`, a path to a tokenizer.json or its folder, or a hub id such as `openai-community/gpt2`."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "builtin":
        return BpeTokenizer(name, BUILTIN.read_text(encoding="utf-8"))
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_files(name, path / "tokenizer.json", path / "tokenizer_config.json")
    if path.is_file():
        return _from_files(name, path, path.with_name("tokenizer_config.json"))
    if path.suffix == ".json" or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise DataError(
            f"tokenizer {name!r} does not exist",
            remedy="give 'builtin', 'bytes', the path of a tokenizer.json, or a hub id",
            code="MC907",
        )
    from model_check.data.hub import download

    return _from_files(name, download(name, "tokenizer.json"), download(name, "tokenizer_config.json", required=False))


def _from_files(name: str, tokenizer_file: Path | None, config_file: Path | None) -> Tokenizer:
    if tokenizer_file is None or not tokenizer_file.is_file():
        raise DataError(
            f"tokenizer {name!r} holds no tokenizer.json",
            remedy="save it with a fast transformers tokenizer, which writes one",
            code="MC907",
        )
    try:
        serialised = tokenizer_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{tokenizer_file} cannot be read: {error}", code="MC907") from error
    return BpeTokenizer(name, serialised, _eos_token_of(config_file))


def _eos_token_of(config_file: Path | None) -> str | None:
    if config_file is None or not config_file.is_file():
        return None
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{config_file} is not JSON: {error}", code="MC907") from error
    token = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
