"""Whatever happens to the bytes of a checkpoint is found before anybody trains from them, and named."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_making import Lineage, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.checkpoint.manifest import CHECKSUM, MANIFEST, Chunk, Manifest, TensorEntry, hash_of
from model_check.checkpoint.shards import load_into, read_tensor
from model_check.checkpoint.verify import verify
from model_check.checkpoint.weight_files import open_weights
from model_check.errors import CheckpointError


def test_what_is_loaded_is_what_was_saved(lineage: Lineage) -> None:
    path = lineage.save(3, note="kept").path
    checkpoint = verify(path)
    assert checkpoint.step == 3 and checkpoint.manifest.extra["note"] == "kept"
    expected = tensors(3)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_into(path, checkpoint.manifest, loaded)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
        assert torch.equal(read_tensor(path, checkpoint.manifest.tensors[name]), tensor), name


def test_150_random_bit_flips_are_150_findings(lineage: Lineage, tmp_path: Path) -> None:
    path = lineage.save(1).path
    files = sorted(file for file in path.iterdir())
    assert {file.name for file in files} == {MANIFEST, CHECKSUM, "rank_00000.bin"}
    # Flips fall on files in proportion to their size, as a cosmic ray would have it; seeded, so that a miss repeats.
    dice = random.Random(2026)
    sizes = [file.stat().st_size for file in files]
    missed = []
    for flip in range(150):
        file = dice.choices(files, sizes)[0]
        content = bytearray(file.read_bytes())
        at = dice.randrange(len(content) * 8)
        content[at // 8] ^= 1 << at % 8
        whole = file.read_bytes()
        file.write_bytes(content)
        try:
            verify(path)
            missed.append((flip, file.name, at))
        except CheckpointError as error:
            assert error.code == "MC601", error
        file.write_bytes(whole)
    assert missed == []
    verify(path)


@pytest.mark.parametrize("file", [MANIFEST, CHECKSUM, "rank_00000.bin"])
def test_every_single_byte_is_covered(lineage: Lineage, file: str) -> None:
    path = lineage.save(1).path
    whole = (path / file).read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        (path / file).write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            verify(path)


def test_damage_names_the_tensor(lineage: Lineage) -> None:
    path = lineage.save(1).path
    chunk = Manifest.read(path).tensors["model.half"].chunks[0]
    with (path / chunk.file).open("r+b") as file:
        file.seek(chunk.start + 5)
        byte = file.read(1)[0]
        file.seek(chunk.start + 5)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.half has another checksum") as caught:
        verify(path)
    assert caught.value.code == "MC601"


def test_a_truncated_shard_says_its_sizes(lineage: Lineage) -> None:
    path = lineage.save(1).path
    shard = path / "rank_00000.bin"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=f"has {size - 1} bytes instead of {size}") as caught:
        verify(path)
    assert caught.value.code == "MC601"


@pytest.mark.parametrize(("file", "code"), [("rank_00000.bin", "MC602"), (MANIFEST, "MC603"), (CHECKSUM, "MC602")])
def test_missing_files_are_told_apart(lineage: Lineage, file: str, code: str) -> None:
    path = lineage.save(1).path
    (path / file).unlink()
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    assert caught.value.code == code


def test_ranks_share_the_reading_and_together_miss_nothing(lineage: Lineage) -> None:
    path = lineage.save(1).path
    chunk = Manifest.read(path).tensors["model.wide"].chunks[0]
    with (path / chunk.file).open("r+b") as file:
        file.seek(chunk.start)
        file.write(b"\x01\x02\x03\x04")
    found = []
    for part in range(3):
        try:
            verify(path, part=part, parts=3)
        except CheckpointError:
            found.append(part)
    assert len(found) == 1


def test_a_manifest_that_points_outside_its_folder_is_refused(lineage: Lineage, tmp_path: Path) -> None:
    path = lineage.save(1).path
    manifest = Manifest.read(path)
    forged = tmp_path / "forged"
    shutil.copytree(path, forged)
    Manifest(1, 1, 0.0, {"../rank_00000.bin": 1}, manifest.tensors, {}).write(forged)
    with pytest.raises(CheckpointError, match="not the name of a file"):
        verify(forged)


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a manifest with a checksum that fits, as somebody who wants to be believed would."""
    value = json.loads((path / MANIFEST).read_bytes())
    change(value)
    body = json.dumps(value).encode()
    (path / MANIFEST).write_bytes(body)
    (path / CHECKSUM).write_text(hash_of(body) + "\n")


