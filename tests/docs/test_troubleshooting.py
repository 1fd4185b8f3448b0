"""Every command of docs/troubleshooting.md runs, ends as the page says, and prints the lines it shows.

A fence is ```console, with `slow` behind it for what takes seconds. `# exit code N` after a command says how it ends (0
where nothing is said, `0 or 1` where it depends on the machine); `…` stands for anything. A fence whose first line is a
comment with a file name is that file. The hub of these tests knows nobody.
"""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_check.config.codes import MEANINGS
from model_check.diagnose.catalogue import CATALOGUE
from tests.conftest import BIN, ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"\A(?:#|//) (\S+\.\w+)\n")
_EXIT = re.compile(r"\s+# exit code (\d+(?: or \d+)*)$")
_SYMPTOMS = (
    *("Out of memory", "NCCL errors", "It hangs", "It is slow", "The loss does not fall", "NaN or Inf"),
    *("Mixed precision", "A checkpoint does not load", "Import errors", "Configuration errors", "Several hosts"),
    *("Hugging Face authentication", "Processes do not start"),
)


@dataclass(frozen=True)
class Step:
    """One command of a fence: what is typed, how it ends, the lines that must be in its output."""

    command: str
    codes: tuple[int, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One fence, in the order of the page."""

    words: frozenset[str]
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return self.steps[-1].command[:60]


def read_blocks(text: str) -> list[Block]:
    blocks = []
    for language, words, body in _FENCE.findall(text):
        if language != "console":
            continue
        steps: list[Step] = []
        for line in body.splitlines():
            if line.startswith("$ "):
                ending = _EXIT.search(line)
                command = _EXIT.sub("", line[2:]).strip()
                steps.append(Step(command, tuple(map(int, ending[1].split(" or "))) if ending else (0,), ()))
            else:
                last = steps.pop()
                steps.append(Step(last.command, last.codes, (*last.lines, line)))
        blocks.append(Block(frozenset(words.split()), tuple(steps)))
    return blocks


def files(text: str) -> dict[str, str]:
    """The comment that names a file is not part of it, so that the lines count as shown by an editor."""
    return {name[1]: _FILE.sub("", body) for _, _, body in _FENCE.findall(text) if (name := _FILE.match(body))}


BLOCKS = read_blocks(PAGE.read_text())


def parameters(*, slow: bool) -> list[Block]:
    return [block for block in BLOCKS if ("slow" in block.words) == slow]


@pytest.fixture
def refusing_hub() -> Iterator[str]:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not the test's output."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def shown(line: str, output: str) -> bool:
    """Whether a line of the page is one of the output's; runs of blanks count as one, `…` as anything."""
    parts = [re.escape(part) for part in re.split("…", " ".join(line.split()))]
    pattern = re.compile(".*".join(parts))
    return any(pattern.fullmatch(" ".join(given.split())) for given in output.splitlines())


def run(block: Block, folder: Path, hub: str) -> None:
    for name, body in files(PAGE.read_text()).items():
        (folder / name).write_text(body)
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "RUN_", "MASTER_", "GLOO_", "SLURM_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GPU_RANK", "NUM_GPUS"):
        outside.pop(name, None)
    environ = {**outside, "PATH": f"{BIN}{os.pathsep}{outside['PATH']}", "OMP_NUM_THREADS": "1"}
    environ |= {"HF_ENDPOINT": hub, "HF_TOKEN": "hf_expired", "HF_HOME": str(folder / "hf")}
    for step in block.steps:
        # A page for people: its commands are typed into a shell.
        done = subprocess.run(
            ["bash", "-c", step.command], cwd=folder, env=environ, capture_output=True, text=True, timeout=240
        )
        output = done.stdout + done.stderr
        assert done.returncode in step.codes, f"$ {step.command}\n{output}"
        for line in step.lines:
            assert shown(line, output), f"$ {step.command}\ndoes not print: {line}\n{output}"
        assert "hf_expired" not in output


@pytest.mark.parametrize("block", parameters(slow=False), ids=str)
def test_commands(block: Block, tmp_path: Path, refusing_hub: str) -> None:
    run(block, tmp_path, refusing_hub)


@pytest.mark.slow
@pytest.mark.parametrize("block", parameters(slow=True), ids=str)
def test_slow_commands(block: Block, tmp_path: Path, refusing_hub: str) -> None:
    run(block, tmp_path, refusing_hub)


def test_every_symptom_has_a_section_with_a_command() -> None:
    sections = dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##+ |\Z)", PAGE.read_text(), re.M | re.S))
    for symptom in _SYMPTOMS:
        assert "```console" in sections[symptom], symptom


def test_every_code_of_the_page_exists() -> None:
    codes = set(re.findall(r"MC\d{3}", PAGE.read_text()))
    assert len(codes) >= 40
    assert codes <= {*CATALOGUE, *MEANINGS}, codes - {*CATALOGUE, *MEANINGS}


def test_a_line_that_differs_is_noticed() -> None:
    assert shown("  ✗ hub token   the hub refuses …", "  ✗ hub token      the hub refuses HF_TOKEN\n")
    assert not shown("error[MC206]: barrier", "error[MC205]: barrier")
    assert not shown("error[MC206]", "an error[MC206] inside another line")
