"""AdamW with moments of 8 bits: torchao's, as the trainer drives it, and the word that a user gets without torchao."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from model_check import SimpleModel, load_config
from model_check.config.sections import TrainingSection
from model_check.engine.optimizer import build_optimizer
from model_check.errors import UsageError
from tests.conftest import Shell

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or shutil.which("g++") is None,
    reason="torchao is not installed, or no C++ compiler that its kernels are built with",
)
RATE = 1e-2


def training(states: str) -> TrainingSection:
    overrides = [f"training.optimizer_states={states}", "parallel.strategy=ddp", f"training.learning_rate={RATE}"]
    return load_config(preset="debug", overrides=overrides).training


def model() -> nn.Module:
    """Matrices of 4096 numbers and more are kept in 8 bits, smaller ones as they are."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4))


def gradients(net: nn.Module, step: int) -> None:
    net.zero_grad()
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(step))
    (net(x) - 1.0).square().mean().backward()


def test_a_torchao_that_was_built_for_another_torch_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        build_optimizer(SimpleModel(8, 1), training("8bit"))
    assert str(caught.value) == (
        "training.optimizer_states=8bit needs torchao, which cannot be imported: undefined symbol: _ZN3c10; "
        "install the torchao that was built for this torch, or set training.optimizer_states to bf16"
    )


def test_without_torchao_the_sentence_names_it_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UsageError) as error:
        build_optimizer(SimpleModel(8, 1), training("8bit"))
    assert str(error.value) == (
        "training.optimizer_states=8bit needs torchao, which is not installed; "
        "pip install torchao, or set training.optimizer_states to bf16"
    )


@needs_torchao
@pytest.mark.slow
def test_moments_take_a_byte_and_weights_stay_with_those_of_fp32() -> None:
    weights = {}
    for states in ("fp32", "8bit"):
        net = model()
        optimizer = build_optimizer(net, training(states))
        for step in range(6):
            gradients(net, step)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)  # type: ignore[attr-defined]
            optimizer.step()
        weights[states] = net[0].weight.detach().clone()  # type: ignore[index, operator]
        if states == "8bit":
            moment = optimizer.state[net[0].weight]["exp_avg"]  # type: ignore[index, union-attr]
            assert (moment.codes.dtype, moment.codes.numel()) == (torch.uint8, 96 * 96)
            assert optimizer.state[net[2].weight]["exp_avg"].nbytes == 4 * 96 * 4  # type: ignore[index, union-attr]
    moved = (weights["fp32"] - model()[0].weight).abs().max()  # type: ignore[index, operator]
    assert moved > 3 * RATE
    # A moment is off by a few hundredths of itself; a weight moves by the rate at most in a step.
    assert (weights["8bit"] - weights["fp32"]).abs().mean() < 0.1 * RATE


@needs_torchao
@pytest.mark.slow
def test_scaled_gradients_are_divided_and_a_bad_step_changes_nothing() -> None:
    plain, scaled = model(), model()
    of_plain, of_scaled = (build_optimizer(net, training("8bit")) for net in (plain, scaled))
    for step in range(3):
        gradients(plain, step)
        of_plain.step()
        gradients(scaled, step)
        for parameter in scaled.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1024.0)
        of_scaled.grad_scale, of_scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)  # type: ignore[attr-defined]
        of_scaled.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))
    before = [parameter.detach().clone() for parameter in scaled.parameters()]
    for parameter in scaled.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    of_scaled.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    of_scaled.step()
    assert all(torch.equal(a, b) for a, b in zip(before, scaled.parameters(), strict=True))
    assert {float(state["step"]) for state in of_scaled.state.values()} == {3.0}


@needs_torchao
@pytest.mark.slow
def test_vectors_that_no_gradient_reaches_stay_as_they_are() -> None:
    net = model()
    optimizer = build_optimizer(net, training("8bit"))
    gradients(net, 0)
    vectors = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for parameter in vectors:
        parameter.grad = None
    optimizer.grad_scale = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert changed == [True, False, True, False]


@needs_torchao
@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(shell: Shell) -> None:
    settings = (
        "training.optimizer_states=8bit",
        "training.learning_rate=3e-3",
        "training.max_steps=6",
        "parallel.strategy=ddp",
        "checkpoint.interval=3",
    )
    words = ["--nproc", "2", *(word for value in settings for word in ("--set", value))]
    whole = shell.train(*words)
    assert whole.code == 0, whole.out + whole.err
    assert whole.losses()[-1] < 0.95 * whole.losses()[0]
    (newest,) = shell.folder.glob(".checkpoints/*/step_00000005")
    shutil.rmtree(newest)
    rest = shell.train(*words, "--resume", "auto")
    assert rest.code == 0, rest.out + rest.err
    assert [record["step"] for record in rest.metrics()] == [3, 4, 5]
    assert rest.losses() == whole.losses()[3:]
