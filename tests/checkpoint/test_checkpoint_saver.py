"""A save is whole or not there; what is kept, what is cleaned away, and what a full disk leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_making import Lineage

from model_check.checkpoint import layout
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Retention, Saver, free_bytes
from model_check.checkpoint.verify import verify


def names(folder: Path) -> list[str]:
    return [path.name for path in layout.committed(folder)]


def test_latest_names_the_newest_whole_checkpoint(lineage: Lineage) -> None:
    for step in (4, 9):
        saved = lineage.save(step)
        assert saved.error is None and saved.path.name == f"step_{step:08d}"
        for pointer in (lineage.folder / "latest", lineage.folder.parent / "latest"):
            assert verify(pointer.resolve()).step == step
    assert list(lineage.folder.glob(".*")) == []


def test_a_background_save_keeps_the_values_of_its_moment(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Peers(), name="run", background=True)
    state = {"model.w": torch.arange(1 << 20, dtype=torch.float32)}
    pause = saver.save(0, state, {})
    state["model.w"].zero_()
    saver.wait()
    (saved,) = saver.poll()
    assert saved.error is None and 0 < pause <= saved.seconds
    loaded = {"model.w": torch.empty(1 << 20)}
    from model_check.checkpoint.shards import load_into

    load_into(saved.path, verify(saved.path).manifest, loaded)
    assert torch.equal(loaded["model.w"], torch.arange(1 << 20, dtype=torch.float32))


def test_memory_of_the_host_is_taken_there_whatever_the_scripts_default_device_is(tmp_path: Path) -> None:
    from model_check.checkpoint.shards import load_into

    lineage, wanted = Lineage(tmp_path, background=True), torch.arange(1 << 10, dtype=torch.float32)
    loaded = {"model.w": torch.empty(1 << 10)}
    with torch.device("meta"):  # what is taken here has no numbers
        lineage.saver.save(0, {"model.w": wanted}, {})
        lineage.saver.wait()
        (saved,) = lineage.saver.poll()
        load_into(saved.path, verify(saved.path).manifest, loaded)
    assert saved.error is None and torch.equal(loaded["model.w"], wanted)


def test_retention_keeps_the_last_every_kth_and_the_best(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path, retention=Retention(last=2, every=4, best=True))
    losses = {1: 3.0, 3: 2.9, 5: 1.5, 7: 2.0, 9: 1.9, 11: 2.2, 13: 2.3}
    for step, loss in losses.items():
        lineage.save(step, val_loss=loss)
    # the last two: 11, 13; every fourth step: 3, 7, 11; the best: 5
    assert names(lineage.folder) == [f"step_{step:08d}" for step in (3, 5, 7, 11, 13)]
    assert list(lineage.folder.glob(".*")) == []


@pytest.mark.parametrize("no_loss", [float("nan"), "low"], ids=["NaN", "text"])
def test_what_is_no_loss_is_not_the_best_one(tmp_path: Path, no_loss: object) -> None:
    lineage = Lineage(tmp_path, retention=Retention(last=1, every=0, best=True))
    for step, loss in ((1, no_loss), (2, 1.5), (3, 2.0)):
        assert lineage.save(step, val_loss=loss).error is None
    assert names(lineage.folder) == ["step_00000002", "step_00000003"]


def flip_a_bit(checkpoint: Path) -> None:
    shard = checkpoint / "rank_00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 4
    shard.write_bytes(content)


def test_damaged_checkpoints_do_not_count_and_the_new_one_always_stays(tmp_path: Path) -> None:
    before = Lineage(tmp_path)
    good, corrupt = before.save(99).path, before.save(199).path
    flip_a_bit(corrupt)
    before.saver.close()
    resumed = Lineage(tmp_path, lineage=before.folder, origin=good, retention=Retention(last=1))
    assert resumed.save(149).error is None
    assert names(resumed.folder) == ["step_00000149", "step_00000199"], "99 goes once 149 has been read back"
    assert resumed.save(249).error is None
    assert names(resumed.folder) == ["step_00000249"]


def test_a_truncated_checkpoint_takes_no_place_of_a_whole_one(tmp_path: Path) -> None:
    lineage = Lineage(tmp_path, retention=Retention(last=2))
    for step in (1, 2):
        lineage.save(step)
    (lineage.save(3).path / "rank_00000.bin").write_bytes(b"")
    lineage.save(4)
    assert names(lineage.folder) == [f"step_{step:08d}" for step in (2, 3, 4)]


DAMAGED_ON_ITS_WAY = """
import sys
from pathlib import Path
import torch
from model_check.checkpoint import layout
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Retention, Saver

