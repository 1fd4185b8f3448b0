"""Where text comes from: files, saved datasets, the hub. Each becomes a stream of documents with an identity.

A document is a record of a .jsonl, .parquet or dataset, or a paragraph of a .txt: blank lines separate documents. A
paragraph beyond LONGEST_PARAGRAPH is cut at a line end, so that a file without blank lines is read in bounded memory.
Documents without any text are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_check.data import hub
from model_check.data.parallel_encode import BATCH_CHARS, TextBatch
from model_check.data.spec import DataSpec
from model_check.errors import DataError

LONGEST_PARAGRAPH = 4 << 20
ROWS_AT_ONCE = 1000
Document = tuple[str, float | None]
"""A text, and the part of the source read once it is done (None: size unknown)."""


@dataclass(frozen=True)
class Source:
    """`identity` goes into the cache key: the same identity means the same documents."""

    identity: dict[str, Any]
    documents: Callable[[], Iterator[Document]]


def text_batches(source: Source, samples: int | None) -> Iterator[TextBatch]:
    """The source's first `samples` documents (None: all) in batches of about a megabyte."""
    texts: list[str] = []
    chars = taken = 0
    fraction: float | None = None
    for text, fraction in source.documents():
        if not text or text.isspace():
            continue
        texts.append(_well_formed(text))
        chars += len(text)
        taken += 1
        if samples is not None:
            fraction = max(fraction or 0.0, taken / samples)
        if chars >= BATCH_CHARS:
            yield TextBatch(texts, fraction)
            texts, chars = [], 0
        if taken == samples:
            break
    if texts:
        yield TextBatch(texts, fraction)


