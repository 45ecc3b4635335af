"""A small module of Lightning with the optimizer of `msamp.initialize`, and runs of it."""

import logging
from typing import Any

import torch
from torch import nn

import msamp
from helpers import hosts

L = hosts.need("lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
ROWS = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


class Module(L.LightningModule):
    """Two layers, trained to give back half of what they are given; `losses` are those of its steps."""

    def __init__(self, level: Any = "O2") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.level, self.losses = level, []
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.net(x) - x[:, :16]).square().mean()
        self.losses.append(loss.item())
        return loss

    def initialized(self) -> torch.optim.Optimizer:
        return msamp.initialize(self, torch.optim.AdamW(self.parameters(), lr=1e-2), self.level)[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.initialized()


def fit(module: Module, epochs: int, folder: Any, checkpoint: Any = None, rows: torch.Tensor = ROWS, **settings: Any) -> Any:
    """Train for some epochs of batches of 8; the trainer."""
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, use_distributed_sampler=False, **settings,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8), ckpt_path=checkpoint)
    return trainer
