"""MC4xx: numbers that are not finite, or not what they should be."""

from __future__ import annotations

from model_check.diagnose.catalogue.entry import Entry

_MADE_IN = {
    "model": "an operation in a module's forward, or its derivative",
    "loss_code": "an operation of the script between its model and `backward()`",
    "script": "an operation of the script between two modules",
    "weight": "a parameter or a buffer was not finite before the step began",
    "batch": "the batch was not finite before the step began",
    "gradients": "a hook on a gradient or an autograd.Function's own backward",
    "unknown": "it is not known where",
}
_FACTS = {
    "op": "the operation",
    "module": "the module that ran it: its name in the model, or its class",
    "problem": "what the operation stumbled over, such as `zero_divisor`, `empty_sum`, `logarithm`, `infinite_slope`",
    "loss": "of the step",
    "grad_norm": "of the step, as far as it was read",
    "steps": "all steps in which it was seen",
    "samples": "the numbers of the bad samples in the batch",
    "dataset_indices": "the indices of the same samples in the dataset",
    "finite_again": "true: run once more, the step is finite",
    "changes_its_input": "true: the forward changes its own input in place",
    "exchange": "number of the first exchange of the step to which the rank brought the number",
    "went_back": "the steps from which our own trainer went back to a checkpoint",
}
_TOO_LARGE = {
    "rates": "learning rates: before and after it jumped, or the highest",
    "parameter": "the weight that is too large",
    "gain": "by how much that weight enlarges what passes through it",
}
_OF_HALF = {
    "magnitude": "the number that left the range of float16",
    "too_fast": "true: the learning rate has made the numbers this large, not the format",
}
_OF_RATE = {"weight_size": "root mean square of the weights at the start"}

