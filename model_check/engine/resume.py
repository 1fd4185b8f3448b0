"""What a checkpoint holds of a rank, and how it is put back: weights, optimizer, random numbers.

Everything is a tensor under a name that does not depend on the layout:
    model.<parameter>     optimizer.<parameter>.<moment>     rng.<rank>.<generator>
The learning rate is a function of the step, and the optimizer's settings come from the configuration: neither is saved.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model_check.blackbox.box import BOX
from model_check.checkpoint.manifest import Manifest
from model_check.checkpoint.weight_files import StoredTensor, Weights, clean_name
from model_check.data import Cursor
from model_check.engine.split_adamw import master_of, store_master
from model_check.errors import CheckpointError
from model_check.models import own_name
from model_check.models.distribute import fill

_MOST_NAMES = 3
# What else to do about weights that do not fit, by where they were asked for.
_RESUMED = "give model.* the values it was saved with, name another checkpoint, or start without --resume"
PRETRAINED = "give model.* the values it was saved with, set model.model_path to another file, or model.init to random"


@dataclass(frozen=True)
class Progress:
    """Where training stood: what a checkpoint says besides its tensors. `data` is empty where it does not say."""

    step: int
    tokens: int
    cursor: Cursor
    loss_scale: dict[str, float]
    data: dict[str, Any]


def progress_of(manifest: Manifest) -> Progress:
    """Raises MC601 where the manifest does not say it, or says what cannot be."""
    extra = manifest.extra
    try:
        cursor = Cursor(int(extra["cursor"]["epoch"]), int(extra["cursor"]["position"]))
        scale = {key: float(extra["loss_scale"][key]) for key in ("scale", "good_steps")}
        found = Progress(int(extra["step"]), int(extra["tokens"]), cursor, scale, dict(extra.get("data") or {}))
        if min(found.step, found.tokens, cursor.epoch, cursor.position, scale["scale"], scale["good_steps"]) < 0:
            raise ValueError("a number below 0")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} does not say where training stood "
            f"({type(error).__name__}: {error})",
            remedy="resume from another checkpoint, or convert it to .pt and start from its weights",
            code="MC601",
        ) from error
    return found


def is_other_data(manifest: Manifest, now: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was trained on other tokens. Their order, which depends on the seed, does not matter."""
    then = manifest.extra.get("data")
    return isinstance(then, dict) and "tokens" in then and then["tokens"] != now.get("tokens")


def data_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What to tell the user where a place in the data of a checkpoint is no place in today's; nothing where it is."""
    changes = [
        f"{key} was {then[key]} and is {now[key]}"
        for key in ("system.seed", "training.context_length")
        if key in then and key in now and then[key] != now[key]
    ]
    if "tokens" in then and "tokens" in now and then["tokens"] != now["tokens"]:
        changes.append("its tokens are others")
    if not changes:
        return []
    return [
        f"[MC609] the data is not that of the checkpoint ({'; '.join(changes)}): it starts at its first sample, and "
        "samples may come again"
    ]


def other_ranks_note(then: int, now: int) -> str:
    ranks = "1 rank" if then == 1 else f"{then} ranks"
    return (
        f"[MC606] saved on {ranks}, continued on {now}: the place in the data counts samples, whatever the ranks; "
        "random generators are seeded anew"
    )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{clean_name(name)}": tensor for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's own tensors under the names of the parameters they belong to."""
    names: dict[Tensor, str] = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    return {
        name: tensor
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
        for name, tensor in _plain_tensors(f"optimizer.{names[parameter]}.{key}", value)
    }


