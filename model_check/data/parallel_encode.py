"""Tokenizing on every core: text batches go to worker processes, ids come back in the order of the source.

Workers are plain interpreters that read frames on stdin and answer on stdout, not forks or spawned copies of the
caller: they inherit no threads, no CUDA and no `__main__`, and they end by themselves when their parent does.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue
from typing import BinaryIO

import numpy as np

from model_check.data.encoded import EncodedDocuments
from model_check.data.tokenizer import BpeTokenizer, Tokenizer, documents_encoder
from model_check.errors import DataError

BATCH_CHARS = 1 << 20
WORTH_WORKERS_CHARS = 4 << 20
"""Less text than this is tokenized before workers would have started."""
_HEADER = struct.Struct("<qq")


@dataclass(frozen=True)
class TextBatch:
    """Documents of a source, and the part of the source read so far (0 to 1; None where its size is unknown)."""

    texts: list[str]
    fraction: float | None


@dataclass(frozen=True)
class EncodedBatch:
    """What became of a TextBatch."""

    documents: EncodedDocuments
    fraction: float | None


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_batches(
    batches: Iterable[TextBatch], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[EncodedBatch]:
    """Every batch tokenized, in order; on `workers` processes (None: one a core) where the text is worth them."""
    count = default_workers() if workers is None else workers
    if count <= 1 or not isinstance(tokenizer, BpeTokenizer):
        yield from _encode_here(batches, tokenizer)
        return
    stream = iter(batches)
    head: list[TextBatch] = []
    size = 0
    for batch in stream:
        head.append(batch)
        size += sum(map(len, batch.texts))
        if size >= WORTH_WORKERS_CHARS:
            break
    if size < WORTH_WORKERS_CHARS:
        yield from _encode_here(head, tokenizer)
        return
    yield from _encode_on_workers(chain(head, stream), tokenizer, count)


def _encode_here(batches: Iterable[TextBatch], tokenizer: Tokenizer) -> Iterator[EncodedBatch]:
    for batch in batches:
        yield EncodedBatch(tokenizer.encode_documents(batch.texts), batch.fraction)


def _encode_on_workers(batches: Iterable[TextBatch], tokenizer: BpeTokenizer, count: int) -> Iterator[EncodedBatch]:
    idle: SimpleQueue[_Worker] = SimpleQueue()
    team = [_Worker(tokenizer) for _ in range(count)]
    for worker in team:
        idle.put(worker)

    def encode(batch: TextBatch) -> EncodedBatch:
        worker = idle.get()
        try:
            return EncodedBatch(worker.encode(batch.texts), batch.fraction)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(count, thread_name_prefix="tokenize")
    waiting: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for worker in team:
            worker.stop()
        pool.shutdown(wait=True)


class _Worker:
    """One interpreter that tokenizes what it is sent."""

    def __init__(self, tokenizer: BpeTokenizer) -> None:
        # Each worker is one core's worth: the library's own threads would only contend.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from model_check.data.parallel_encode import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None and self._process.stdout is not None, "Popen was asked for pipes"
        self._stdin: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._stdout: BinaryIO = self._process.stdout  # type: ignore[assignment]
        self._greeting: list[str] | None = [tokenizer.serialised, str(tokenizer.eos_id)]

    def encode(self, texts: list[str]) -> EncodedDocuments:
        try:
            if self._greeting is not None:
                _send_texts(self._stdin, self._greeting)
                self._greeting = None
            _send_texts(self._stdin, texts)
            documents = _receive_documents(self._stdout)
        except (OSError, ValueError):
            documents = None
        if documents is None:
            code = self._process.wait()
            raise DataError(
                f"a tokenizer process ended with code {code} before its work was done",
                remedy="see its message above; with code -9 the machine was out of memory: use fewer workers",
            )
        return documents

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        with suppress(BrokenPipeError):  # bytes it will never read
            self._stdin.close()


def serve() -> None:
    """The worker's side: a greeting with the tokenizer, then batches until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    greeting = _receive_texts(source)
    if greeting is None:
        return
    serialised, eos_id = greeting
    encode = documents_encoder(serialised, int(eos_id))
    while (texts := _receive_texts(source)) is not None:
        _send_documents(sink, encode(texts))


def _send_texts(pipe: BinaryIO, texts: list[str]) -> None:
    encoded = [text.encode("utf-8") for text in texts]
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    pipe.write(_HEADER.pack(len(encoded), int(lengths.sum())))
    pipe.write(lengths.tobytes())
    pipe.write(b"".join(encoded))
    pipe.flush()


def _receive_texts(pipe: BinaryIO) -> list[str] | None:
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    count, size = _HEADER.unpack(header)
    ends = np.cumsum(np.frombuffer(pipe.read(8 * count), dtype=np.int64)).tolist()
    data = pipe.read(size)
    if len(data) < size:
        return None
    return [data[start:end].decode("utf-8") for start, end in zip([0, *ends], ends, strict=False)]


def _send_documents(pipe: BinaryIO, documents: EncodedDocuments) -> None:
    pipe.write(_HEADER.pack(len(documents.lengths), len(documents.ids)))
    pipe.write(np.ascontiguousarray(documents.lengths, dtype=np.int64).tobytes())
    pipe.write(np.ascontiguousarray(documents.ids, dtype=np.uint32).tobytes())
    pipe.flush()


def _receive_documents(pipe: BinaryIO) -> EncodedDocuments | None:
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    count, size = _HEADER.unpack(header)
    lengths = np.frombuffer(pipe.read(8 * count), dtype=np.int64)
    ids = np.frombuffer(pipe.read(4 * size), dtype=np.uint32)
    return EncodedDocuments(ids=ids, lengths=lengths) if len(ids) == size else None
