"""Lines of a test's own source that failures are expected at, found by the comment that ends them."""

from __future__ import annotations

from pathlib import Path


def line_of(file: str, mark: str) -> str:
    """`file:line` of the one line that ends with `# mark`."""
    found = [n for n, text in enumerate(Path(file).read_text().splitlines(), 1) if text.endswith(f"  # {mark}")]
    assert len(found) == 1, f"{len(found)} lines of {file} end with # {mark}"
    return f"{file}:{found[0]}"