NUMERICS: dict[str, Entry] = {
    "MC401": Entry(
        "non-finite numbers in the forward pass",
        "An operation of the forward pass made NaN or infinity out of finite numbers; the loss and every gradient "
        "that depends on it are lost.",
        "A learning rate or initialisation that is too large, a logarithm of zero, a division by zero, weights that "
        "were not finite to begin with.",
        "The norm of all gradients and the mean loss are checked on the device in every step; such a step never "
        "changes a weight. It is then replayed with its own batch and random state, and the first operation whose "
        "result is not finite while its inputs are is named with its module and line.",
        (
            "look at the named line and the ranges of the modules before it",
            "lower the learning rate, or initialise with a smaller scale",
            "run once in float32 to see whether half precision is the cause",
        ),
        "step 17: log made -inf in layers.3.gate at model.py:88 on rank 1",
        ours=(
            "look at the named line and the ranges of the modules before it",
            "lower training.learning_rate or model.init_std",
            "set training.use_amp=false to see whether half precision is the cause",
        ),
        causes=_MADE_IN,
        facts=_FACTS,
    ),
    "MC402": Entry(
        "non-finite gradient in the backward pass only",
        "The loss is finite and the gradient is not: a derivative has a pole where the operation itself has none.",
        "sqrt, norm or pow at 0 (slope 1/0), log near 0, 0/0 behind a where, a division whose numerator and "
        "denominator vanish together.",
        "The replayed backward pass is watched operation by operation; the first non-finite gradient belongs to a "
        "node of the graph, and the node to the line of the forward pass that made it.",
        (
            "keep the argument away from the pole: sqrt(x + eps), x.clamp(min=eps).log()",
            "mask the argument, not only the result: torch.where(ok, x, 1).log()",
        ),
        "x.square().sum().sqrt()   # at x = 0",
        causes=_MADE_IN,
        facts=_FACTS,
    ),
    "MC403": Entry(
        "float16 overflow",
        "A number left the range of float16 (65504) and became infinite.",
        "Activations or logits that grow with training, weights that are too large for the format; or, in the "
        "backward pass, gradients that overflow even with a loss scale of 1.",
        "The first operation of the replay that makes infinity in float16 is computed again in float32, which gives "
        "the magnitude. A step that is only skipped to lower the loss scale is normal and not reported.",
        (
            "use bfloat16: the same memory, the range of float32",
            "keep the named layer in float32, or normalise before it",
            "lower the learning rate first, where the evidence names it",
        ),
        "layers.11.feed_forward.w2: 81920 in float16, whose largest number is 65504; last good scale 32768",
        ours=(
            "set training.precision=bf16: the same memory, the range of float32",
            "lower training.learning_rate first, where the evidence names it",
        ),
        causes=_MADE_IN,
        facts={**_FACTS, **_OF_HALF, **_TOO_LARGE},
    ),
    "MC404": Entry(
        "bad sample",
        "One or a few samples of the batch make the step non-finite; the others are fine.",
        "Values in the data that are infinite, NaN or far outside the usual range; a sample with nothing in it.",
        "The samples of the replayed batch are run one by one.",
        (
            "look at the named samples, or take them out",
            "check values when data is prepared: torch.isfinite(x).all()",
        ),
        "sample 4711 of rank 1: input 0 holds inf",
        ours=("look at the named samples, or take them out", "debug.on_nan=skip goes on without the batch"),
        causes=_MADE_IN,
        facts={**_FACTS, "bad_alone": "how many samples of the batch are bad by themselves"},
    ),
    "MC405": Entry(
        "learning rate too high",
        "The weights were thrown off by updates of the size of the weights themselves.",
        "A learning rate that is too large for the model, or that jumps: a schedule without a warmup, a wrong unit.",
        "AdamW moves every weight by about the learning rate in a step; that is compared with the size of the weights "
        "at the start, and with the learning rates of the steps before.",
        ("lower the learning rate", "warm it up over the first steps"),
        "learning rate 10, 500 times the weights (0.02)",
        ours=("lower training.learning_rate", "raise training.scheduler.warmup_steps"),
        causes=_MADE_IN,
        facts={**_FACTS, **_TOO_LARGE, **_OF_RATE},
    ),
    "MC406": Entry(
        "exploding gradients",
        "The gradient norm grew over the steps before until it was no longer a finite number.",
        "A deep or recurrent model without normalisation, a learning rate at the edge, too large max_grad_norm.",
        "The gradient norms of the last steps grow, by 100 times or more in all.",
        (
            "clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "lower the learning rate, or warm up longer",
            "normalise the layers whose output grows",
        ),
        "gradient norm 3.1, 48, 9.2e3, 4.4e8, nan",
        ours=("set or lower training.max_grad_norm", "lower training.learning_rate, or warm up longer"),
        causes=_MADE_IN,
        facts={**_FACTS, "grad_norms": "of the steps before"},
    ),
    "MC407": Entry(
        "initialisation too large",
        "The first steps overflow: the weights were too large from the start.",
        "model.init_std or a custom initialisation far above 1/sqrt(width).",
        "The step that fails is one of the first, and the weights of some layers multiply their input by far more "
        "than 1.",
        ("initialise with a smaller scale: 1/sqrt(fan_in)",),
        "layers.0.attention.wq.weight has a standard deviation of 1e4",
        ours=("lower model.init_std (0.02 is usual)", "look at the file that the weights were loaded from"),
        causes=_MADE_IN,
        facts={**_FACTS, **_TOO_LARGE},
    ),
    "MC408": Entry(
        "division by an empty mask",
        "A mean was taken over nothing: the sum of the mask, or the number of labels that count, is 0.",
        "A batch whose labels are all ignored (-100), a mask that hides every position, an empty selection.",
        "The first non-finite operation of the replay is a division, a mean or a loss whose divisor is 0.",
        (
            "divide by mask.sum().clamp(min=1)",
            "drop samples without a single label when the data is prepared",
        ),
        "F.cross_entropy(logits, labels)   # every label is -100",
        causes=_MADE_IN,
        facts=_FACTS,
    ),
    "MC409": Entry(
        "transient: the step is finite when it is repeated",
        "A step gave NaN or infinity once, and the same step with the same batch, weights and random state did not.",
        "Most often hardware: a bit that flipped in a device, its memory or a link. Also code that is not "
        "deterministic: a race, a counter of its own, uninitialised memory.",
        "The step is replayed. The rank is the one whose own gradients were not finite before they were exchanged.",
        (
            "test the named GPU: nvidia-smi -q -d ECC,ROW_REMAPPER, dcgmi diag -r 3",
            "take the host out if it happens again on the same GPU",
        ),
        "step 90210 was not finite on rank 3 (GPU 5), and its replay is",
        causes=_MADE_IN,
        facts=_FACTS,
    ),
    "MC410": Entry(
        "replicas drift apart",
        "Ranks that should hold the same parameters do not. Nothing fails: each of them trains another model.",
        "Weights changed on one rank after DDP had made them alike, a rank that skips an update or makes one more, "
        "random numbers of its own in an initialisation, memory that lost a bit.",
        "Every rank sums the bits of a few parameters, in turns, every 10 steps and later every 100; the sums of equal "
        "steps are compared: of parameters under DistributedDataParallel, and of those whose gradients the script "
        "itself adds up over a group. Others may differ rightly. Where a majority of ranks agrees, the others are "
        "named; two ranks have none, and neither is called wrong.",
        (
            "in a loop without DistributedDataParallel: broadcast the parameters from one rank before the first step",
            "change weights before the model is wrapped in DistributedDataParallel, or on all ranks alike",
            "look at what one rank does between the two steps and its peers do not: a skipped optimizer step, a "
            "loaded checkpoint",
            "where no code explains it, test the devices and the memory",
        ),
        "model.module.head.reset_parameters()   # after DDP(model), each rank with a seed of its own",
        ours=(
            "test the device and the memory of these ranks: model-check doctor, and --set debug.verify_gradients=100",
            "go on from the last checkpoint before the step: it holds the weights of one rank",
        ),
        causes={
            "changed": "the parameter was the same on all ranks at an earlier comparison",
            "from_the_start": "it differed at the first comparison",
        },
        facts={
            "majority": "true: a majority of ranks agrees, and the named ones differ from it",
            "last_alike": "the last step at which the parameter was the same on all ranks",
            "differing": "how many of the compared parameters differ",
            "compared": "how many parameters were compared at this step",
        },
    ),
    "MC411": Entry(
        "one rank's gradients are wrong",
        "Replicas with the same weights, micro-batch and random numbers came to different gradients. Every average "
        "that the odd rank takes part in is wrong, and nothing else shows it.",
        "A device that computes wrongly (silent data corruption), memory that lost a bit, a kernel or a library that "
        "differs on one host.",
        "With debug.verify_gradients=N every N-th step is followed by one micro-batch that all replicas compute; norm "
        "and sum of each gradient are compared. Where most ranks agree the others are named; with two ranks, or a tie, "
        "all compute again, and one that does not come to its own result is named.",
        (
            "test the named device: nvidia-smi -q -d ECC,ROW_REMAPPER, dcgmi diag -r 3",
            "take its host out, and go back to a checkpoint from before the step",
            "compare driver and library versions of the hosts: model-check doctor",
        ),
        "model-check train --set debug.verify_gradients=1000",
        facts={
            "majority": "true: the other ranks agree, so the named ones are wrong",
            "by": "how far the gradient is off, as a fraction of its norm",
            "devices": "by rank: what it computes on",
        },
    ),
    "MC412": Entry(
        "all ranks are given the same data",
        "Every rank computes the same gradient, so their average is that of one: N ranks do the work of one.",
        "A loader without a DistributedSampler, a sampler that was told the same rank everywhere, one seed for random "
        "data on all ranks.",
        "Sums over the bits of the model's inputs are compared in the first 8 steps, between ranks that hold replicas "
        "under DistributedDataParallel; they must come from a loader, agree in all steps and change between them.",
        (
            "DataLoader(dataset, sampler=DistributedSampler(dataset))",
            "seed random data with the rank: torch.manual_seed(seed + rank)",
        ),
        "DataLoader(dataset, shuffle=True) with the same seed on every rank",
        ours=("give each rank batches of its own: what you bring yourself is not cut into shards for you",),
        facts={"steps": "how many steps were compared"},
    ),
    "MC413": Entry(
        "the loss spikes",
        "The loss left its level by far more than it usually moves, and stayed away for several steps.",
        "A stretch of odd data, a learning rate at the edge, a change of the schedule, a bad resume.",
        "Each loss is compared with the median of the 50 before it, in units of their median deviation; three in a row "
        "far above it are a spike. Runs of fewer than 60 steps are not judged by that. The loss of our own trainer is "
        "also compared with its first steps and with guessing, from step 15 on: twice as high, it diverges.",
        (
            "look at the batches of these steps",
            "clip gradients, or lower the learning rate",
            "go back to a checkpoint before the spike and skip its data",
        ),
        "loss 2.31 ± 0.02 for 50 steps, then 6.9, 7.4, 7.2",
        ours=(
            "look at the batches of these steps",
            "lower training.max_grad_norm or training.learning_rate",
            "go back to a checkpoint before the spike: --resume PATH",
        ),
        causes={
            "spike": "the loss left its level for several steps",
            "divergence": "the loss of our own trainer is far above its first steps and above guessing",
        },
        facts={
            "from": "the loss before",
            "to": "the loss after",
            "steps": "of a spike: how many in a row were far above; of a divergence: how many there were",
        },
    ),
    "MC414": Entry(
        "the loss does not decrease",
        "After many steps the loss is still that of a model that guesses: the logarithm of the number of choices.",
        "Parameters that are frozen or get no gradient, a learning rate that is too small, labels that do not belong "
        "to the inputs.",
        "The loss stays within 2 % of ln(choices) from the first steps to the last over at least 200 steps, or does "
        "not move at all up to 10 % above it, where many fresh models begin. What can be seen of the cause is listed, "
        "and decides which remedy comes first: a rate that cannot have moved a weight, frozen parameters, parameters "
        "without a gradient; where all is well with those, the labels.",
        (
            "raise the learning rate",
            "check requires_grad, and that the optimizer was given the parameters that are trained",
            "check that labels are shifted and belong to their inputs: a model must be able to overfit one batch",
        ),
        "loss 10.37 at step 10, 10.38 at step 900, and ln(32000) is 10.37",
        causes={
            "parameters": "parameters are frozen or get no gradient",
            "rate_too_small": "the learning rate cannot have moved a weight",
            "labels": "gradients reach the parameters: the labels do not belong to the inputs",
            "unknown": "nothing more can be seen",
        },
        facts={
            "loss": "now",
            "choices": "the number of choices that the model guesses among",
            "steps": "how long the loss has stayed there",
            "rates": "learning rates of the parameter groups",
            "moved_at_most": "how far a weight can have moved in these steps",
        },
    ),
    "MC415": Entry(
        "a layer gets no gradient",
        "The gradient of a parameter is exactly 0 step after step, while others learn; or no parameter of the "
        "optimizer has a gradient at all.",
        "Dead units (all inputs of a ReLU negative), a saturated function, a branch that is multiplied by 0, a detach. "
        "None at all: the optimizer was made from a copy of the model, or before the model was made anew.",
        "The norm of each gradient is looked at every 50 steps; exactly 0 in four looks in a row is reported. Of those "
        "the layer nearest to the loss is named: what lies before it gets none because of it.",
        (
            "look at what lies between this layer and the loss: detach(), where(), a mask, a saturated function",
            "lower the learning rate, or use an activation that does not die (GELU, SiLU)",
            "make the optimizer from the parameters of the model that is called",
        ),
        "encoder.3.weight: gradient 0 at steps 50, 100, 150 and 200",
        causes={
            "stopped": "the gradient does not get past the layer",
            "starved": "the layer is given nothing but 0",
            "other_parameters": "no parameter of the optimizer has a gradient: they are not those of the model",
        },
        facts={
            "without_gradient": "the parameters whose gradient is 0, the named one first",
            "next": "a parameter that does get a gradient: the nearest behind it",
            "parameters": "how many the optimizer holds, where none has a gradient",
        },
    ),
    "MC416": Entry(
        "gradients or outputs keep growing",
        "The size of the gradients, or of the model's outputs, grows look after look: a run on its way to overflow.",
        "A learning rate that is too high for this stage, missing normalisation, no clipping, logits without a bound.",
        "Five looks in a row, each larger than the one before, and 100 times larger in all (for outputs: beyond 100).",
        (
            "clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "lower the learning rate",
            "normalise the last layer's input, or add a z-loss on the logits",
        ),
        "gradient norm 0.8, 3.1, 12, 55, 240 at steps 50 to 250",
        ours=("set or lower training.max_grad_norm", "lower training.learning_rate"),
        causes={"gradients": "the norm of all gradients", "outputs": "the largest output of the model"},
        facts={"sizes": "look by look", "steps": "of these looks"},
    ),
    "MC417": Entry(
        "the numbers are no longer watched",
        "The numerics guard met something in the script that it cannot handle, and ended itself. The script goes on as "
        "it would without it; from there on a step that is not finite is not reported.",
        "A mistake of Model Check's, or a version of torch that does something otherwise than the guard expects.",
        "The rank writes what was raised inside the guard among its events, with the traceback.",
        (
            "report it, with the event guard_failed of the rank: events/rank-N.jsonl in the run directory",
            "--guard off says that nothing is to be watched",
        ),
        "TypeError: '>=' not supported between instances of 'Tensor' and 'str'",
    ),
}
