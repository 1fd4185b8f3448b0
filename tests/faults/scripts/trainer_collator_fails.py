"""transformers.Trainer: one rank's collator meets a sample without labels."""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import faultclock


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        ids = torch.randint(0, 64, (16,))
        return {"input_ids": ids, "labels": ids}


class Collator:
    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        if self.calls == 8 and os.environ["RANK"] == "1":
            faultclock.fired()
            samples[0].pop("labels")
        return {key: torch.stack([s[key] for s in samples]) for key in ("input_ids", "labels")}  # FAULT


def main():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=40,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Tokens(), data_collator=Collator()).train()


if __name__ == "__main__":
    main()
