"""Which files no person wrote: those that a compiler generates, runs and shows in its stacks."""

from __future__ import annotations

import re

# Inductor names a file after its content, in a folder named after the first letters, wherever its cache lies.
_GENERATED = re.compile(r"^<|/torchinductor_[^/]*/|/[a-z2-7]{2}/c[a-z2-7]{40,}\.py$|/\.triton/|/torch_extensions/")


def is_generated(path: str) -> bool:
    """`<string>`, `<eval_with_key>.3`, a kernel of Inductor or Triton: nobody's line to look at."""
    return _GENERATED.search(path) is not None
