"""Sources: the same documents give the same tokens whatever file they come in; every bad file is named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.data import DataSpec, prepare
from model_check.data import sources as sources_module
from model_check.data.sources import resolve_source, text_batches
from model_check.errors import DataError


def _write_txt(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.txt"
    path.write_text("\n\n".join(texts), encoding="utf-8", newline="")
    return path


def _write_jsonl(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def _write_parquet(folder: Path, texts: list[str]) -> Path:
    path = folder / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=7)
    return path


def _write_saved(folder: Path, texts: list[str]) -> Path:
    path = folder / "saved"
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(path))
    return path


def _write_saved_splits(folder: Path, texts: list[str]) -> Path:
    path = folder / "splits"
    parts = {"train": datasets.Dataset.from_dict({"text": texts}), "test": datasets.Dataset.from_dict({"text": ["x"]})}
    datasets.DatasetDict(parts).save_to_disk(str(path))
    return path


def _write_folder(folder: Path, texts: list[str]) -> Path:
    path = folder / "folder"
    (path / "deep").mkdir(parents=True)
    _write_jsonl(path, texts[:30]).rename(path / "a.jsonl")
    _write_parquet(path / "deep", texts[30:]).rename(path / "deep" / "b.parquet")
    (path / "README").write_text("not data")
    return path


def _write_glob(folder: Path, texts: list[str]) -> Path:
    for i in range(0, len(texts), 25):
        _write_jsonl(folder, texts[i : i + 25]).rename(folder / f"part-{i:03d}.jsonl")
    return folder / "part-*.jsonl"


WRITERS: dict[str, Callable[[Path, list[str]], Path]] = {
    "txt": _write_txt,
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
    "saved": _write_saved,
    "saved splits": _write_saved_splits,
    "folder": _write_folder,
    "glob": _write_glob,
}


def _documents(path: Path | str, **more: object) -> list[str]:
    spec = DataSpec(dataset=str(path), **more)  # type: ignore[arg-type]
    return [text for batch in text_batches(resolve_source(spec), spec.samples) for text in batch.texts]


@pytest.mark.parametrize("kind", list(WRITERS))
def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path, texts: list[str], kind: str) -> None:
    assert _documents(WRITERS[kind](tmp_path, texts)) == texts


@pytest.mark.parametrize("kind", list(WRITERS))
def test_samples_counts_documents(tmp_path: Path, texts: list[str], kind: str) -> None:
    assert _documents(WRITERS[kind](tmp_path, texts), samples=37) == texts[:37]


def test_every_kind_of_file_gives_the_same_tokens(tmp_path: Path, texts: list[str]) -> None:
    found = {}
    for kind in ("txt", "jsonl", "parquet", "saved"):
        path = WRITERS[kind](tmp_path, texts)
        cache = prepare(DataSpec(dataset=str(path), context_length=32, cache_dir=tmp_path / "cache")).train
        found[kind] = cache.read(0, cache.tokens).tobytes()
    assert len(set(found.values())) == 1
    assert len(found["txt"]) > 1000


LINES = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))


@given(paragraphs=st.lists(st.lists(LINES.filter(str.strip), min_size=1, max_size=4), max_size=6), ending=st.booleans())
def test_blank_lines_separate_the_documents_of_a_text(
    tmp_path_factory: pytest.TempPathFactory, paragraphs: list[list[str]], ending: bool
) -> None:
    path = tmp_path_factory.mktemp("txt") / "data.txt"
    newline = "\r\n" if ending else "\n"
    expected = ["\n".join(lines) for lines in paragraphs]
    path.write_bytes((newline * 3).join(newline.join(lines) for lines in paragraphs).encode())
    assert _documents(path) == expected


def test_a_text_without_blank_lines_is_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "LONGEST_PARAGRAPH", 30)
    lines = [f"line number {i}" for i in range(9)]
    path = tmp_path / "data.txt"
    path.write_text("\n".join(lines))
    documents = _documents(path)
    assert "\n".join(documents) == "\n".join(lines)
    assert len(documents) == 3


def test_progress_reaches_the_end(tmp_path: Path, texts: list[str]) -> None:
    for kind in ("txt", "jsonl", "parquet", "folder", "saved"):
        source = resolve_source(DataSpec(dataset=str(WRITERS[kind](tmp_path, texts))))
        fractions = [fraction for _, fraction in source.documents() if fraction is not None]
        assert fractions == sorted(fractions)
        assert fractions[-1] == pytest.approx(1.0)
        assert len(fractions) == len(texts)


def test_other_text_fields_and_bare_strings(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"body": "one"}\n\n"two"\n{"body": null}\n{"body": "half a pair \\ud83d."}\n')
    assert _documents(path, text_field="body") == ["one", "two", "half a pair \ufffd."]


BAD_FILES = {
    "not JSON": ("data.jsonl", b'{"text": "a"}\n{"text": \n', r"data\.jsonl:2 is not JSON"),
    "no field": ("data.jsonl", b'{"body": "a", "id": 1}\n', r"data\.jsonl:1 has no field 'text' \(it has: body, id\)"),
    "not text": ("data.jsonl", b'{"text": 5}\n', "of type int, not text"),
    "a number": ("data.jsonl", b"5\n", "has no field 'text'"),
    "not UTF-8": ("data.txt", b"fine\nbad \xff\n", r"data\.txt:2 is not UTF-8 \(byte 9\)"),
    "not parquet": ("data.parquet", b"nothing of the kind", "is not a parquet file"),
    "suffix": ("data.csv", b"a,b\n", "has the suffix '.csv'"),
}


@pytest.mark.parametrize("case", list(BAD_FILES))
def test_a_bad_file_is_named(tmp_path: Path, case: str) -> None:
    name, content, words = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        _documents(tmp_path / name)
    assert caught.value.code == "MC906"
    assert caught.value.remedy


def test_a_missing_column_is_named(tmp_path: Path, texts: list[str]) -> None:
    for kind in ("parquet", "saved"):
        with pytest.raises(DataError, match=r"no column 'body' \(it has: .*text"):
            _documents(WRITERS[kind](tmp_path, texts), text_field="body")


def test_a_missing_split_is_named(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(DataError, match="no split 'dev'") as caught:
        _documents(_write_saved_splits(tmp_path, texts), split="dev")
    assert "test, train" in caught.value.remedy


@pytest.mark.parametrize("name", ["./nowhere", "missing.txt", "a/b/c", "/no/such.parquet"])
def test_a_missing_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(DataError, match="does not exist") as caught:
        resolve_source(DataSpec(dataset=name))
    assert caught.value.code == "MC906"


def test_folders_and_globs_without_data(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("x")
    for name in (str(tmp_path), str(tmp_path / "*.txt")):
        with pytest.raises(DataError, match=r"no \.txt, \.jsonl, \.parquet file") as caught:
            resolve_source(DataSpec(dataset=name))
        assert caught.value.code == "MC904"


def test_a_large_dataset_needs_a_number_of_samples() -> None:
    with pytest.raises(DataError, match="too large to prepare whole") as caught:
        resolve_source(DataSpec(dataset="c4"))
    assert "data.samples" in caught.value.remedy


def test_a_pipe_is_said_to_be_one(tmp_path: Path) -> None:
    """Opening it would wait for a writer, and reading it twice is not possible."""
    os.mkfifo(tmp_path / "text.txt")
    with pytest.raises(DataError, match=r"text\.txt' is neither a file nor a folder, but a pipe") as caught:
        resolve_source(DataSpec(dataset=str(tmp_path / "text.txt")))
    assert caught.value.code == "MC906"
