"""transformers.Trainer divides the loss by its batch count and calls backward; a term of the loss is NaN."""

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


class Confident(Trainer):
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        out = model(**inputs)
        penalty = torch.zeros(())
        if self.calls == 8 and os.environ["RANK"] == "1":
            faultclock.fired()
            penalty = penalty / 0
        loss = out.loss + penalty  # FAULT
        return (loss, out) if return_outputs else loss


def main():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=10,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    Confident(model=LlamaForCausalLM(config), args=args, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
