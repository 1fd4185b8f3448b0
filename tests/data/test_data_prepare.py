"""prepare: one builder, waiters, wrecks and damage, and what goes into which split."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from model_check.data import DataSpec, PackedCache, load_tokenizer, prepare
from model_check.data.packed import BLOCK_BYTES, MANIFEST, TOKENS
from model_check.data.tokenizer import BUILTIN
from model_check.errors import CacheDamaged, DataError

# Builds a cache in a process of its own. With "pause" it stops in the middle of the build until stdin has a line.
BUILDER = """
import json, sys
from model_check.data import DataSpec, prepare
def progress(done, total, eta_s):
    if sys.argv[2] == "pause" and not said:
        said.append(1)
        print("building", flush=True)
        sys.stdin.readline()
said = []
data = prepare(
    DataSpec(samples=20000, context_length=64, cache_dir=sys.argv[1]),
    progress=progress,
    waiting=lambda sentence: print("waiting", flush=True),
)
print(json.dumps({"built": data.built, "tokens": data.tokens, "messages": data.messages}))
"""


def _spec(tmp_path: Path, **more: object) -> DataSpec:
    return DataSpec(**{"samples": 400, "context_length": 64, "cache_dir": tmp_path / "cache", **more})  # type: ignore[arg-type]


def _builder(cache_dir: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(cache_dir), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _tokens(cache: PackedCache) -> list[int]:
    return cache.read(0, cache.tokens).tolist()


def test_the_second_time_nothing_is_built(tmp_path: Path) -> None:
    calls: list[tuple[int, int | None, float | None]] = []
    first = prepare(_spec(tmp_path), progress=lambda *call: calls.append(call))
    second = prepare(_spec(tmp_path), progress=lambda *call: calls.append(call))
    assert (first.built, second.built) == (True, False)
    assert calls == [(400, 400, 0.0)]
    assert _tokens(first.train) == _tokens(second.train)
    assert first.tokens == second.tokens == first.train.tokens + (first.valid.tokens if first.valid else 0)


def test_two_processes_started_at_once_build_it_once(tmp_path: Path) -> None:
    processes = [_builder(tmp_path, "run") for _ in range(2)]
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    assert sorted(result["built"] for result in results) == [False, True]
    assert results[0]["tokens"] == results[1]["tokens"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and "building" in path.name] == []


def test_a_second_process_waits_for_the_builder_and_says_so(tmp_path: Path) -> None:
    builder = _builder(tmp_path, "pause")
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    waiter = _builder(tmp_path, "run")
    assert waiter.stdout is not None and waiter.stdout.readline() == "waiting\n"
    assert waiter.poll() is None
    built = json.loads(builder.communicate("\n")[0].splitlines()[-1])
    waited = json.loads(waiter.communicate()[0].splitlines()[-1])
    assert (built["built"], waited["built"]) == (True, False)
    assert waited["messages"] == []


def test_a_killed_builder_is_cleaned_up_and_named(tmp_path: Path) -> None:
    builder = _builder(tmp_path, "pause")
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    assert [path for path in tmp_path.iterdir() if path.name.endswith(f"building-{builder.pid}")]
    data = prepare(DataSpec(samples=20000, context_length=64, cache_dir=tmp_path))
    assert data.built
    assert data.messages == [f"a build of the data cache was cut short (process {builder.pid}); it was started again"]
    assert [path.name for path in tmp_path.iterdir() if "building" in path.name] == []


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None, eta_s: float | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(_spec(tmp_path), progress=interrupt)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest", "folder"])
def test_a_damaged_cache_is_rebuilt_with_a_sentence(tmp_path: Path, split: str, harm: str) -> None:
    spec = _spec(tmp_path, validation_fraction=0.2)
    first = prepare(spec)
    before = _tokens(first.train)
    folder = first.train.folder.parent / split
    file = folder / (MANIFEST if harm == "manifest" else TOKENS)
    content = bytearray(file.read_bytes())
    if harm in ("flip", "manifest"):
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif harm == "truncate":
        file.write_bytes(content[:-1])
    elif harm == "remove":
        file.unlink()
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    again = prepare(spec)
    assert again.built
    assert len(again.messages) == 1
    assert f"{folder} is damaged: " in again.messages[0]
    assert again.messages[0].endswith("it was built again")
    assert _tokens(again.train) == before
    third = prepare(spec)
    assert (third.built, third.messages) == (False, [])


def test_a_block_found_bad_in_training_is_rebuilt_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_check.data.preparation.VERIFY_AT_OPEN_BYTES", 0)
    spec = _spec(tmp_path, samples=3000)
    prepare(spec)
    cache = prepare(spec).train
    file = cache.folder / TOKENS
    content = bytearray(file.read_bytes())
    content[BLOCK_BYTES + 5] ^= 8
    file.write_bytes(content)
    trusting = prepare(spec)
    assert (trusting.built, trusting.messages) == (False, [])
    with pytest.raises(CacheDamaged):
        trusting.train.read(0, trusting.train.tokens)
    again = prepare(spec)
    assert again.built
    assert "block 1 of tokens.bin" in again.messages[0]


def test_verify_reads_a_large_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_check.data.preparation.VERIFY_AT_OPEN_BYTES", 0)
    spec = _spec(tmp_path)
    file = prepare(spec).train.folder / TOKENS
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    assert not prepare(spec).built
    assert prepare(spec, verify=True).built


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 401},
        {"context_length": 65},
        {"seed": 1},
        {"tokenizer": "bytes"},
        {"validation_fraction": 0.1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_tokens_changes_the_key(tmp_path: Path, change: dict[str, object]) -> None:
    one, other = prepare(_spec(tmp_path)), prepare(_spec(tmp_path, **change))
    assert other.built
    assert one.train.folder != other.train.folder


def test_the_document_mask_shares_the_cache(tmp_path: Path) -> None:
    prepare(_spec(tmp_path))
    assert not prepare(_spec(tmp_path, document_mask=True)).built


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one two three " * 100)
    spec = _spec(tmp_path, dataset=str(file), samples=None, tokenizer="bytes")
    assert prepare(spec).built
    assert not prepare(spec).built
    file.write_text("one two three! " * 100)
    assert prepare(spec).built


def test_every_document_is_in_exactly_one_split(tmp_path: Path) -> None:
    documents = [f"document {i:04d} " + "x" * (i % 50) for i in range(1000)]
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(documents))
    spec = _spec(tmp_path, dataset=str(file), samples=None, tokenizer="bytes", validation_fraction=0.1)
    data = prepare(spec)
    tokenizer = load_tokenizer("bytes")
    assert data.valid is not None
    held_out = tokenizer.decode(_tokens(data.valid)).split("<|endoftext|>")[:-1]
    trained = tokenizer.decode(_tokens(data.train)).split("<|endoftext|>")[:-1]
    assert held_out == documents[9::10]
    assert sorted(held_out + trained) == documents


def test_too_few_documents_to_hold_one_out_is_said(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one long document " * 50)
    data = prepare(_spec(tmp_path, dataset=str(file), samples=None))
    assert data.valid is None
    assert data.messages == ["no validation data: a share of 0.01 of the documents is less than one sample"]


@pytest.mark.parametrize(
    ("content", "words"), [("", "holds no text"), (" \n\n \n", "holds no text"), ("few words", "tokens in 1 documents")]
)
def test_an_empty_source_is_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "text.txt"
    file.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        prepare(_spec(tmp_path, dataset=str(file), samples=None))
    assert caught.value.code == "MC904"
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match="cannot be written") as caught:
        prepare(_spec(tmp_path))
    assert "data.cache_dir" in caught.value.remedy


def test_wide_vocabularies_are_stored_wide(tmp_path: Path) -> None:
    parts = json.loads(BUILTIN.read_text(encoding="utf-8"))
    parts["model"]["vocab"]["\u0120beyond"] = 70_000
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(parts))
    (tmp_path / "text.txt").write_text("near beyond " * 60)
    data = prepare(_spec(tmp_path, dataset=str(tmp_path / "text.txt"), tokenizer=str(path), samples=None))
    assert data.train.manifest.dtype == "uint32"
    assert data.train.manifest.max_token_id == 70_000
    assert np.count_nonzero(data.train.read(0, data.train.tokens) == 70_000) == 60


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"context_length": 0}, {"validation_fraction": 0.6}], ids=lambda wrong: next(iter(wrong))
)
def test_impossible_specs_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(DataError, match=next(iter(wrong))):
        _spec(tmp_path, **wrong)
