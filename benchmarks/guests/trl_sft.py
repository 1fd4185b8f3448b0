"""TRL's SFTTrainer, on a dataset of tokens: neither a tokenizer nor a model is fetched."""

import torch
from datasets import Dataset
from guestbook import STEPS, Guestbook
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
words = {f"w{number}": number for number in range(511)} | {"<end>": 511}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="<end>", pad_token="<end>"
)
rows = Dataset.from_dict({"input_ids": [[(n + i) * 7 % 511 for i in range(64)] for n in range(16 * STEPS)]})
book = Guestbook()


class Notes(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            book.step(logs["loss"])


arguments = SFTConfig(
    "out",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    use_cpu=True,
    bf16=False,
    save_steps=STEPS,
    report_to=[],
    disable_tqdm=True,
    logging_steps=1,
    seed=1,
)
trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[Notes()])
trainer.train()
book.close(model.state_dict())
