"""What a checkpoint holds of a rank, and how it is put back: weights, optimizer, random numbers.

Everything is a tensor under a name that does not depend on the layout:
    model.<parameter>     optimizer.<parameter>.<moment>     rng.<rank>.<generator>
The learning rate is a function of the step, and the optimizer's settings come from the configuration: neither is saved.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from model_check.checkpoint.manifest import Manifest
from model_check.checkpoint.weight_files import Weights, clean_name
from model_check.errors import CheckpointError
from model_check.models import own_name
from model_check.models.distribute import fill

_MOST_NAMES = 6
# What else to do about weights that do not fit, by where they were asked for.
_RESUMED = "name another checkpoint, or start without --resume"
PRETRAINED = "set model.model_path to another file, or model.init to random"


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
    """Makes the moments exist, as the first step would, so that they can be filled: a step of nothing by nothing."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


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


def _misfit(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], what: str, instead: str = _RESUMED
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
    more = len(faults) - _MOST_NAMES
    named = "; ".join(faults[:_MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
    return CheckpointError(
        f"{what} is of another model: {named}",
        remedy=f"give model.* the values it was saved with, {instead}",
        code="MC607",
    )


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: Weights, shapes: Mapping[str, tuple[int, ...]], *, instead: str = _RESUMED
) -> None:
    """Fills the model from a plain file of weights, one tensor at a time; our names or Hugging Face's.

    shapes: those of the whole model, of which this rank may hold a part.
    """
    stored = {f"model.{name}": tensor for name, tensor in weights.tensors.items() if not name.endswith("inv_freq")}
    if not shapes.keys() & stored.keys():
        stored = {f"model.{_own_name(name.removeprefix('model.'))}": tensor for name, tensor in stored.items()}
        if "model.output.weight" not in shapes:
            stored.pop("model.output.weight", None)
    wrong = _misfit({name: tensor.shape for name, tensor in stored.items()}, shapes, str(weights.path), instead)
    if wrong is not None:
        raise wrong
    for name, target in model_tensors(model).items():
        fill(target, stored[name].read())


def _own_name(name: str) -> str:
    try:
        return own_name(name)
    except KeyError:
        return name
