"""Copies that training cannot disturb: where they go, how they are cut up, and that the bytes on disk are theirs."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_check.checkpoint.manifest import new_hash
from model_check.checkpoint.parts import Part, write_parts
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saver
from model_check.checkpoint.shards import load_into
from model_check.checkpoint.staging import Limits, Staging, _blocks, cut_up, fitting, free_host_bytes
from model_check.checkpoint.verify import verify

SIZES = st.lists(st.integers(0, 50), max_size=20)


@given(SIZES, st.integers(0, 200))
def test_no_memory_is_promised_twice_and_none_is_left_that_would_do(sizes: list[int], room: int) -> None:
    chosen = fitting(dict(enumerate(sizes)), room)
    taken = sum(sizes[index] for index in chosen)
    assert chosen == sorted(set(chosen)) and taken <= room
    assert all(size > room - taken for index, size in enumerate(sizes) if index not in chosen)


def test_the_largest_parts_get_the_fastest_memory() -> None:
    sizes = dict(enumerate([1, 8, 4, 2]))
    assert fitting(sizes, 12) == [1, 2] and fitting(sizes, 6) == [2, 3] and fitting(sizes, 100) == [0, 1, 2, 3]


@given(SIZES, st.integers(1, 64))
def test_pieces_of_slabs_hold_every_byte_once(sizes: list[int], slab: int) -> None:
    slabs = [torch.zeros(slab, dtype=torch.uint8) for _ in range(sum(sizes) // slab + 1)]
    rooms = list(cut_up(slabs, sizes))
    assert [sum(piece.numel() for piece in pieces) for pieces in rooms] == sizes
    for number, pieces in enumerate(rooms, start=1):
        for piece in pieces:
            assert piece.count_nonzero() == 0, "another part's bytes"
            piece.fill_(number)


@given(st.integers(0, 200 << 30))
def test_blocks_of_the_device_are_few_and_hold_all(total: int) -> None:
    sizes = _blocks(total)
    assert sum(sizes) == total and all(sizes)
    assert len(sizes) <= 1 + total // (16 << 30)


def parts(seed: int, count: int, size: int) -> list[Part]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        values = torch.randint(0, 256, (size + number,), dtype=torch.uint8, generator=generator)
        made.append(Part.of(f"model.{number}", tuple(values.shape), (0,), values))
    return made


def test_several_writers_write_what_one_writes(tmp_path: Path) -> None:
    given_parts = parts(0, count=40, size=2 << 20)  # 80 MiB: above what one thread writes alone
    alone = write_parts(tmp_path / "one", given_parts)
    together = write_parts(tmp_path / "many", given_parts, threads=3)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    assert [entry.name for entry in together] == [part.name for part in given_parts]
    assert [(w.chunk.start, w.chunk.checksum) for w in alone] == [(w.chunk.start, w.chunk.checksum) for w in together]


def test_a_part_in_pieces_is_written_as_one(tmp_path: Path) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    flat = values.view(torch.uint8)
    part = Part("model.w", (1000,), (0,), (1000,), torch.float32, (flat[:13], flat[13:2000], flat[2000:]))
    (written,) = write_parts(tmp_path / "file", [part])
    assert (tmp_path / "file").read_bytes() == values.numpy().tobytes()
    digest = new_hash()
    digest.update(values.numpy().tobytes())
    assert (written.chunk.bytes, written.chunk.checksum) == (4000, digest.hexdigest())


NO_ROOM = """
import resource, sys, threading
from pathlib import Path
import torch
from model_check.checkpoint.parts import Part, write_parts

resource.setrlimit(resource.RLIMIT_FSIZE, (50 << 20, 50 << 20))
data = torch.ones(8 << 20, dtype=torch.uint8)
try:
    write_parts(Path(sys.argv[1]), [Part.of(str(n), (8 << 20,), (0,), data) for n in range(10)], threads=3)
except OSError as error:
    print(error.errno, threading.active_count())
"""


def test_what_one_writer_meets_is_raised_after_all_have_ended(tmp_path: Path) -> None:
    assert hasattr(resource, "RLIMIT_FSIZE")
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, tmp_path / "file"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["27", "1"], done.stdout + done.stderr  # EFBIG, and the main thread alone


def test_a_copy_does_not_see_what_training_does_next() -> None:
    before = {"model.w": torch.arange(5000.0), "model.h": torch.ones(7, dtype=torch.bfloat16)}
    made = [Part.of(name, tuple(t.shape), (0,), t) for name, t in before.items()]
    staged = Staging().copy(made)
    kept = [t.clone() for t in before.values()]
    for tensor in before.values():
        tensor.zero_()
    staged.hold_update()
    staged.settle()
    for part, expected in zip(staged.parts, kept, strict=True):
        assert torch.equal(part.contents[0].view(part.dtype).view(part.sizes), expected)
    assert staged.device_wait_s() is None, "no device, nothing to wait for"


def test_the_second_copy_uses_the_memory_of_the_first() -> None:
    staging = Staging()
    made = parts(1, count=3, size=1000)
    first = staging.copy(made).parts[0].contents[0].data_ptr()
    assert staging.copy(made).parts[0].contents[0].data_ptr() == first


def test_a_host_without_memory_makes_training_wait_and_says_so(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Peers(), name="run", background=True, limits=Limits(pageable_share=0.0))
    state = {"model.w": torch.arange(1000.0)}
    pause = saver.save(3, state, {})
    (saved,) = saver.poll()  # without a wait: it has ended
    assert saved.error is None and pause >= saved.seconds
    assert "no host memory for a copy of 4,000 bytes" in saved.note and "training waits" in saved.note
    loaded = {"model.w": torch.zeros(1000)}
    load_into(saved.path, verify(saved.path).manifest, loaded)
    assert torch.equal(loaded["model.w"], state["model.w"])


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("3000000", "1000000", 2_000_000), ("1000", "5000", 0), ("max", "7", None)]
)
def test_a_control_group_counts_where_it_gives_less(
    tmp_path: Path, limit: str, used: str, expected: int | None
) -> None:
    (tmp_path / "max").write_text(f"{limit}\n")
    (tmp_path / "current").write_text(f"{used}\n")
    missing = (tmp_path / "not", tmp_path / "there")
    found = free_host_bytes((missing, (tmp_path / "max", tmp_path / "current")))
    if expected is None:
        assert found > 10_000_000, "the machine's own memory"
    else:
        assert found == expected
