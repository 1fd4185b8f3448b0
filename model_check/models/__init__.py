"""Models: LLaMA as a plain nn.Module, its loss, and Hugging Face in and out. May import config."""
