"""Log lines: their format, their cleaning, and the tail that cuts a growing file into them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.launch.console import Console, ConsoleOptions
from model_check.launch.log_lines import LONGEST_LINE, LineTail, clean, fitted, labelled
from model_check.record.step_lines import clock, step_line


def test_the_step_line_is_exactly_this() -> None:
    assert (
        step_line("GPU0", 0, 100, 12.234, 1e-5, 2.75649, 330.0)
        == "[GPU0] Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30"
    )


def test_a_step_line_too_long_for_the_terminal_leaves_its_eta_to_the_bar() -> None:
    line = step_line("CPU0", 10, 60, 8.3161, 1e-7, 1.3551, 22.0)
    assert (len(line), fitted(line, 81)) == (81, line)
    assert fitted(line, 80) == "[CPU0] Step [10/60] | Loss: 8.3161 | LR: 1.00e-07 | Grad Norm: 1.3551"
    assert fitted(step_line("CPU0", 10, 60, 8.3161, 1e-7, 1.3551, 1e6), 80) == fitted(line, 80)
    other = "[CPU0] the user's own line, which is long and names an | ETA: soon"
    assert fitted(other, 20) == other


def test_a_skipped_step_says_so_behind_the_fields_that_others_read() -> None:
    line = step_line("GPU0", 1, 100, 12.234, 1e-5, float("nan"), 330.0, lowered_scale=2.0**20)
    assert line == (
        "[GPU0] Step [1/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: nan | ETA: 5:30"
        " | Skipped: overflow, loss scale down to 1048576"
    )
    assert fitted(line, len(line)) == line
    assert fitted(line, len(line) - 1) == (
        "[GPU0] Step [1/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: nan"
        " | Skipped: overflow, loss scale down to 1048576"
    )
    assert step_line("GPU0", 1, 100, 12.234, 1e-5, 2.0, 330.0, lowered_scale=0.25).endswith("loss scale down to 0.25")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (330, "5:30"), (3723, "1:02:03"), (90061, "1d 1:01:01"), (None, "?")],
)
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


@given(st.floats(0, 1e7))
def test_the_clock_reads_back(seconds: float) -> None:
    match = re.fullmatch(r"(?:(\d+)d )?(?:(\d+):)?(\d+):(\d\d)", clock(seconds))
    assert match is not None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    assert ((days * 24 + hours) * 60 + minutes) * 60 + rest == round(seconds)


def test_a_number_without_end_has_no_clock() -> None:
    assert clock(float("nan")) == clock(float("inf")) == clock(-1.0) == "?"


@given(st.text())
def test_a_clean_line_has_no_control_characters(text: str) -> None:
    line = clean(text)
    assert not [c for c in line if unicodedata.category(c) == "Cc" and c != "\t"]
    assert line == clean(line)


@given(st.text(st.characters(blacklist_categories=["Cc", "Cs", "Cf", "Zl", "Zp"])))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert clean(text) == text.rstrip()


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;title\x07text", "text"),
        ("a\x1b[2Jb\x1b(Bc", "abc"),
        ("\x9b31mx", "31mx"),
        ("10%\r 50%\r100%\r", "100%"),
        ("ab\u202ecd", "abcd"),
        ("a\tb", "a\tb"),
    ],
)
def test_cleaning(raw: str, shown: str) -> None:
    assert clean(raw) == shown


def test_a_label_is_added_once() -> None:
    assert labelled("GPU3", "text") == "[GPU3] text"
    for line in ("[GPU3] text", "[CPU0] text", "[node-1:GPU3] text"):
        assert labelled("GPU3", line) == line
    assert labelled("GPU3", "[GPU] text") == "[GPU3] [GPU] text"


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_a_tail_gives_every_line_once_however_the_file_grew(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, copy = Path(folder) / "log", Path(folder) / "copy"
        tail = LineTail(log, copy)
        lines = tail.read()
        with log.open("ab", buffering=0) as file:
            for piece in pieces:
                file.write(piece)
                lines += tail.read()
        lines += tail.close()
        whole = b"".join(pieces)
        expected = whole.split(b"\n")
        if not expected[-1]:
            expected.pop()
        assert lines == [clean(line.decode("utf-8", "replace")) for line in expected]
        assert copy.read_bytes() == whole


def test_an_endless_line_is_cut_and_counted(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    log.write_bytes(b"x" * (5 * LONGEST_LINE) + b"\nnext\n")
    cut, following = LineTail(log).close()
    assert cut == "x" * LONGEST_LINE + f" … ({4 * LONGEST_LINE} more bytes in rank-00000.log)"
    assert following == "next"


def _all_of(terminal: int) -> str:
    """What was written to a terminal that is closed by now. It comes in pieces, then as an error."""
    shown = b""
    with suppress(OSError):
        while piece := os.read(terminal, 65536):
            shown += piece
    return shown.decode()


def test_a_terminal_gets_the_lines_and_a_bar(tmp_path: Path) -> None:
    log, metrics = tmp_path / "log", tmp_path / "metrics.jsonl"
    log.write_text("hello [bold]world[/bold]\n")
    metrics.write_text('{"step": 4, "loss": 2.5, "tokens_per_s": 12345.6, "step_s": 2.0}\n')
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        assert stream.isatty()
        console = Console(metrics, ConsoleOptions(stream=stream, max_steps=10))
        console.follow("GPU0", log)
        console.say("done")
        console.close()
    shown = _all_of(ours)
    os.close(ours)
    assert "[GPU0] hello [bold]world[/bold]\r\n" in shown
    assert "[model-check] done\r\n" in shown
    assert "5/10" in shown and "loss 2.5000 | 12,346 tokens/s | ETA 0:10" in shown


def follow_a_log(tmp_path: Path, stream: TextIO) -> None:
    """With a console whose stream takes nothing: the copy has every line all the same."""
    log = tmp_path / "log"
    log.write_text("first\n")
    console = Console(tmp_path / "metrics.jsonl", ConsoleOptions(stream=stream, log_copies=tmp_path / "copies"))
    console.follow("CPU0", log)
    with log.open("a") as file:
        file.write("second\n")
    console.close()
    assert (tmp_path / "copies" / "log").read_text() == "first\nsecond\n"


def test_a_reader_that_went_away_does_not_stop_the_copies(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", encoding="utf-8")
    follow_a_log(tmp_path, stream)
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_said_once_and_does_not_stop_the_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115 closing it fails
    follow_a_log(tmp_path, stream)
    with pytest.raises(OSError, match="No space left on device"):
        stream.close()
    said = "[model-check] the output cannot be written (No space left on device); the job goes on without it\n"
    assert capsys.readouterr().err == said


def test_a_stream_that_knows_ascii_only_gets_escapes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Wörter ✓\n", encoding="utf-8")
    shown = tmp_path / "shown"
    with shown.open("w", encoding="ascii") as stream:
        console = Console(tmp_path / "metrics.jsonl", ConsoleOptions(stream=stream))
        console.follow("CPU0", log)
        console.close()
    assert shown.read_text() == "[CPU0] W\\xf6rter \\u2713\n"


def test_a_copy_on_a_full_disk_costs_no_line(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    log.write_text("one\ntwo\n")
    tail = LineTail(log, copy_to=Path("/dev/full"))
    assert tail.read() == ["one", "two"] and tail.close() == []


def test_a_rank_of_ours_prints_on_where_its_log_is_on_a_full_disk() -> None:
    code = (
        "from model_check.launch.ranks import prepare_interpreter; prepare_interpreter();"
        "[print('x' * 10000, flush=True) for _ in range(9)]; import os; os._exit(7)"
    )
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full).returncode == 7
