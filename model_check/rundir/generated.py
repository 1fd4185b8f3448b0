"""Recognises files that a compiler generated, and that show up in stacks."""

from __future__ import annotations

import re

# Inductor names a file after its content, in a folder named after the first letters, wherever its cache is.
_GENERATED = re.compile(r"^<|/torchinductor_[^/]*/|/[a-z2-7]{2}/c[a-z2-7]{40,}\.py$|/\.triton/|/torch_extensions/")


def is_generated(path: str) -> bool:
    """`<string>`, `<eval_with_key>.3`, a kernel of Inductor or Triton: no line for a user to look at."""
    return _GENERATED.search(path) is not None
