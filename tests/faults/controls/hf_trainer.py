"""transformers.Trainer with a tiny LLaMA, evaluation and a checkpoint."""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 64, (count, 16), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    out = os.path.join(tempfile.gettempdir(), f"hf-trainer-{os.environ.get('MASTER_PORT', 'single')}")
    args = TrainingArguments(
        output_dir=out,
        max_steps=12,
        per_device_train_batch_size=4,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=6,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Tokens(256), eval_dataset=Tokens(32))
    result = trainer.train()
    if trainer.is_world_process_zero():
        print("RESULT", trainer.state.global_step, repr(result.training_loss), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
