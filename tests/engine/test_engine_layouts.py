"""What the engine does under a layout: gathers, agreement on a skipped step, optimizer states, FSDPTrainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from model_check import FSDPTrainer, SimpleModel, load_config
from model_check.config import Config
from model_check.data import prepare
from model_check.engine.arrangement import arrange_llama, arrange_module
from model_check.engine.data_and_shape import data_spec
from model_check.engine.evaluate import check_held_out
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.sharded import ShardedModel, ShardedNorm
from model_check.engine.split_adamw import SplitAdamW
from model_check.engine.step import TrainStep
from model_check.errors import UsageError
from tests.models.test_models_parallelize import on_ranks

BATCH = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))


def config(*overrides: str) -> Config:
    return load_config(preset="debug", overrides=["parallel.strategy=fsdp", *overrides])


def sharded_step(settings: Config, place: Place, model: nn.Module | None = None) -> TrainStep:
    arranged = arrange_llama(settings, place, 64) if model is None else arrange_module(settings, place, model)
    return TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, settings.training),
        arranged.precision,
        place,
        max_grad_norm=1.0,
        passes=arranged.passes,
        norm_of=arranged.norm_of,
        losses_in_job=arranged.losses_in_job,
    )


# A unit is one of the two blocks, the embedding, or the root with norm and output. Kept, each is gathered and scattered
# once a step. Freed, each of 3 micro-batches gathers a block twice; the embedding (unread in backward) and root once.
@pytest.mark.parametrize(("reshard", "gathers", "scatters"), [("off", 4, 4), ("on", 3 * (2 * 2 + 1 + 1), 3 * 4)])
def test_accumulation_gathers_and_scatters_no_more_than_it_must(reshard: str, gathers: int, scatters: int) -> None:
    def work(rank: int) -> dict[str, int]:
        step = sharded_step(config(f"fsdp.reshard={reshard}"), Place(rank, 2))
        micro_batches = [(BATCH[:, :-1], BATCH[:, 1:])] * 3
        step(micro_batches, 1e-3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step(micro_batches, 1e-3)
        return {e.key: e.count for e in profile.key_averages() if e.key.startswith("c10d::")}

    for calls in on_ranks(2, work):
        assert calls["c10d::_allgather_base_"] == gathers
        assert calls["c10d::_reduce_scatter_base_"] == scatters


def test_all_ranks_skip_a_step_that_is_bad_on_one() -> None:
    def work(rank: int) -> tuple[list[float], bool]:
        model = SimpleModel(hidden_size=8, num_layers=2, vocab_size=64)
        step = sharded_step(config(), Place(rank, 2), model)
        before = [p.to_local().clone() for p in model.parameters()]  # type: ignore[operator]
        hook = model.embed.register_forward_hook(lambda m, i, out: out * math.inf if rank == 1 else out)
        packed = step([(BATCH[:, :-1], BATCH[:, 1:])], 1e-2).tolist()
        hook.remove()
        unchanged = all(
            torch.equal(a, p.to_local())  # type: ignore[operator]
            for a, p in zip(before, model.parameters(), strict=True)
        )
        return packed, unchanged

    for (_, norm, skipped, *_), unchanged in on_ranks(2, work):
        assert not math.isfinite(norm) and skipped == 1.0 and unchanged


def test_every_rank_clips_by_the_norm_of_the_whole() -> None:
    def work(rank: int) -> float:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        values = torch.arange(1.0, 13.0).view(4, 3)
        pieces = [
            distribute_tensor(values, mesh["dp_shard"], [Shard(0)]),
            distribute_tensor(values, mesh["dp_shard", "tp"], [Shard(0), Shard(1)]),
            distribute_tensor(values, mesh["dp_shard", "tp"], [Replicate(), Shard(0)]),
            values,
        ]
        return ShardedNorm(mesh, torch.device("cpu"))(pieces).item()

    expected = math.sqrt(4 * sum(v * v for v in range(1, 13)))
    assert on_ranks(4, work) == pytest.approx([expected] * 4, rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_states_follow_the_fp32_ones(strategy: str) -> None:
    """Moments of bf16 are off by 2**-9, and so is the step they make; two rounds of noise stay below 1 %."""

    def work(rank: int) -> list[list[float]]:
        curves = []
        for states in ("fp32", "bf16"):
            settings = config(f"parallel.strategy={strategy}", f"training.optimizer_states={states}")
            step = sharded_step(settings, Place(rank, 2))
            if states == "bf16":
                assert isinstance(step.optimizer, SplitAdamW)
            curves.append([step([(BATCH[:, :-1], BATCH[:, 1:])], 1e-2)[0].item() for _ in range(6)])
            moments = {s["exp_avg"].dtype for s in step.optimizer.state.values()}
            assert moments == {torch.float32 if states == "fp32" else torch.bfloat16}
        return curves

    for fp32, bf16 in on_ranks(2, work):
        assert fp32[-1] < 0.9 * fp32[0]
        assert bf16 == pytest.approx(fp32, rel=0.01) and bf16 != fp32


def test_one_rank_may_shard_too() -> None:
    def work(rank: int) -> tuple[str, float]:
        dist.destroy_process_group()
        step = sharded_step(config(), Place())
        assert isinstance(step.passes, ShardedModel)
        return step.passes.model.__class__.__name__, step([(BATCH[:, :-1], BATCH[:, 1:])], 1e-3)[0].item()

    [(name, loss)] = on_ranks(1, work)
    assert name == "FSDPLlama"
    plain = sharded_step(load_config(preset="debug"), Place())
    assert loss == pytest.approx(plain([(BATCH[:, :-1], BATCH[:, 1:])], 1e-3)[0].item(), rel=1e-6)


def test_fsdp_trainer_trains_any_module_as_rank_0_has_it() -> None:
    def work(rank: int) -> tuple[list[float], int]:
        torch.manual_seed(rank)  # each rank starts elsewhere; rank 0's weights count
        model = SimpleModel(hidden_size=16, num_layers=2, vocab_size=64)
        trainer = FSDPTrainer(
            model=model,
            config=load_config(preset="debug", overrides=["training.learning_rate=1e-2"]),
            rank=rank,
            world_size=2,
            gradient_accumulation_steps=2,
            data=[(BATCH[:, :-1], BATCH[:, 1:])],
        )
        losses = trainer.train(num_steps=8).losses
        return losses, sum(p.to_local().numel() for p in model.parameters())  # type: ignore[operator, union-attr]

    torch.manual_seed(0)
    reference = SimpleModel(hidden_size=16, num_layers=2, vocab_size=64)
    first = reference(BATCH[:, :-1], BATCH[:, 1:]).item()
    for losses, held in on_ranks(2, work):
        assert losses[0] == pytest.approx(first, rel=1e-6)
        assert losses[-1] < 0.9 * losses[0]
        assert held == sum(p.numel() for p in reference.parameters()) // 2


def test_only_a_llama_can_be_cut_into_slices_and_stages() -> None:
    with pytest.raises(UsageError, match="cut a Llama, not a SimpleModel"):
        arrange_module(config("parallel.tensor=2"), Place(0, 2), SimpleModel(8, 1))


def test_ranks_that_share_a_model_need_the_held_out_samples_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("data.samples=300", "training.context_length=32", "training.eval_interval=1", "parallel.tensor=1")
    held_out = prepare(data_spec(config(*settings))).valid
    assert held_out is not None
    whole = held_out.samples(32)
    alone = config(*settings, f"training.batch_size={whole}")
    check_held_out(alone, 1, held_out)
    with pytest.raises(UsageError, match=f"the {whole} held-out samples do not fill one batch of {2 * whole}"):
        check_held_out(alone, 2, held_out)
    check_held_out(config(*settings[:-1], f"training.batch_size={whole}", "parallel.tensor=2"), 2, held_out)
