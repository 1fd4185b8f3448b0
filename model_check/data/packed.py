"""The packed cache on disk: all tokens of a split in one memory-mapped file, checked as it is read.

    tokens.bin      uint16 (vocabulary ≤ 65536) or uint32, documents one after another, each with its end-of-text token
    documents.bin   int64, where each document begins
    checksums.bin   xxh3 of every 64 KiB block of tokens.bin, then of documents.bin
    manifest.json   dtype, counts, greatest id, what it was made from, and a checksum of itself

Opening reads the manifest and the sizes: milliseconds and no memory, whatever the number of tokens. A block is checked
the first time it is touched; `verify` checks all. Blocks are small because a random sample of 16 KiB pays for a whole
block: with 1 MiB blocks the first epoch on a cold disk would read 64 times its data.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from model_check.errors import CacheDamaged, DataError

FORMAT_VERSION = 1
BLOCK_BYTES = 1 << 16
TOKENS, DOCUMENTS, CHECKSUMS, MANIFEST, DAMAGED = (
    "tokens.bin",
    "documents.bin",
    "checksums.bin",
    "manifest.json",
    "damaged",
)


@dataclass(frozen=True)
class EncodedDocuments:
    """Whole documents, one after another, each with its end-of-text token; `lengths` counts that token too."""

    ids: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Manifest:
    """What a split holds. `origin` says what it was made from, for a person who finds the folder."""

    format_version: int
    dtype: str
    tokens: int
    documents: int
    max_token_id: int
    block_bytes: int
    origin: dict[str, Any]

    def to_json(self) -> str:
        content = asdict(self)
        return json.dumps({**content, "checksum": _checksum_of(content)}, indent=1, ensure_ascii=False) + "\n"


def _checksum_of(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _damaged(folder: Path, what: str) -> CacheDamaged:
    return CacheDamaged(
        f"the data cache {folder} is damaged: {what}",
        remedy="start the command again, which builds it anew; if it happens twice, check the disk",
        code="MC901",
    )


def _read_manifest(folder: Path) -> Manifest:
    try:
        # Strict about bytes as well as values: a flip that JSON would read as white space still changes the file.
        raw = (folder / MANIFEST).read_text(encoding="utf-8")
        content = json.loads(raw)
        checksum = content.pop("checksum")
        manifest = Manifest(**content)
    except FileNotFoundError:
        raise _damaged(folder, f"{MANIFEST} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({type(error).__name__})") from error
    if checksum != _checksum_of(content) or raw != manifest.to_json():
        raise _damaged(folder, f"{MANIFEST} differs from its checksum")
    if manifest.format_version != FORMAT_VERSION:
        raise _damaged(folder, f"format {manifest.format_version}, this version reads {FORMAT_VERSION}")
    return manifest


class _CheckedFile:
    """A memory-mapped array whose blocks are compared with their checksums when first touched."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], count: int, checksums: np.ndarray) -> None:
        self._folder, self._name = folder, name
        self.array = np.memmap(folder / name, dtype=dtype, mode="r", shape=(count,))
        self._bytes = self.array.view(np.uint8)
        self._checksums = checksums
        self._checked = np.zeros(len(checksums), dtype=bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Items [start, stop), each block of them known to be what was written."""
        if stop > start:
            width = self.array.itemsize
            first, last = start * width // BLOCK_BYTES, (stop * width - 1) // BLOCK_BYTES
            if not self._checked[first : last + 1].all():
                for block in range(first, last + 1):
                    self.check(block)
        return self.array[start:stop]

    def check(self, block: int) -> None:
        if self._checked[block]:
            return
        data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if xxhash.xxh3_64_intdigest(data.data) != int(self._checksums[block]):
            what = f"block {block} of {self._name} (byte {block * BLOCK_BYTES}) differs from its checksum"
            _leave_mark(self._folder, what)
            raise _damaged(self._folder, what)
        self._checked[block] = True

    def fingerprint(self) -> str:
        """Of the whole content, by way of its checksums."""
        digest = xxhash.xxh3_128(f"{self.array.dtype} {len(self.array)} ".encode())
        digest.update(np.ascontiguousarray(self._checksums).data)
        return digest.hexdigest()

    @property
    def blocks(self) -> int:
        return len(self._checksums)


def _leave_mark(folder: Path, what: str) -> None:
    """So that the next `prepare` rebuilds at once instead of meeting the same block in the middle of a run."""
    try:
        (folder / DAMAGED).write_text(what + "\n", encoding="utf-8")
    except OSError:
        return  # a read-only cache cannot be marked; the error that follows says all


class PackedCache:
    """One split, open for reading."""

    def __init__(self, folder: Path, manifest: Manifest, tokens: _CheckedFile, documents: _CheckedFile) -> None:
        self.folder = folder
        self.manifest = manifest
        self._tokens = tokens
        self._documents = documents

    @classmethod
    def open(cls, folder: str | Path) -> PackedCache:
        """Checks the manifest and the size of every file; raises CacheDamaged."""
        folder = Path(folder)
        manifest = _read_manifest(folder)
        mark = folder / DAMAGED
        if mark.exists():
            raise _damaged(folder, mark.read_text(encoding="utf-8", errors="replace").strip())
        dtype = np.dtype(manifest.dtype)
        token_bytes, document_bytes = manifest.tokens * dtype.itemsize, manifest.documents * 8
        token_blocks, document_blocks = _blocks(token_bytes), _blocks(document_bytes)
        sizes = {TOKENS: token_bytes, DOCUMENTS: document_bytes, CHECKSUMS: 8 * (token_blocks + document_blocks)}
        for name, expected in sizes.items():
            try:
                found = (folder / name).stat().st_size
            except FileNotFoundError:
                raise _damaged(folder, f"{name} is missing") from None
            if found != expected:
                raise _damaged(folder, f"{name} has {found} bytes instead of {expected}")
        checksums = np.memmap(folder / CHECKSUMS, dtype=np.uint64, mode="r")
        return cls(
            folder,
            manifest,
            _CheckedFile(folder, TOKENS, dtype, manifest.tokens, checksums[:token_blocks]),
            _CheckedFile(folder, DOCUMENTS, np.dtype(np.int64), manifest.documents, checksums[token_blocks:]),
        )

    @property
    def tokens(self) -> int:
        return self.manifest.tokens

    @property
    def documents(self) -> int:
        return self.manifest.documents

    @cached_property
    def fingerprint(self) -> str:
        """Of the tokens, whatever folder they lie in and whatever they were made from."""
        return self._tokens.fingerprint()

    def samples(self, context_length: int) -> int:
        """Sample i is tokens [i·T, i·T+T]: its last token is the next sample's first, so each is a target once."""
        return max(0, (self.tokens - 1) // context_length)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as a view of the file."""
        return self._tokens.read(start, stop)

    def document_starts(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        """The number of the document that holds token `start`, and where it and the later ones below `stop` begin."""
        first = self._documents_before(start + 1) - 1
        last = self._documents_before(stop)
        return first, self._documents.read(first, last)

    def _documents_before(self, token: int) -> int:
        """How many documents begin below this token, by bisection over checked blocks."""
        low, high = 0, self.documents
        while low < high:
            middle = (low + high) // 2
            if int(self._documents.read(middle, middle + 1)[0]) < token:
                low = middle + 1
            else:
                high = middle
        return low

    @property
    def size_bytes(self) -> int:
        """What reading all of it costs."""
        return self.tokens * np.dtype(self.manifest.dtype).itemsize + self.documents * 8

    def check_all(self) -> None:
        for file in (self._tokens, self._documents):
            for block in range(file.blocks):
                file.check(block)


def verify(cache: PackedCache) -> None:
    """Reads every byte; raises CacheDamaged at the first block that is not what was written."""
    cache.check_all()


def check_vocabulary(cache: PackedCache, vocab_size: int) -> None:
    """A token id the model has no row for would be a device-side assert on the first batch that holds it."""
    greatest = cache.manifest.max_token_id
    if greatest >= vocab_size:
        raise DataError(
            f"the data holds token id {greatest} and the model has a vocabulary of {vocab_size}",
            remedy=f"set model.vocab_size to at least {greatest + 1}, or use the tokenizer the model was made for",
            code="MC902",
        )


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


class SplitWriter:
    """Appends documents to a new split; `finish` makes it durable."""

    def __init__(self, folder: Path, vocab_size: int, origin: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.tokens = 0
        self.documents = 0
        self._dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._max_id = -1
        self.origin = dict(origin)
        self._tokens = _HashedFile(folder / TOKENS)
        self._starts = _HashedFile(folder / DOCUMENTS)

    def append(self, documents: EncodedDocuments) -> None:
        if len(documents.ids) == 0:
            return
        self._max_id = max(self._max_id, int(documents.ids.max()))
        self._tokens.write(np.ascontiguousarray(documents.ids, dtype=self._dtype).data)
        starts = self.tokens + np.cumsum(documents.lengths, dtype=np.int64) - documents.lengths
        self._starts.write(np.ascontiguousarray(starts, dtype=np.int64).data)
        self.tokens += len(documents.ids)
        self.documents += len(documents.lengths)

    def finish(self) -> None:
        checksums = np.array(self._tokens.finish() + self._starts.finish(), dtype=np.uint64)
        _write_durably(self.folder / CHECKSUMS, checksums.tobytes())
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            dtype=self._dtype.name,
            tokens=self.tokens,
            documents=self.documents,
            max_token_id=self._max_id,
            block_bytes=BLOCK_BYTES,
            origin=self.origin,
        )
        _write_durably(self.folder / MANIFEST, manifest.to_json().encode())

    def abandon(self) -> None:
        self._tokens.close()
        self._starts.close()


class _HashedFile:
    """Writes a file and the checksum of each of its blocks."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._pending = bytearray()
        self._checksums: list[int] = []

    def write(self, data: memoryview) -> None:
        self._pending += data.cast("B")
        whole = len(self._pending) - len(self._pending) % BLOCK_BYTES
        if whole:
            with memoryview(self._pending) as view:
                self._file.write(view[:whole])
                for start in range(0, whole, BLOCK_BYTES):
                    self._checksums.append(xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES]))
            del self._pending[:whole]

    def finish(self) -> list[int]:
        if self._pending:
            self._file.write(self._pending)
            self._checksums.append(xxhash.xxh3_64_intdigest(bytes(self._pending)))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return self._checksums

    def close(self) -> None:
        self._file.close()


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
