"""Tokenizing on every core: text batches go to worker processes, ids come back in the order of the source.

Workers are plain interpreters that read pickles on stdin and answer on stdout, not forks or spawned copies of the
caller: they inherit no threads, no CUDA and no `__main__`, and they end by themselves when their parent does.
"""

from __future__ import annotations

import os
import pickle
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

from model_check.data.packed import EncodedDocuments
from model_check.data.tokenizer import BpeTokenizer, Tokenizer, documents_encoder
from model_check.errors import DataError

BATCH_CHARS = 1 << 20
WORTH_WORKERS_CHARS = 4 << 20
"""Less text than this is tokenized before workers would have started."""


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


def encode_batches(
    batches: Iterable[TextBatch], tokenizer: Tokenizer, workers: int | None = None
) -> Iterator[EncodedBatch]:
    """Every batch tokenized, in order; on `workers` processes (None: one a core) where the text is worth them."""
    count = len(os.sched_getaffinity(0)) if workers is None else workers
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
        self._greeting: tuple[str, int] | None = (tokenizer.serialised, tokenizer.eos_id)

    def encode(self, texts: list[str]) -> EncodedDocuments:
        try:
            if self._greeting is not None:
                _send(self._stdin, self._greeting)
                self._greeting = None
            _send(self._stdin, texts)
            return EncodedDocuments(*pickle.load(self._stdout))  # the bytes of our own child
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):
            code = self._process.wait()
            raise DataError(
                f"a tokenizer process ended with code {code} before its work was done",
                remedy="see its message above; with code -9 the machine was out of memory: use fewer workers",
            ) from None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        with suppress(BrokenPipeError):  # bytes it will never read
            self._stdin.close()


def serve() -> None:
    """The worker's side: a greeting with the tokenizer, then batches until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError, pickle.UnpicklingError):  # the caller is gone
        encode = documents_encoder(*pickle.load(source))
        while True:
            documents = encode(pickle.load(source))
            _send(sink, (documents.ids, documents.lengths))


def _send(pipe: BinaryIO, content: object) -> None:
    pickle.dump(content, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()
