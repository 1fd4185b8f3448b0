"""From a DataSpec to an open cache: built once by one process while the others wait, committed by rename.

<cache_dir>/<key>/train/…             the finished cache (packed.py says what is inside)
<cache_dir>/<key>/valid/…             where documents were held out
<cache_dir>/<key>.lock                held by the one that builds; released by the system when that one dies
<cache_dir>/<key>.building-<pid>/     a build under way, or what a killed builder left behind
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model_check.data import synthetic
from model_check.data.packed import FORMAT_VERSION, EncodedDocuments, PackedCache, SplitWriter
from model_check.data.parallel_encode import EncodedBatch, encode_batches
from model_check.data.sources import Source, resolve_source, text_batches
from model_check.data.spec import DataSpec
from model_check.data.tokenizer import Tokenizer, load_tokenizer
from model_check.errors import CacheDamaged, DataError

VERIFY_AT_OPEN_BYTES = 256 << 20
"""A cache up to this size is read whole whenever it is prepared: a tenth of a second, and nothing is left to find."""


Progress = Callable[[int, "int | None", "float | None"], None]
"""Called with documents done, documents in all and seconds left; the last two are estimates, None where the source does
not say how large it is."""


@dataclass(frozen=True)
class PreparedData:
    """The open cache, and what happened on the way to it, in sentences."""

    train: PackedCache
    valid: PackedCache | None
    built: bool
    messages: list[str]
    seconds: float

    @property
    def tokens(self) -> int:
        return self.train.tokens + (self.valid.tokens if self.valid else 0)


def prepare(
    spec: DataSpec,
    *,
    progress: Progress | None = None,
    workers: int | None = None,
    waiting: Callable[[str], None] | None = None,
    verify: bool = False,
) -> PreparedData:
    """Opens the cache of this spec, building it first where it is missing or damaged.

    progress called after every batch of documents (see Progress)
    workers  processes that tokenize (None: one a core)
    waiting  called with a sentence when another process is building it
    verify   reads every byte of an existing cache, however large
    """
    started = time.perf_counter()
    tokenizer = load_tokenizer(spec.tokenizer)
    source = None if spec.dataset == "synthetic" else resolve_source(spec)
    identity = _identity(spec, tokenizer, source)
    job = _Job(spec, tokenizer, source, identity, progress, workers, verify)
    folder = Path(spec.cache_dir).expanduser() / _key(spec, identity)
    try:
        found = job.open(folder)
    except CacheDamaged:
        found = None  # looked at again under the lock: another process may be replacing it right now
    built = False
    if found is None:
        with _only_builder(folder, waiting):
            found = job.open_or_clear(folder)
            if found is None:
                found = job.build(folder)
                built = True
    train, valid = found
    if valid is None and spec.validation_fraction > 0:
        job.messages.append(
            f"no validation data: a share of {spec.validation_fraction:g} of the documents is less than one sample"
        )
    return PreparedData(train, valid, built, job.messages, time.perf_counter() - started)


def _identity(spec: DataSpec, tokenizer: Tokenizer, source: Source | None) -> dict[str, Any]:
    """All that decides which tokens are written. Two specs with the same identity share a cache."""
    documents: dict[str, Any]
    if source is None:
        documents = {
            "kind": "synthetic",
            "generator": synthetic.GENERATOR_VERSION,
            "seed": spec.seed,
            "documents": synthetic.document_count(spec),
        }
    else:
        documents = {**source.identity, "samples": spec.samples}
    return {
        "format": FORMAT_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "context_length": spec.context_length,
        "validation_fraction": spec.validation_fraction,
        "source": documents,
    }


def _key(spec: DataSpec, identity: dict[str, Any]) -> str:
    """Readable in front, exact behind."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", Path(spec.dataset).name).strip("-")[:32]
    return f"{readable or 'data'}-{digest[:20]}"


@contextmanager
def _only_builder(folder: Path, waiting: Callable[[str], None] | None) -> Iterator[None]:
    from filelock import FileLock, Timeout  # imports asyncio: 0.15 s that a rank with a finished cache need not pay

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if waiting is not None:
                waiting(f"another process is building the data cache {folder}; waiting for it")
            lock.acquire(poll_interval=0.05)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder.parent} cannot be written: {error.strerror or error}",
            remedy="set data.cache_dir to a folder you may write to",
        ) from error
    try:
        yield
    finally:
        lock.release()


Splits = tuple[PackedCache, PackedCache | None]


