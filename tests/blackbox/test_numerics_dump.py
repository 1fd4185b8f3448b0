"""The dump of a failed step: loadable as the page says, safe in its twin, and never larger than allowed."""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from model_check.numerics.dump import Dumped, write_dump

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerics.md"


def failed_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """One parameter with a NaN, one gradient that is a quarter NaN, one that is all infinite."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert model[0].weight.grad is not None and model[1].bias.grad is not None
    model[0].weight.grad[1] = math.nan
    model[1].bias.grad.fill_(math.inf)
    return model


def dump(folder: Path, model: nn.Module, limit: int = 10**9, suffix: str = "") -> Dumped:
    facts = {"cause": "MC402", "sample_ids": [3, 5]}
    return write_dump(folder, 0, model.named_parameters(), facts, limit_bytes=limit, rank_suffix=suffix)


def test_the_script_of_the_page_runs_on_our_dump(tmp_path: Path) -> None:
    dump(tmp_path / ".checkpoints", failed_model())
    script = re.search(r"```python\n(import pickle.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert script is not None
    done = subprocess.run([sys.executable, "-c", script[1]], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0.weight has NaN values", "0.weight: 25.0% NaN"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_three_files_hold_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    model = failed_model(dtype)
    written = dump(tmp_path, model)
    assert written.checkpoint == tmp_path / "nan_grad_step_0.pt"
    assert written.pickle is not None and written.safetensors is not None
    content = pickle.loads(written.pickle.read_bytes())
    assert content["cause"] == "MC402" and content["step"] == 0 and content["left_out"] == []
    weights = torch.load(written.checkpoint, weights_only=True)["model"]
    with safe_open(written.safetensors, "pt") as safe:
        assert json.loads(safe.metadata()["sample_ids"]) == [3, 5]
        for name, parameter in model.named_parameters():
            array = content["parameters"][name]
            assert isinstance(array, np.ndarray) and array.shape == tuple(parameter.shape)
            assert np.array_equal(array, parameter.detach().float().numpy(), equal_nan=True)
            assert torch.equal(safe.get_tensor(f"gradients.{name}").isnan(), parameter.grad.isnan())
            assert torch.equal(weights[name].isnan(), parameter.isnan())
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_is_not_finite_goes_in_first_and_the_rest_is_listed(tmp_path: Path) -> None:
    model = failed_model()
    room = 4 * (16 + 16 + 2)  # exactly the three that are bad
    written = dump(tmp_path, model, limit=room)
    assert written.pickle is not None
    content = pickle.loads(written.pickle.read_bytes())
    assert list(content["parameters"]) == ["0.weight"]
    assert list(content["gradients"]) == ["0.weight", "1.bias"]
    assert set(written.left_out) == {
        "parameters.0.bias",
        "parameters.1.weight",
        "parameters.1.bias",
        "gradients.0.bias",
        "gradients.1.weight",
    }
    assert content["left_out"] == list(written.left_out)
    assert written.checkpoint == tmp_path / "nan_grad_step_0.pt", "30 weights of 4 bytes still fit"
    assert dump(tmp_path, model, limit=60).checkpoint is None


def test_no_room_writes_nothing_and_other_ranks_have_their_own_names(tmp_path: Path) -> None:
    assert dump(tmp_path, failed_model(), limit=0).files == []
    assert list(tmp_path.iterdir()) == []
    names = [path.name for path in dump(tmp_path, failed_model(), suffix="_rank_3").files]
    assert names == ["nan_grad_step_0_rank_3.pt", "nan_debug_step_0_rank_3.pkl", "nan_debug_step_0_rank_3.safetensors"]


def test_gradients_in_one_bucket_are_kept_apart(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    bucket = torch.arange(8.0)
    model.weight.grad, model.bias.grad = bucket[:6].view(2, 3), bucket[6:]
    written = dump(tmp_path, model)
    assert written.safetensors is not None
    with safe_open(written.safetensors, "pt") as safe:
        assert safe.get_tensor("gradients.bias").tolist() == [6.0, 7.0]


@settings(max_examples=25, deadline=None)
@given(limit=st.integers(1, 400), bad=st.sets(st.integers(0, 3)))
def test_a_file_never_holds_more_than_allowed(
    tmp_path_factory: pytest.TempPathFactory, limit: int, bad: set[int]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, math.nan if number in bad else 1.0)
    written = dump(tmp_path_factory.mktemp("dump"), model, limit=limit)
    assert written.pickle is not None
    content = pickle.loads(written.pickle.read_bytes())
    held = [*content["parameters"].values(), *content["gradients"].values()]
    assert sum(array.nbytes for array in held) <= limit
    assert len(held) + len(written.left_out) == 8
