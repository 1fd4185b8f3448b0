"""The Trainer of transformers."""

import torch
from guestbook import STEPS, Guestbook
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
rows = [torch.arange(n, n + 64) * 7 % 512 for n in range(16 * STEPS)]
book = Guestbook()


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            book.step(logs["loss"])


quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "seed": 1}
arguments = TrainingArguments(
    "out", max_steps=STEPS, per_device_train_batch_size=4, use_cpu=True, save_steps=STEPS, **quiet
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Notes()])
trainer.train()
book.close(model.state_dict())
