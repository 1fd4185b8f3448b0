"""Lightning runs a whole training step as DDP's forward; one sample of one rank holds a NaN."""

import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import faultclock


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.global_rank == 1 and batch_idx == 12:
            x[5, 2] = float("nan")
            faultclock.fired()
        logits = self.body(x)  # FAULT
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(640, 8), torch.randint(0, 3, (640,)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=L.pytorch.strategies.DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=8))
