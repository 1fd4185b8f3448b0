"""A finding for a person, and the catalogue behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.cli.main import main
from model_check.diagnose import CATALOGUE, errors_page, explain, render
from model_check.diagnose.render import printable
from model_check.record import Finding, Verdict

DOCS = Path(__file__).resolve().parents[2] / "docs" / "errors.md"


def loader_finding(script: Path) -> Finding:
    return Finding(
        code="MC204",
        title="rank 1 is stuck in the data loader",
        severity="warning",
        ranks=[1],
        victims=[0, 2, 3],
        step=8,
        location=f"{script}:3",
        function="__getitem__",
        evidence=["observed: rank 1 is in phase data"],
        fix=["look at the named line"],
    )


def test_a_finding_reads_like_a_compilers_error(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("class D:\n    def __getitem__(self, i):\n        return read(self.paths[i])\n\nx = 1\ny = 2\n")
    text = render(Verdict(outcome="running", world_size=4, findings=[loader_finding(script)]), color=False)
    assert text.splitlines() == [
        "warning[MC204]: rank 1 is stuck in the data loader",
        f" --> {script}:3 in __getitem__ (step 8)",
        "  |",
        "1 | class D:",
        "2 |     def __getitem__(self, i):",
        "3 |         return read(self.paths[i])",
        "  |         ^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "4 |",
        "5 | x = 1",
        "  |",
        "  = observed: rank 1 is in phase data",
        "  = victims: ranks 0, 2 and 3 wait or failed because of it",
        "  = certainty: observed",
        "  = help: look at the named line",
        "  = more: model-check explain MC204",
        "",
        "running: 4 ranks: 1 warning",
    ]


def test_a_source_that_is_not_here_costs_only_its_lines(tmp_path):
    text = render(Verdict(findings=[loader_finding(tmp_path / "gone.py")]), color=False)
    assert f"{tmp_path / 'gone.py'}:3 in __getitem__" in text and " | " not in text


def test_relative_paths_are_looked_up_under_the_given_root(tmp_path):
    (tmp_path / "far.py").write_text("a\nb\nwork()\n")
    finding = loader_finding(Path("far.py"))
    assert "work()" in render(Verdict(findings=[finding]), color=False, source_root=tmp_path)


def test_colour_only_when_asked(tmp_path):
    verdict = Verdict(findings=[loader_finding(tmp_path / "gone.py")])
    assert "\x1b[" in render(verdict, color=True) and "\x1b" not in render(verdict, color=False)


def test_control_characters_of_evidence_never_reach_the_terminal(tmp_path):
    script = tmp_path / "t.py"
    script.write_text("a\nb\nprint('\x1b[2J')\n")
    finding = loader_finding(script)
    finding.title = "rank 1 raised \x1b]0;owned\x07"
    finding.evidence = ["observed: \x1b[31mred\r"]
    text = render(Verdict(findings=[finding]), color=False)
    assert all(c == "\n" or c.isprintable() for c in text)
    assert "\\x1b]0;owned" in text


@given(st.text())
def test_printable_text_stays_as_it_is_and_the_rest_is_escaped(text):
    shown = printable(text)
    assert all(c.isprintable() or c == "\t" for c in shown)
    if text.isprintable():
        assert shown == text


def test_a_run_without_findings_is_one_line():
    verdict = Verdict(outcome="completed", exit_code=0, world_size=2, steps_completed=30)
    assert render(verdict, color=False) == "completed, exit code 0: 2 ranks, 30 steps: nothing to report"


CODES = (
    [f"MC{n}" for n in range(101, 111)]
    + [f"MC{n}" for n in range(201, 224)]
    + [f"MC{n}" for n in range(301, 314)]
    + [f"MC{n}" for n in range(601, 611)]
    + [f"MC{n}" for n in range(901, 908)]
    + [f"MC{n}" for n in range(401, 418)]
    + [f"MC{n}" for n in range(501, 505)]
    + ["MC701", "MC702", "MC704", "MC705"]
)


def test_every_code_is_in_the_catalogue_with_all_its_parts():
    assert sorted(CATALOGUE) == sorted(CODES)
    for code, entry in CATALOGUE.items():
        parts = (entry.title, entry.what, entry.why, entry.how_detected, entry.example, *entry.fix)
        assert entry.fix and all(part.strip() for part in parts), code
        assert explain(code).startswith(f"{code}: {entry.title}")


def test_every_code_that_a_rule_names_is_in_the_catalogue():
    import re

    room = Path(__file__).resolve().parents[2] / "model_check" / "diagnose"
    named = {code for path in room.glob("*.py") for code in re.findall(r'"(MC\d{3})"', path.read_text())}
    assert named and named <= set(CATALOGUE)


def test_the_page_of_codes_is_fresh():
    assert DOCS.read_text(encoding="utf-8") == errors_page(), "run: model-check explain --markdown > docs/errors.md"


def run_cli(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("spelling", ["MC204", "mc204", "204"])
def test_explain_a_code(capsys, spelling):
    code, out, _ = run_cli(capsys, "explain", spelling)
    assert code == 0 and out == explain("MC204")


def test_explain_lists_all_codes(capsys):
    code, out, _ = run_cli(capsys, "explain")
    assert code == 0 and all(known in out for known in CODES) and "MC806" in out


def test_explain_an_unknown_code_names_the_nearest(capsys):
    code, out, err = run_cli(capsys, "explain", "MC2044")
    assert code == 2 and out == "" and "MC204" in err and "Traceback" not in err


def test_explain_finds_codes_by_a_word(capsys):
    code, out, _ = run_cli(capsys, "explain", "OOM")
    assert code == 0 and "MC304  killed by the OOM killer\n" in out and "MC204" not in out
    code, out, err = run_cli(capsys, "explain", "xyzzy")
    assert (code, out) == (2, "") and "no code speaks of 'xyzzy'" in err


def test_explain_for_a_program(capsys):
    import json

    code, out, _ = run_cli(capsys, "explain", "MC218", "--json")
    assert code == 0 and json.loads(out)["code"] == "MC218" and json.loads(out)["fix"]


def test_diagnose_prints_the_verdict_of_a_dead_run(capsys, stage):
    import json

    a, b = stage.ranks(2)
    stage.train(3)
    b.fails("ValueError", "boom", 33)
    b.exits(1)
    a.exits(1)
    code, out, _ = run_cli(capsys, "diagnose", str(stage.run_dir.root))
    assert code == 0 and out.startswith("error[MC301]: rank 1 raised ValueError: boom")
    code, out, _ = run_cli(capsys, "diagnose", str(stage.run_dir.root), "--json")
    assert code == 0 and json.loads(out)["findings"][0]["ranks"] == [1]


def test_diagnose_refuses_what_is_not_a_run_directory(capsys, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        code, _, err = run_cli(capsys, "diagnose", str(path))
        assert code == 2 and str(path) in err and "Traceback" not in err


def test_the_rules_work_without_torch():
    program = "import sys, model_check.diagnose; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
