"""The room as a whole: what it offers, and what it costs to enter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import model_check.data


def test_every_name_it_offers_exists() -> None:
    for name in model_check.data.__all__:
        assert getattr(model_check.data, name) is not None


def test_preparing_data_needs_no_torch_and_no_hub_library(tmp_path: Path) -> None:
    code = """
import sys
from model_check.data import DataSpec, prepare
prepare(DataSpec(samples=100, context_length=32, cache_dir=sys.argv[1]))
print(sorted({"torch", "datasets", "huggingface_hub", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
