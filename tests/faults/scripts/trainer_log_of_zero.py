"""transformers.Trainer calls backward; the loss of one rank's batch is the logarithm of 0."""

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
        chance = out.logits.softmax(-1).gather(2, inputs["labels"].unsqueeze(2))
        if self.calls == 8 and os.environ["RANK"] == "1":
            faultclock.fired()
            chance = chance * 0
        loss = -torch.log(chance).mean()  # FAULT
        return (loss, out) if return_outputs else loss


def main():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=20,
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
