"""Background saves on a real GPU, by every way of copying: the bytes are those of the step that saved, and training
goes on at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saver
from model_check.checkpoint.shards import load_into
from model_check.checkpoint.staging import Limits
from model_check.checkpoint.verify import verify
from model_check.config import load_config
from model_check.engine.arrangement import arrange_llama
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.resume import model_tensors, optimizer_tensors
from model_check.engine.step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NO_DEVICE = 1 << 62
ROUTES = {
    "device": Limits(device_margin=0),
    "pinned": Limits(device_margin=NO_DEVICE),
    "pageable": Limits(device_margin=NO_DEVICE, pinned_share=0.0),
}
VOCABULARY = 32_000


def small_llama() -> tuple[TrainStep, Any]:
    """About 100 MB of parameters, 400 MB of state: a copy that takes longer than a launch."""
    config = load_config(
        overrides=[
            "model.model_path=null",
            "model.num_layers=4",
            "model.hidden_size=768",
            "model.num_heads=12",
            "model.num_kv_heads=12",
            "model.intermediate_size=2048",
            f"model.vocab_size={VOCABULARY}",
            "training.precision=bf16",
            "training.compile=off",
        ]
    )
    place = Place(device=torch.device("cuda", 0), label="GPU0")
    arranged = arrange_llama(config, place, VOCABULARY)
    step = TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, config.training),
        arranged.precision,
        place,
        max_grad_norm=1.0,
        passes=arranged.passes,
    )
    tokens = torch.randint(0, VOCABULARY, (2, 513), generator=torch.Generator().manual_seed(0)).cuda()
    batch = SimpleNamespace(
        tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), document_ids=None, positions=None
    )
    return step, batch


def state_of(step: TrainStep) -> dict[str, torch.Tensor]:
    return {**model_tensors(step.model), **optimizer_tensors(step.model, step.optimizer)}


def loaded_like(path: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    loaded = {name: torch.empty_like(tensor, device="cpu") for name, tensor in state.items()}
    load_into(path, verify(path).manifest, loaded)
    return loaded


@pytest.mark.parametrize("route", ROUTES)
def test_training_on_does_not_change_what_is_saved(route: str, tmp_path: Path) -> None:
    step, batch = small_llama()
    saver = Saver(tmp_path, Peers(), name="run", limits=ROUTES[route])
    step.before_update = saver.hold_update
    step([batch], 1e-3)
    saver.prepare(state_of(step))
    for number in range(2):
        step([batch], 1e-3)
        expected = {name: tensor.clone() for name, tensor in state_of(step).items()}
        saver.save(number, state_of(step), {})
        for _ in range(3):
            step([batch], 1e-3)
        torch.cuda.synchronize()
        waited = saver.device_wait_s()
        saver.wait()
        (saved,) = saver.poll()
        assert saved.error is None
        found = loaded_like(saved.path, expected)
        different = [name for name, tensor in expected.items() if not torch.equal(tensor.cpu(), found[name])]
        assert different == []
        moved = state_of(step)["model.layers.0.feed_forward.w1.weight"]
        assert not torch.equal(moved, expected["model.layers.0.feed_forward.w1.weight"]), "training stood still"
        assert (waited is not None and waited >= 0) == (route == "pinned")
        assert ("pageable memory" in saved.note) == (route == "pageable")


@pytest.mark.parametrize("route", ["device", "pinned"])
def test_an_update_right_after_the_save_comes_after_the_copy(route: str, tmp_path: Path) -> None:
    """A gigabyte takes the bus tens of milliseconds; overwriting it takes the device less than one."""
    values = torch.arange(1 << 28, dtype=torch.int32, device="cuda")
    saver = Saver(tmp_path, Peers(), name="run", limits=ROUTES[route])
    saver.prepare({"model.w": values})
    saver.save(0, {"model.w": values}, {})
    saver.hold_update()
    values.zero_()
    saver.wait()
    (saved,) = saver.poll()
    assert saved.error is None
    found = loaded_like(saved.path, {"model.w": values})["model.w"]
    assert torch.equal(found, torch.arange(1 << 28, dtype=torch.int32))


def test_the_device_gets_its_memory_back(tmp_path: Path) -> None:
    values = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    saver = Saver(tmp_path, Peers(), name="run", limits=ROUTES["device"])
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    saver.save(0, {"model.w": values}, {})
    assert torch.cuda.mem_get_info()[0] < before - (1 << 29), "the copy was not made on the device"
    saver.wait()
    assert saver.poll()[0].error is None
    assert torch.cuda.mem_get_info()[0] > before - (1 << 26)


def test_a_strided_shard_is_saved_as_its_values(tmp_path: Path) -> None:
    values = torch.arange(12_000.0, device="cuda").view(100, 120).T
    for route, limits in ROUTES.items():
        saver = Saver(tmp_path / route, Peers(), name="run", limits=limits)
        saver.prepare({"model.w": values})
        saver.save(0, {"model.w": values}, {})
        saver.wait()
        (saved,) = saver.poll()
        assert saved.error is None
        found = loaded_like(saved.path, {"model.w": values.contiguous()})["model.w"]
        assert torch.equal(found, values.cpu())