def _well_formed(text: str) -> str:
    """JSON can carry half a surrogate pair, which no encoding has: it becomes the replacement character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def resolve_source(spec: DataSpec) -> Source:
    """The source behind `spec.dataset`: a path or glob where it looks like one or exists, else a hub name."""
    path = Path(spec.dataset).expanduser()
    name = str(path)
    if path.is_dir() and _is_saved_dataset(path):
        return _saved_dataset(path, spec)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in READERS and file.is_file())
        return _files(spec, files, f"folder {spec.dataset!r} holds no {_known_suffixes()} file")
    if path.is_file():
        return _files(spec, [path], "")
    if any(sign in name for sign in "*?["):
        anchor = Path(path.anchor)
        matches = sorted(anchor.glob(str(path.relative_to(anchor))))
        files = [file for file in matches if file.suffix in READERS and file.is_file()]
        return _files(spec, files, f"{spec.dataset!r} matches no {_known_suffixes()} file")
    if path.exists():
        raise DataError(
            f"{spec.dataset!r} is neither a file nor a folder, but a pipe, a device or a socket",
            remedy="write what comes out of it to a file first: it is read more than once",
            code="MC906",
        )
    if path.suffix in READERS or spec.dataset.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise DataError(
            f"{spec.dataset!r} does not exist (looked in {Path.cwd()})",
            remedy="check the path; a hub name has the form owner/name",
            code="MC906",
        )
    return _hub_dataset(spec)


def _known_suffixes() -> str:
    return ", ".join(READERS)


# --- files -------------------------------------------------------------------------------------------------------


def _files(spec: DataSpec, files: list[Path], if_none: str) -> Source:
    if not files:
        raise DataError(if_none, remedy=f"give {_known_suffixes()} files or a saved dataset", code="MC904")
    for file in files:
        if file.suffix not in READERS:
            raise DataError(
                f"{file} has the suffix {file.suffix!r}", remedy=f"use one of {_known_suffixes()}", code="MC906"
            )
    try:
        stats = [file.stat() for file in files]
    except OSError as error:
        raise _unreadable(Path(error.filename), error) from error
    total = sum(stat.st_size for stat in stats) or 1

    def documents() -> Iterator[Document]:
        before = 0
        for file, stat in zip(files, stats, strict=True):
            try:
                for text, share in READERS[file.suffix](file, spec.text_field):
                    yield text, (before + share * stat.st_size) / total
            except OSError as error:
                raise _unreadable(file, error) from error
            before += stat.st_size

    listing = [[str(file.resolve()), stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
    return Source({"kind": "files", "files": listing, "text_field": spec.text_field}, documents)


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(
        f"{file} cannot be read: {error.strerror or error}", remedy="check it and its rights", code="MC906"
    )


def _read_txt(file: Path, text_field: str) -> Iterator[tuple[str, float]]:
    size = file.stat().st_size or 1
    lines: list[str] = []
    length = 0
    for number, raw, done in _lines(file):
        try:
            line = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}:{number} is not UTF-8 (byte {done - len(raw) + error.start})",
                remedy="convert the file to UTF-8",
                code="MC906",
            ) from error
        blank = not line or line.isspace()
        if not blank:
            lines.append(line)
            length += len(line) + 1
        if lines and (blank or length >= LONGEST_PARAGRAPH):
            yield "\n".join(lines), done / size
            lines, length = [], 0
    if lines:
        yield "\n".join(lines), 1.0


def _lines(file: Path) -> Iterator[tuple[int, bytes, int]]:
    """Each line with its number, and how many bytes of the file are read after it."""
    done = 0
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            done += len(raw)
            yield number, raw, done


def _read_jsonl(file: Path, text_field: str) -> Iterator[tuple[str, float]]:
    size = file.stat().st_size or 1
    for number, raw, done in _lines(file):
        if raw.isspace():
            continue
        try:
            record = json.loads(raw)
        except ValueError as error:
            raise DataError(
                f"{file}:{number} is not JSON: {error}", remedy="put one JSON object on each line", code="MC906"
            ) from error
        yield _text_of(record, text_field, f"{file}:{number}"), done / size


def _text_of(record: Any, text_field: str, where: str) -> str:
    """The text of a record; a null text is an empty one."""
    if isinstance(record, str):
        return record
    if isinstance(record, dict) and text_field in record:
        value = record[text_field]
        if value is None or isinstance(value, str):
            return value or ""
        raise DataError(
            f"{where}: field {text_field!r} is of type {type(value).__name__}, not text",
            remedy="name the field that holds the text in data.text_field",
            code="MC906",
        )
    fields = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
    raise DataError(
        f"{where} has no field {text_field!r} (it has: {fields})",
        remedy="name the field that holds the text in data.text_field",
        code="MC906",
    )


def _read_parquet(file: Path, text_field: str) -> Iterator[tuple[str, float]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a parquet file: {error}", remedy="write it again", code="MC906") from error
    with table:
        _check_column(table.schema_arrow.names, text_field, str(file))
        batches = table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[text_field])
        yield from _rows_of(batches, table.metadata.num_rows, text_field, str(file))


def _check_column(names: list[str], text_field: str, where: str) -> None:
    if text_field not in names:
        raise DataError(
            f"{where} has no column {text_field!r} (it has: {', '.join(names)})",
            remedy="name the column that holds the text in data.text_field",
            code="MC906",
        )


def _rows_of(batches: Iterable[Any], rows: int, text_field: str, where: str) -> Iterator[tuple[str, float]]:
    """The texts in batches of Arrow, whose only column is the text."""
    values = (value for batch in batches for value in batch.column(0).to_pylist())
    for number, value in enumerate(values, start=1):
        yield _text_of({text_field: value}, text_field, f"{where}, row {number}"), number / rows


READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, float]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


# --- datasets ----------------------------------------------------------------------------------------------------


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _saved_dataset(folder: Path, spec: DataSpec) -> Source:
    """A folder written by `datasets`' save_to_disk; of several splits the one named."""
    several = (folder / "dataset_dict.json").is_file()
    part = folder / spec.split if several else folder
    if several and not part.is_dir():
        splits = ", ".join(sorted(child.name for child in folder.iterdir() if child.is_dir()))
        raise DataError(
            f"{folder} has no split {spec.split!r}", remedy=f"set data.split to one of {splits}", code="MC906"
        )

    def documents() -> Iterator[Document]:
        import datasets

        try:
            dataset = datasets.load_from_disk(str(part))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{part} is not a whole saved dataset: {error}", remedy="save it again", code="MC906"
            ) from error
        yield from _table_documents(dataset, spec.text_field, str(part))

    listing = [
        [file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(part.iterdir()) if file.is_file()
    ]
    identity = {"kind": "saved", "folder": str(part.resolve()), "files": listing, "text_field": spec.text_field}
    return Source(identity, documents)


def _hub_dataset(spec: DataSpec) -> Source:
    repo_id, subset = hub.dataset_name(spec.dataset, spec.subset)
    worth_streaming = repo_id in hub.LARGE or spec.samples is not None
    streaming = worth_streaming if spec.streaming == "auto" else spec.streaming == "on"
    if repo_id in hub.LARGE and spec.samples is None:
        raise DataError(
            f"dataset {spec.dataset!r} is too large to prepare whole", remedy="set data.samples, such as 100000"
        )

    def documents() -> Iterator[Document]:
        dataset = hub.open_dataset(spec.dataset, spec.subset, spec.split, streaming=streaming)
        if hasattr(dataset, "num_rows"):  # also where streaming was asked for and the local copy answered
            yield from _table_documents(dataset, spec.text_field, f"dataset {spec.dataset!r}")
            return
        for number, row in enumerate(hub.stream_rows(dataset, spec.dataset)):
            yield _text_of(row, spec.text_field, f"dataset {spec.dataset!r}, row {number}"), None

    identity = {"kind": "hub", "repo": repo_id, "subset": subset, "split": spec.split, "text_field": spec.text_field}
    return Source(identity, documents)


def _table_documents(dataset: Any, text_field: str, where: str) -> Iterator[Document]:
    _check_column(list(dataset.column_names), text_field, where)
    batches = dataset.select_columns([text_field]).with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
    yield from _rows_of(batches, dataset.num_rows, text_field, where)
