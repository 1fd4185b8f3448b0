"""Whatever happens to the bytes of a checkpoint is found before anybody trains from them, and named."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_making import Lineage, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.checkpoint.manifest import CHECKSUM, MANIFEST, Chunk, Manifest, TensorEntry
from model_check.checkpoint.shards import load_into, read_tensor
from model_check.checkpoint.verify import verify
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


chunk_lists = st.lists(
    st.builds(
        Chunk,
        offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        sizes=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        file=st.sampled_from(["rank_00000.bin", "rank_00001.bin"]),
        start=st.integers(0, 2**60),
        bytes=st.integers(0, 2**60),
        checksum=st.text("0123456789abcdef", min_size=32, max_size=32),
    ),
    max_size=3,
).map(tuple)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.builds(TensorEntry, st.sampled_from(["float32", "int16"]), st.tuples(st.integers(0, 9)), chunk_lists),
        max_size=4,
    ),
    st.integers(0, 2**40),
)
def test_a_manifest_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, TensorEntry], step: int
) -> None:
    folder = tmp_path_factory.mktemp("manifest")
    manifest = Manifest(step, 2, 12.5, {"rank_00000.bin": 5}, entries, {"cursor": {"epoch": 1}})
    manifest.write(folder)
    assert Manifest.read(folder) == manifest


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_for_a_manifest_are_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    from model_check.checkpoint.manifest import hash_of

    folder = tmp_path_factory.mktemp("noise")
    (folder / MANIFEST).write_bytes(content)
    (folder / CHECKSUM).write_text(hash_of(content) + "\n")
    with pytest.raises(CheckpointError) as caught:
        Manifest.read(folder)
    assert caught.value.code == "MC603"