folder, damages = Path(sys.argv[1]), True
options = {"name": "run", "background": False, "retention": Retention(last=1)}
first = Saver(folder, Peers(), **options)

def save(saver, step):
    saver.save(step, {"model.w": torch.ones(1000)}, {})
    (saved,) = saver.poll()
    print(saved.error and saved.error.message, [layout.step_of(path) for path in layout.committed(saver.lineage)])
    return saved.path

def bad_disk(event, arguments):
    if damages and event == "os.rename" and "staging-step" in str(arguments[0]):
        (Path(arguments[0]) / "rank_00000.bin").write_bytes(bytes(4000))

origin = save(first, 9)
first.close()
sys.addaudithook(bad_disk)
resumed = Saver(folder, Peers(), lineage=first.lineage, origin=origin, **options)
save(resumed, 19)
damages = False
save(resumed, 29)
"""


def test_what_was_resumed_from_stays_until_a_newer_one_can_be_read_back(tmp_path: Path) -> None:
    script = [sys.executable, "-c", DAMAGED_ON_ITS_WAY, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    first, damaged, last = done.stdout.splitlines()
    assert (first, last) == ("None [9]", "None [29]")
    assert "model.w has another checksum" in damaged and damaged.endswith("[9, 19]")


def test_the_beginning_of_a_branch_that_has_saved_nothing_is_kept(tmp_path: Path) -> None:
    trunk = Lineage(tmp_path, "trunk", retention=Retention(last=1))
    branch = Lineage(tmp_path, "branch", origin=trunk.save(1).path)
    trunk.save(2)
    assert names(trunk.folder) == ["step_00000001", "step_00000002"]
    branch.save(5)
    trunk.save(3)
    assert names(trunk.folder) == ["step_00000003"]


def test_two_fresh_runs_never_share_a_folder(tmp_path: Path) -> None:
    first, second = Lineage(tmp_path, "run"), Lineage(tmp_path, "run")
    assert (first.folder.name, second.folder.name) == ("run", "run-2")
    first.save(1)
    second.save(1)
    assert (tmp_path / "latest").resolve() == (second.folder / "step_00000001").resolve()
    assert verify(first.folder / "step_00000001").step == 1


HOLDS = """
import sys
from pathlib import Path
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saver

