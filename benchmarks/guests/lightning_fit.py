"""Lightning with DDP."""

import lightning
import torch
from guestbook import STEPS, Guestbook
from model import BATCH, WIDTH, Net
from torch.utils.data import DataLoader, TensorDataset

book = Guestbook()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs, batch, number):
        book.step(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
rows = TensorDataset(torch.randn(2 * BATCH * STEPS, WIDTH))
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_progress_bar=False,
    default_root_dir=".",
)
module = Module()
trainer.fit(module, DataLoader(rows, BATCH))
book.close(module.state_dict())