def _plain_tensors(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A quantized moment is several tensors in the shape of one: codes, scales, a table."""
    local = value.to_local() if hasattr(value, "to_local") else value
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is None:
        yield name, value
        return
    assert local is value, f"{name} is quantized and sharded, which the configuration refuses"
    for part in flatten()[0]:
        yield f"{name}.{part}", getattr(local, part)


def materialize_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Makes the moments exist, as the first step would, so that they can be filled: a step of nothing by nothing.

    It trains nothing, so the black box must not count it.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    with BOX.unrecorded():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@torch.no_grad()
def carry_masters(folder: Path, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills the weights whose fp32 master the checkpoint keeps in another form than this rank; one tensor at a time.

    Whole parameters on a GPU are bf16 with the low half of the master beside them (see split_adamw); shards are fp32.
    Copying one into the other would round every weight to bf16, and with it lose the small steps of the last part of a
    training.
    """
    from model_check.checkpoint.shards import read_tensor

    for held_as, parameter in model.named_parameters():
        name = clean_name(held_as)
        stored, stored_low = manifest.tensors.get(f"model.{name}"), manifest.tensors.get(f"optimizer.{name}.low")
        low = optimizer.state[parameter].get("low") if parameter in optimizer.state else None
        if stored is None or (stored_low is None) == (low is None):
            continue
        whole = read_tensor(folder, stored)
        if stored_low is not None:
            fill(parameter, master_of(whole, read_tensor(folder, stored_low)))
        elif low is not None and whole.dtype == torch.float32:
            store_master(whole.to(parameter.device), parameter, low)


def random_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Every generator of this rank: Python's, numpy's, torch's on the CPU and on its GPU."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    host = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]}
    tensors = {
        f"rng.{rank}.host": torch.frombuffer(bytearray(json.dumps(host).encode()), dtype=torch.uint8),
        f"rng.{rank}.cpu": torch.get_rng_state(),
    }
    if device.type == "cuda":
        tensors[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_random(folder: Path, manifest: Manifest, rank: int, device: torch.device) -> None:
    """Puts this rank's generators back, where the checkpoint has them."""
    from model_check.checkpoint.shards import read_tensor

    stored = {
        kind: read_tensor(folder, manifest.tensors[name])
        for kind in ("host", "cpu", "cuda")
        if (name := f"rng.{rank}.{kind}") in manifest.tensors
    }
    if "host" in stored:
        host = json.loads(bytes(stored["host"].numpy()))
        version, keys, gauss = host["python"]
        random.setstate((version, tuple(keys), gauss))
        kind, numpy_keys, *rest = host["numpy"]
        np.random.set_state((kind, np.array(numpy_keys, dtype=np.uint32), *rest))
    if "cpu" in stored:
        torch.set_rng_state(stored["cpu"])
    if "cuda" in stored and device.type == "cuda":
        torch.cuda.set_rng_state(stored["cuda"], device)


def model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Whole shapes, also of sharded tensors."""
    return {name: tuple(tensor.shape) for name, tensor in model_tensors(model).items()}


def misfit(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> CheckpointError | None:
    """Why a model of these shapes cannot take the weights of a checkpoint, naming the tensors; None where it can."""
    stored = {name: entry.shape for name, entry in manifest.tensors.items() if name.startswith("model.")}
    return _misfit(stored, shapes, f"the checkpoint of step {manifest.step}")


def check_moments(manifest: Manifest, moments: Mapping[str, Tensor]) -> None:
    """Raises MC607 where the optimizer holds what the checkpoint does not: a moment of zero is a wrong one.

    The low half of a master is not missed: parameters saved in fp32 have none.
    """
    faults = [
        f"{name} is {list(entry.shape)} there and {list(moment.shape)} here" if entry else f"{name} is not there"
        for name, moment in moments.items()
        if not name.endswith(".low")
        and ((entry := manifest.tensors.get(name)) is None or entry.shape != tuple(moment.shape))
    ]
    if not faults:
        return
    raise CheckpointError(
        f"the checkpoint of step {manifest.step} has another optimizer state: {_a_few(faults)}",
        remedy="set training.optimizer_states to what it was saved with, or convert it to .pt and start from its "
        "weights",
        code="MC607",
    )


def _a_few(faults: list[str]) -> str:
    more = len(faults) - _MOST_NAMES
    return "; ".join(faults[:_MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")


def _misfit(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], what: str, remedy: str = _RESUMED
) -> CheckpointError | None:
    faults = [
        *(
            f"{name} is {list(stored[name])} there and {list(shape)} here"
            for name, shape in wanted.items()
            if name in stored and stored[name] != shape
        ),
        *(f"{name} is not there" for name in wanted if name not in stored),
        *(f"{name} is there alone" for name in stored if name not in wanted),
    ]
    if not faults:
        return None
    return CheckpointError(
        f"{what} is of another model: {_a_few(faults)}",
        remedy=remedy,
        code="MC607",
    )


def fitting_tensors(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], *, remedy: str = _RESUMED
) -> dict[str, StoredTensor]:
    """What a plain file holds for a model of these shapes, by the model's names; raises MC607 where it is another's.

    The file may have our names or Hugging Face's.
    """
    stored = {f"model.{name}": tensor for name, tensor in weights.tensors.items() if not name.endswith("inv_freq")}
    if not shapes.keys() & stored.keys():
        stored = {f"model.{_own_name(name.removeprefix('model.'))}": tensor for name, tensor in stored.items()}
        if "model.output.weight" not in shapes:
            stored.pop("model.output.weight", None)
    wrong = _misfit({name: tensor.shape for name, tensor in stored.items()}, shapes, str(weights.path), remedy)
    if wrong is not None:
        raise wrong
    return stored


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: Weights, shapes: Mapping[str, tuple[int, ...]], *, remedy: str = _RESUMED
) -> None:
    """Fills the model from a plain file of weights, one tensor at a time.

    shapes: those of the whole model, of which this rank may hold a part.
    """
    stored = fitting_tensors(weights, shapes, remedy=remedy)
    for name, target in model_tensors(model).items():
        fill(target, stored[name].read())


def _own_name(name: str) -> str:
    try:
        return own_name(name)
    except KeyError:
        return name
