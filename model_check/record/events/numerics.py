"""Events about numbers: steps that are not finite, trends of loss and gradients, replicas that differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from model_check.record.events.base import Event

Direction = Literal["forward", "backward"]
MadeIn = Literal["model", "loss_code", "script", "weight", "batch", "gradients", "unknown"]
"""Where a number that is not finite came into the step; the catalogue says what each means."""
Action = Literal["observe", "halt", "skip", "rollback", "stopped"]


@dataclass(frozen=True)
class Range:
    """How large the numbers of a tensor are."""

    absmax: float = math.nan  # of the finite ones
    mean: float = math.nan  # of the finite ones
    finite: float = 0.0  # the fraction of the numbers that are finite


@dataclass(frozen=True)
class ModuleRange:
    """One module that ran: what came in and what went out (None: nothing with a fraction)."""

    module: str = ""
    input: Range | None = None
    output: Range | None = None


@dataclass(frozen=True)
class Brought:
    """The first reduction of a step to which a rank brought a bad number."""

    number: int = 0  # among all exchanges of the step's passes: in a job whose ranks do the same, the same on each
    ranks: tuple[int, ...] = ()  # of its process group
    spreads: bool = False  # its result goes back into the pass, as that of activations does


@dataclass(frozen=True, kw_only=True)
class NonFinite(Event, kind="nonfinite"):
    """A step with numbers that are not finite, told by a rank whose own pass made them."""

    step: int = 0
    loss: float | None = None
    grad_norm: float | None = None  # None: the script stopped before there were gradients, or took no norm
    action: Action | None = None  # what became of the step; `stopped`: the script ended itself
    cause: str = "MC401"  # a code of the catalogue
    made_in: MadeIn = "unknown"
    direction: Direction | None = None
    module: str | None = None
    op: str | None = None
    location: str | None = None  # file:line
    function: str | None = None
    tensor: str | None = None  # the first bad one
    deterministic: bool | None = None  # a second run made the number again; None: it was not tried
    evidence: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # the values behind `evidence`; the catalogue lists the keys
    fix: tuple[str, ...] = ()  # empty: the catalogue's
    ranges: tuple[ModuleRange, ...] = ()  # of the modules that ran before
    sample_ids: tuple[int, ...] = ()
    dataset_ids: tuple[int, ...] = ()  # of the same samples, where a loader drew them
    token_ids: tuple[tuple[int, ...], ...] = ()  # the beginnings of the same samples, where they are tokens
    local: bool = True  # this rank is to blame; else it only reports for the job
    spoils: bool = True  # the gradients are bad too, so that an update spoils the weights
    preliminary: bool = False  # written before the step was run once more; a later event replaces it
    brought: Brought | None = None
    mixed: bool = False  # activations were exchanged before it was seen: the number may be a peer's
    # Only from our own trainer:
    rank: int | None = None
    device: str | None = None
    dump: str | None = None  # the file with the tensors
    left_out: tuple[str, ...] = ()  # tensors that did not fit into it
    not_as_asked: str | None = None  # why it stops although debug.on_nan asks for something else


@dataclass(frozen=True, kw_only=True)
class NonFiniteReceived(Event, kind="nonfinite_received"):
    """A step with gradients that are not finite, told by a rank whose own pass is not known to have made them."""

    step: int = 0
    loss: float | None = None
    action: Action | None = None
    location: str | None = None  # file:line
    why_not: str = ""  # why no forward was run again
    clean: bool | None = None  # every gradient of this rank was looked at before the exchange, and was finite
    preliminary: bool = False


@dataclass(frozen=True, kw_only=True)
class Losses(Event, kind="losses"):
    """The loss of each of these steps."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gradients(Event, kind="gradients"):
    """A look at all gradients of an optimizer, as it is about to step."""

    step: int = 0
    norms: Mapping[str, float] = field(default_factory=dict)  # by parameter, in the order of the model
    largest_output: float | None = None  # of the model
    choices: int = 0  # the last dimension of the model's output; 0: not known
    lr: tuple[float, ...] = ()  # of the parameter groups
    frozen: tuple[str, ...] = ()  # some parameters that do not require a gradient
    without_gradient: tuple[str, ...] = ()  # some that do and have none
    parameters: int = 0  # how many were looked at


@dataclass(frozen=True, kw_only=True)
class GradientsDiffer(Event, kind="gradients_differ"):
    """Replicas came to different gradients for one and the same micro-batch."""

    step: int = 0
    ranks: tuple[int, ...] = ()  # that differ
    parameter: str = ""
    by: float | None = None  # fraction of the gradient's norm; None: without bounds
    alone: bool = False  # the others agree, so these are wrong
    device: str = ""  # of the rank that writes


@dataclass(frozen=True, kw_only=True)
class ParameterSums(Event, kind="param_hash"):
    """Sums over the bits of some parameters that are equal on all ranks of a group."""

    step: int = 0
    group: tuple[int, ...] = ()  # ranks
    hashes: Mapping[str, int] = field(default_factory=dict)  # by parameter; 64 bits with a sign


@dataclass(frozen=True, kw_only=True)
class BatchSums(Event, kind="batch_hash"):
    """Sums over the bits of the model's inputs, on a rank whose model is a replica of its peers'."""

    step: int = 0
    group: tuple[int, ...] = ()  # ranks
    hashes: Mapping[str, int] = field(default_factory=dict)  # by the number of the input; 64 bits with a sign


@dataclass(frozen=True, kw_only=True)
class TokenRange(Event, kind="token_range"):
    """The forward that failed was given a token id that the embedding has no row for."""

    largest: int = 0  # id
    rows: int = 0
    module: str = ""  # the embedding


@dataclass(frozen=True, kw_only=True)
class GuardFailed(Event, kind="guard_failed"):
    """The guard ended itself: from here on the numbers of this rank are not watched."""

    error: str = ""
    traceback: str = ""