def in_chunk(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["tensors"]["model.wide"]["chunks"][0].update(values)


def in_entry(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda value: value["tensors"]["model.wide"].update(values)


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a chunk in the folder above": in_chunk(file="../rank_00000.bin"),
    "a chunk anywhere": in_chunk(file="/etc/hostname", start=0),
    "a file called ..": lambda value: value["files"].update({"..": 0}),
    "a size below 0": lambda value: value["files"].update({"rank_00000.bin": -1}),
    "a start below 0": in_chunk(start=-8),
    "bytes below 0": in_chunk(bytes=-4),
    "more bytes than the file": in_chunk(bytes=1 << 60),
    "a fraction of a byte": in_chunk(start=0.5),
    "no chunk at all": in_entry(chunks=[]),
    "half of the tensor": in_chunk(sizes=[20, 30], bytes=2400),
    "another shape": in_entry(shape=[1 << 40, 1 << 40]),
    "one dimension": in_entry(shape=[1200]),
    "a chunk beyond the tensor": in_chunk(offsets=[1, 0]),
    "the same chunk twice": lambda value: value["tensors"]["model.wide"]["chunks"].extend(
        value["tensors"]["model.wide"]["chunks"]
    ),
    "a date in words": lambda value: value.update(saved_at="yesterday"),
    "no date": lambda value: value.update(saved_at=None),
    "a step below 0": lambda value: value.update(step=-1),
    "a list of tensors": lambda value: value.update(tensors=[]),
    "a list of facts": lambda value: value.update(extra=[]),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_manifest_that_no_save_writes_is_refused_though_its_checksum_fits(lineage: Lineage, what: str) -> None:
    (lineage.folder / "rank_00000.bin").write_bytes(b"s" * 10_000)
    path = lineage.save(1).path
    forged(path, FORGERIES[what])
    for reads in (verify, open_weights):
        with pytest.raises(CheckpointError, match="cannot be understood") as caught:
            reads(path)
        assert caught.value.code == "MC603"


def test_bytes_that_do_not_fit_the_number_format_are_refused(lineage: Lineage) -> None:
    path = lineage.save(1).path
    forged(path, in_entry(dtype="float64"))
    with pytest.raises(CheckpointError, match=r"has 4800 bytes for \[40, 30\] numbers of float64"):
        open_weights(path).tensors["wide"].read()


@st.composite
def whole_tensors(draw: st.DrawFn) -> TensorEntry:
    """A tensor of two dimensions in chunks of some rows each, empty ones among them, in one of two files."""
    rows = draw(st.lists(st.integers(0, 9), max_size=3))
    width = draw(st.integers(0, 9))
    chunks = tuple(
        Chunk(
            (sum(rows[:number]), 0),
            (count, width),
            draw(st.sampled_from(["rank_00000.bin", "rank_00001.bin"])),
            draw(st.integers(0, 2**50)),
            draw(st.integers(0, 2**50)),
            draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        )
        for number, count in enumerate(rows)
    )
    return TensorEntry(draw(st.sampled_from(["float32", "int16"])), (sum(rows), width), chunks)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=20), whole_tensors(), max_size=4), st.integers(0, 2**40))
def test_a_manifest_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, TensorEntry], step: int
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    sizes = {"rank_00000.bin": 2**52, "rank_00001.bin": 2**52}
    manifest = Manifest(step, 2, 12.5, sizes, entries, {"cursor": {"epoch": 1}})
    manifest.write(folder)
    assert Manifest.read(folder) == manifest


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_for_a_manifest_are_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("noise")
    (folder / MANIFEST).write_bytes(content)
    (folder / CHECKSUM).write_text(hash_of(content) + "\n")
    with pytest.raises(CheckpointError) as caught:
        Manifest.read(folder)
    assert caught.value.code == "MC603"
