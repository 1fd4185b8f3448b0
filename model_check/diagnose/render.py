"""A verdict for a person: each finding reads like a compiler's error, with the line, the evidence and the help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.findings import ended_by_text, lost_peers_text
from model_check.diagnose.numerics import NONFINITE
from model_check.diagnose.source import lines_around
from model_check.record import Finding, Verdict

_COLORS = {"error": "\x1b[1;31m", "warning": "\x1b[1;33m", "info": "\x1b[1;36m"}
_BOLD, _BLUE, _RESET = "\x1b[1m", "\x1b[1;34m", "\x1b[0m"
_CONTEXT = 2


def render(
    verdict: Verdict,
    *,
    color: bool = False,
    source_root: Path | str | None = None,
    told_before: Callable[[Finding], bool] = lambda _: False,
) -> str:
    """All findings, root cause first, and one line that sums them up. Of what was `told_before`: what came of it."""
    root = Path(source_root) if source_root is not None else None
    blocks = [
        _as_above(finding, color) if told_before(finding) else _finding(finding, color, root)
        for finding in verdict.findings
    ]
    notes = "\n".join(f"note: {printable(note)}" for note in verdict.notes)
    return "\n\n".join(filter(None, [*blocks, notes, _summary(verdict)]))


def printable(text: str) -> str:
    """Evidence comes from scripts and files: no control character of theirs may reach the terminal."""
    return "".join(c if c == "\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _paint(text: str, style: str, color: bool) -> str:
    return f"{style}{text}{_RESET}" if color else text


def _head(finding: Finding, color: bool) -> str:
    code = _paint(f"{finding.severity}[{finding.code}]", _COLORS[finding.severity], color)
    return f"{code}{_paint(': ' + printable(finding.title), _BOLD, color)}"


def _as_above(finding: Finding, color: bool) -> str:
    bar = _paint("=", _BLUE, color)
    lost = finding.facts.get("ended_by", {}).get("lost_peers", {})
    since = [f"  {bar} {printable(said)}" for said in (*ended_by_text(finding), *lost_peers_text(lost))]
    return "\n".join([f"{_head(finding, color)} (as above)", *since])


def _suffered(finding: Finding) -> str:
    """A bad number stops nobody: the others compute on with what they were sent, unless the script stops by itself."""
    if finding.code in NONFINITE and not finding.facts.get("stranded"):
        return "received its bad gradients"
    return f"{'waits' if len(finding.victims) == 1 else 'wait'} or failed because of it"


def _finding(finding: Finding, color: bool, root: Path | None) -> str:
    lines = [_head(finding, color)]
    lines += _source(finding, color, root)
    bar = _paint("=", _BLUE, color)
    gutter = " " * (_gutter(finding) + 1)
    for sentence in finding.evidence:
        lines.append(f"{gutter}{bar} {printable(sentence)}")
    if finding.victims:
        lines.append(f"{gutter}{bar} victims: {ranks_text(finding.victims)} {_suffered(finding)}")
    if finding.certainty != "proven":
        lines.append(f"{gutter}{bar} certainty: {finding.certainty}")
    for fix in finding.fix:
        lines.append(f"{gutter}{bar} {_paint('help', _BOLD, color)}: {printable(fix)}")
    lines.append(f"{gutter}{bar} more: model-check explain {finding.code}")
    return "\n".join(lines)


def _gutter(finding: Finding) -> int:
    _, line = _place(finding)
    return len(str(line + _CONTEXT)) if line else 1


def _place(finding: Finding) -> tuple[str, int]:
    file, _, line = (finding.location or "").rpartition(":")
    return (file, int(line)) if line.isdigit() else ("", 0)


def _source(finding: Finding, color: bool, root: Path | None) -> list[str]:
    """The named line with its neighbours, where the file can be read here."""
    file, line = _place(finding)
    if not file:
        return []
    width = _gutter(finding)
    where = f" in {printable(finding.function)}" if finding.function else ""
    known = [f"step {finding.step}"] if finding.step is not None else []
    known += ["last recorded line"] if finding.facts.get("last_recorded") else []
    step = f" ({', '.join(known)})" if known else ""
    arrow, bar = _paint("-->", _BLUE, color), _paint("|", _BLUE, color)
    lines = [f"{' ' * width}{arrow} {printable(file)}:{line}{where}{step}"]
    shown = lines_around(file, line, _CONTEXT, str(root) if root is not None else "")
    if not shown:
        return lines
    lines.append(f"{' ' * width} {bar}")
    for number, text in shown:
        label = _paint(f"{number:>{width}} |", _BLUE, color)
        lines.append(f"{label} {printable(text)}".rstrip())
        if number == line:
            body = text.lstrip()
            blank = text[: len(text) - len(body)].replace("\t", "    ")
            carets = _paint("^" * max(1, len(body.split("  #")[0].rstrip())), _COLORS[finding.severity], color)
            lines.append(f"{' ' * width} {bar} {blank}{carets}")
    lines.append(f"{' ' * width} {bar}")
    return lines


def _summary(verdict: Verdict) -> str:
    counts = {
        severity: sum(f.severity == severity for f in verdict.findings) for severity in ("error", "warning", "info")
    }
    named = [f"{count} {severity}{'s' if count != 1 else ''}" for severity, count in counts.items() if count]
    size = f"{verdict.world_size} rank{'s' if verdict.world_size != 1 else ''}"
    code = f", exit code {verdict.exit_code}" if verdict.exit_code is not None else ""
    done = verdict.steps_completed
    steps = f", {done} step{'s' if done != 1 else ''}" if done else ""
    found = ", ".join(named) if named else "nothing to report"
    return f"{verdict.outcome}{code}: {size}{steps}: {found}{_not_trained(verdict)}"


def _not_trained(verdict: Verdict) -> str:
    """A run with NaN losses ends like any other; only this line says that its time was wasted."""
    for finding in verdict.findings:
        if "lost_steps" in finding.facts:
            since = f" from step {finding.step} on" if finding.step is not None else ""
            return f"; it did not train{since} ({finding.code}): --guard halt ends a run there"
    return ""