@dataclass
class _Job:
    """One call of `prepare`: what it works on, and the sentences it collects."""

    spec: DataSpec
    tokenizer: Tokenizer
    source: Source | None
    identity: dict[str, Any]
    progress: Progress | None
    workers: int | None
    verify: bool
    messages: list[str] = field(default_factory=list)

    def open(self, folder: Path) -> Splits | None:
        """The finished cache, or None where there is none; raises CacheDamaged."""
        if not folder.is_dir():
            return None
        train = PackedCache.open(folder / "train")
        valid = PackedCache.open(folder / "valid") if train.manifest.origin.get("valid_tokens") else None
        caches = [train, valid] if valid else [train]
        if self.verify or sum(cache.size_bytes for cache in caches) <= VERIFY_AT_OPEN_BYTES:
            for cache in caches:
                cache.check_all()
        return train, valid

    def open_or_clear(self, folder: Path) -> Splits | None:
        """Under the lock: the cache another process finished meanwhile, or None with every wreck out of the way."""
        for wreck in sorted(folder.parent.glob(f"{folder.name}.building-*")):
            builder = wreck.name.rpartition("-")[2]
            self.messages.append(f"a build of the data cache was cut short (process {builder}); it was started again")
            _remove(wreck)
        try:
            return self.open(folder)
        except CacheDamaged as error:
            self.messages.append(f"{error.message}; it was built again")
            doomed = folder.with_name(f"{folder.name}.building-{os.getpid()}")
            folder.rename(doomed)  # first out of sight: nobody may open a cache that is half deleted
            _remove(doomed)
            return None

    def build(self, folder: Path) -> Splits:
        scratch = folder.with_name(f"{folder.name}.building-{os.getpid()}")
        try:
            self._write(scratch)
            scratch.rename(folder)
            _sync_folder(folder.parent)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"the disk of {folder.parent} is full", remedy="free space, or set data.cache_dir to another disk"
                ) from error
            raise DataError(f"the data cache {folder} cannot be written: {error}") from error
        finally:
            if scratch.exists():
                _remove(scratch)
        train = PackedCache.open(folder / "train")
        return train, PackedCache.open(folder / "valid") if train.manifest.origin["valid_tokens"] else None

    def _write(self, scratch: Path) -> None:
        spec = self.spec
        origin = {"dataset": spec.dataset, "tokenizer": spec.tokenizer, **self.identity}
        valid = SplitWriter(scratch / "valid", self.tokenizer.vocab_size, origin)
        train = SplitWriter(scratch / "train", self.tokenizer.vocab_size, origin)
        started = time.perf_counter()
        seen = 0
        batches = self._encoded()
        try:
            for batch in batches:
                kept, held_out = _split(batch.documents, seen, spec.validation_fraction)
                train.append(kept)
                valid.append(held_out)
                seen += len(batch.documents.lengths)
                self._report(seen, batch.fraction, started)
        except BaseException:
            train.abandon()
            valid.abandon()
            raise
        finally:
            batches.close()  # ends the tokenizer processes
        valid_tokens = valid.tokens if valid.tokens > spec.context_length else 0
        if valid_tokens:
            valid.finish()
        else:
            valid.abandon()
            shutil.rmtree(valid.folder)
        train.origin["valid_tokens"] = valid_tokens
        if train.tokens <= spec.context_length:
            train.abandon()
            what = "no text" if seen == 0 else f"{train.tokens} tokens in {seen} documents"
            raise DataError(
                f"dataset {spec.dataset!r} holds {what}, less than one sample of {spec.context_length} + 1 tokens",
                remedy="use more text or a shorter context_length",
                code="MC904",
            )
        train.finish()

    def _encoded(self) -> Generator[EncodedBatch, None, None]:
        if self.source is None:
            total = synthetic.document_count(self.spec)
            done = 0
            for documents in synthetic.synthetic_documents(self.spec, self.tokenizer):
                done += len(documents.lengths)
                yield EncodedBatch(documents, done / total)
        else:
            yield from encode_batches(text_batches(self.source, self.spec.samples), self.tokenizer, self.workers)

    def _report(self, documents: int, fraction: float | None, started: float) -> None:
        if self.progress is None:
            return
        if not fraction:
            self.progress(documents, None, None)
            return
        seconds = time.perf_counter() - started
        self.progress(documents, round(documents / fraction), seconds * (1 - fraction) / fraction)


def _split(documents: EncodedDocuments, first: int, fraction: float) -> tuple[EncodedDocuments, EncodedDocuments]:
    """Documents to train on and to hold out: every 1/fraction-th of the whole source, wherever batches begin."""
    numbers = np.arange(first, first + len(documents.lengths) + 1)
    held_out = np.diff(np.floor(numbers * fraction)) > 0
    if not held_out.any():
        return documents, EncodedDocuments(documents.ids[:0], documents.lengths[:0])
    of_token = np.repeat(held_out, documents.lengths)
    return (
        EncodedDocuments(documents.ids[~of_token], documents.lengths[~held_out]),
        EncodedDocuments(documents.ids[of_token], documents.lengths[held_out]),
    )


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be removed: {error.strerror or error}", remedy="remove it by hand") from error


def _sync_folder(folder: Path) -> None:
    """So that the rename itself survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