saver = Saver(Path(sys.argv[1]).parent, Peers(), lineage=Path(sys.argv[1]), name="first")
print(saver.lineage, flush=True)
sys.stdin.read()
"""


def test_a_lineage_in_which_another_run_saves_is_left_to_it(lineage: Lineage) -> None:
    kept = lineage.save(7).path
    lineage.saver.close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(lineage.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdout.readline().strip() == str(lineage.folder)
        second = Lineage(lineage.folder.parent, "second", lineage=lineage.folder, origin=kept)
        assert (second.folder.name, second.saver.shared) == ("second", lineage.folder)
        assert second.save(8).error is None
        assert names(lineage.folder) == ["step_00000007"]
        first.kill()
    third = Lineage(lineage.folder.parent, "third", lineage=lineage.folder, origin=kept)
    assert (third.folder, third.saver.shared) == (lineage.folder, None), "the dead hold nothing"


def test_the_room_of_a_folder_that_was_removed_is_that_of_its_disk(tmp_path: Path) -> None:
    """One rank makes it anew while the others ask: none of them may be alone in failing."""
    assert free_bytes(tmp_path / "removed" / "run") > 0
    assert free_bytes(Path("never") / "was") > 0


def test_a_failure_of_any_kind_is_told_to_the_peers(lineage: Lineage) -> None:
    """A rank that fell out of the agreement would leave the others waiting."""

    def no_memory() -> None:
        raise MemoryError("for the last part")

    assert lineage.saver._attempt(no_memory) == (0, "MemoryError: for the last part")


def test_leftovers_of_dead_saves_go_and_those_of_live_ones_stay(lineage: Lineage) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    host = layout.owner().rpartition(".")[0]
    container = host.rpartition("~")[0] + "~0123abcd"  # the same host name, but PIDs of its own
    dead = lineage.folder / f".staging-step_00000009@{host}.{gone.pid}"
    alive = lineage.folder / f".staging-step_00000009@{host}.{os.getppid()}"
    reused = lineage.folder / f".staging-step_00000009@{host}.{os.getppid()}-1"
    elsewhere = lineage.folder / f".staging-step_00000009@another-host.{gone.pid}"
    beside = lineage.folder / f".staging-step_00000009@{container}.{gone.pid}-1"
    for folder in (dead, alive, reused, elsewhere, beside):
        folder.mkdir()
        (folder / "rank_00000.bin").write_bytes(b"half")
    Saver(lineage.folder.parent, Peers(), lineage=lineage.folder, name="run")
    left = [folder.exists() for folder in (dead, alive, reused, elsewhere, beside)]
    assert left == [False, True, False, True, True]


def test_saving_a_step_again_replaces_it_whole(lineage: Lineage) -> None:
    first = lineage.save(5, round=1)
    (first.path / "rank_00000.bin").write_bytes(b"damaged")
    again = lineage.save(5, round=2)
    assert verify(again.path).manifest.extra["round"] == 2
    assert names(lineage.folder) == ["step_00000005"]


FULL = """
import json, resource, sys
from pathlib import Path
import torch
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saver

saver = Saver(Path(sys.argv[1]), Peers(), name="run", background=sys.argv[2] == "background")
saver.save(1, {"model.w": torch.ones(1000)}, {})
saver.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
saver.save(2, {"model.w": torch.ones(1_000_000)}, {})
saver.wait()
first, second = saver.poll()
print(json.dumps([first.error is None, second.error.code, second.error.message]))
"""


@pytest.mark.parametrize("mode", ["background", pytest.param("foreground", marks=pytest.mark.slow)])
def test_a_full_disk_says_needed_and_free_and_leaves_the_last_checkpoint_whole(tmp_path: Path, mode: str) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path), mode], capture_output=True, text=True, check=True)
    whole, code, message = json.loads(done.stdout)
    assert whole and code == "MC604"
    assert "needs 4,000,000 bytes" in message and "are free in" in message
    assert names(tmp_path / "run") == ["step_00000001"]
    assert verify((tmp_path / "latest").resolve()).step == 1
    assert list((tmp_path / "run").glob(".staging*")) == []


def test_too_little_room_is_seen_before_anything_is_written(lineage: Lineage, tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    more_than_free = (stats.f_bavail * stats.f_frsize) // 4 + (1 << 20)
    lineage.saver.save(1, {"model.huge": torch.empty(1).expand(more_than_free)}, {})
    (saved,) = lineage.saver.poll()
    assert saved.error is not None and saved.error.code == "MC604"
    assert f"needs {more_than_free * 4:,} bytes" in saved.error.message
    assert names(lineage.folder) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    from model_check.errors import CheckpointError

    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written to") as caught:
        Saver(tmp_path / "file" / "below", Peers(), name="run")
    assert caught.value.code == "MC608"


KILLED = """
import os, signal, sys, threading
from pathlib import Path
import torch
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saver

saver = Saver(Path(sys.argv[1]), Peers(), name="run")
saver.save(1, {"model.w": torch.ones(1000)}, {})
saver.wait()
saver.save(2, {"model.w": torch.ones(20_000_000)}, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_inside_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    for path in layout.committed(tmp_path / "run"):
        verify(path)
    assert names(tmp_path / "run")[0] == "step_00000001"
    verify((tmp_path / "latest").resolve())
    Lineage(tmp_path, lineage=tmp_path / "run")
    assert layout.unfinished(tmp_path / "run") == []
