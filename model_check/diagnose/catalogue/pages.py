"""The catalogue as text for a terminal and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent, wrap

from model_check.diagnose.catalogue.entry import COMMON_FACTS, Entry

_FAMILIES = {
    "MC1": "Start",
    "MC2": "Hang",
    "MC3": "Crash",
    "MC4": "Numerics",
    "MC5": "Memory",
    "MC6": "Checkpoint",
    "MC7": "Slow",
    "MC9": "Data",
}
_WIDTH = 96


def _paragraph(heading: str, text: str) -> str:
    return f"{heading}\n" + indent("\n".join(wrap(text, _WIDTH)), "  ")


def as_text(code: str, entry: Entry) -> str:
    fixes = "\n".join(f"  - {fix}" for fix in entry.fix)
    ours = "\n".join(f"  - {fix}" for fix in entry.ours)
    parts = [
        f"{code}: {entry.title}",
        _paragraph("What it means", entry.what),
        _paragraph("Why it happens", entry.why),
        _paragraph("How it is detected", entry.how_detected),
        f"What to do\n{fixes}",
        *([f"What to do with model-check train\n{ours}"] if ours else []),
        *_listed("Causes (field `cause`)", entry.causes),
        *_listed("Facts (field `facts`)", entry.facts),
        "Example\n" + indent(entry.example, "  "),
    ]
    return "\n\n".join(parts) + "\n"


def _listed(heading: str, meanings: Mapping[str, str]) -> list[str]:
    lines = [f"  {name}: {meaning}" for name, meaning in meanings.items()]
    return ["\n".join([heading, *lines])] if lines else []


def as_markdown(catalogue: Mapping[str, Entry]) -> str:
    lines = [
        "# Error codes",
        "",
        "Every finding of a verdict carries one of these codes. `model-check explain CODE` prints the same text.",
        "This page is generated from the catalogue: `model-check explain --markdown`.",
        "",
        "Besides the facts listed with a code, the `facts` of a finding may hold:",
        "",
        *(f"- `{name}`: {said}" for name, said in COMMON_FACTS.items()),
        "",
    ]
    family = ""
    for code in sorted(catalogue):
        if _FAMILIES[code[:3]] != family:
            family = _FAMILIES[code[:3]]
            lines += [f"## {code[:3]}xx: {family}", ""]
        entry = catalogue[code]
        lines += [f"### {code}: {entry.title}", "", entry.what, "", f"**Why.** {entry.why}", ""]
        lines += [f"**How it is detected.** {entry.how_detected}", "", "**What to do.**", ""]
        lines += [*(f"- {fix}" for fix in entry.fix), ""]
        if entry.ours:
            lines += ["**What to do with `model-check train`.**", "", *(f"- {fix}" for fix in entry.ours), ""]
        for heading, meanings in (("Field `cause`", entry.causes), ("Field `facts`", entry.facts)):
            if meanings:
                lines += [f"**{heading}.**", "", *(f"- `{name}`: {said}" for name, said in meanings.items()), ""]
        lines += ["```text", entry.example, "```", ""]
    return "\n".join(lines).rstrip() + "\n"
