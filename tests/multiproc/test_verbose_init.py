"""A start that says where every rank is: all twelve checkpoints, and one sentence when it stops."""

from __future__ import annotations

import json
import re

import pytest

from model_check.record.start_marks import CHECKPOINTS
from tests.conftest import BIN, ROOT, TINY, Shell

SETS = [word for value in TINY for word in ("--set", value)]
DOOR = str(ROOT / "scripts" / "run_6_test.py")
MARK = re.compile(
    r"^\[\d\d:\d\d:\d\d\.\d{3}\]\[\+\d+\.\d{3}s\]\[R(\d)/(\d)\]\[LR\d\]\[PID:\d+\] CHECKPOINT (\d+): (.*)$", re.M
)
STUCK_TRACKER = "import threading\n\n\ndef init(**settings):\n    threading.Event().wait()\n"


def marks_of(rank: int, output: str) -> list[tuple[int, str]]:
    return [(int(number), name) for who, _, number, name in MARK.findall(output) if int(who) == rank]


ALL = list(enumerate(CHECKPOINTS, start=1))


@pytest.mark.slow
def test_the_door_under_torchrun_shows_all_twelve_on_both_ranks(shell: Shell) -> None:
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", DOOR]
    done = shell.run(*torchrun, "--fast_dev_run", "5", "--num_workers", "0", "--run-dir", "out", *SETS)
    assert done.code == 0, done.err
    assert marks_of(0, done.out) == marks_of(1, done.out) == ALL
    for rank in (0, 1):
        own = [line for line in done.out.splitlines() if f"][R{rank}/2][" in line]
        text = "\n".join(own)
        assert "About to call init_process_group with backend=auto..." in text
        assert "process group: rank " in text and f"  RANK={rank}" in text
        events = (shell.folder / "out" / "events" / f"rank-0000{rank}.jsonl").read_text().splitlines()
        recorded = [json.loads(line) for line in events if "checkpoint_mark" in line]
        assert [(record["number"], record["name"]) for record in recorded] == ALL
    assert len(re.findall(r"^\[CPU1\] Step \[\d/5\]", done.out, re.M)) == 5


@pytest.mark.slow
def test_the_door_alone_trains_one_rank(shell: Shell) -> None:
    done = shell.run(str(BIN / "python"), DOOR, "--fast_dev_run", "1", "--batch_size", "2", "--run-dir", "out", *SETS)
    assert done.code == 0, done.err
    assert marks_of(0, done.out) == ALL and not marks_of(1, done.out)


@pytest.mark.slow
def test_a_start_that_stops_is_one_sentence_live_and_afterwards(shell: Shell) -> None:
    (shell.folder / "wandb.py").write_text(STUCK_TRACKER)
    wanted = ["--set", "logging.wandb=true", "--set", "launch.hang_kill_after_s=7"]
    done = shell.train(
        "--nproc", "2", "--max-steps", "3", *wanted, PYTHONPATH=f"{shell.folder}:{ROOT}", WANDB_API_KEY="s3cr3tvalue"
    )
    assert done.code == 1
    sentence = r"rank 1 passed 11, rank 0 is still before 9 \(metrics writer\), \d+ s"
    finding = done.verdict()["findings"][0]
    assert finding["ranks"] == [0] and finding["location"].endswith("/wandb.py:5")
    assert any(re.search(sentence, line) for line in finding["evidence"]), finding["evidence"]
    assert re.search(rf"observed: {sentence}", done.err), "the live warning says it"
    again = shell.model_check("diagnose", str(done.run_dir))
    assert re.search(rf"^start: {sentence}$", again.out, re.M)
    assert "  rank 0: CHECKPOINT 8: Accelerator configured" in again.out
    assert "CHECKPOINT" not in done.out, "without --verbose-init the start is silent"
    assert "s3cr3tvalue" not in done.out + done.err + again.out
