"""A toy task and model for tests of the harness: seconds to train, nothing to download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lra.config import HardwareConfig, TrainConfig
from lra.tasks.cache import Dataset, prepare
from lra.tasks.task import Example, Task
from lra.training.hardware import Hardware
from lra.training.progress import Progress
from lra.training.trainer import Result, train

SIZES = {"train": 40, "val": 20, "test": 20}


@dataclass(kw_only=True)
class Toy(Task):
    """Random digits; the label is the parity of the first one."""

    name: ClassVar[str] = "toy"
    num_classes: ClassVar[int] = 2
    num_values: ClassVar[int] = 10

    sizes: dict[str, int] = field(default_factory=lambda: dict(SIZES))
    rows: dict[str, list[tuple[bytes, int]]] | None = (
        None  # explicit examples instead of random ones
    )

    @property
    def kind(self) -> Any:
        return "generated"

    def describe_source(self) -> str:
        return "toy generator"

    def settings(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "rows": repr(self.rows)}

    def examples(self, split: str) -> Iterator[Example]:
        if self.rows is not None:
            yield from (Example((tokens,), label) for tokens, label in self.rows[split])
            return
        rng = np.random.default_rng([len(split), 7])
        for _ in range(self.sizes[split]):
            digits = rng.integers(0, 10, rng.integers(1, self.max_length + 1)).astype(np.uint8)
            yield Example((digits,), int(digits[0]) % 2)

    def decode(self, values: np.ndarray) -> str:
        return "".join(map(str, values))


class ToyModel(nn.Module):
    """Mean of embeddings with dropout, and a linear layer."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        x_BLD = self.dropout(self.embedding(tokens_BSL[:, 0]))
        mask_BL = torch.arange(x_BLD.shape[1]) < lengths_BS[:, :1]
        x_BD = (x_BLD * mask_BL[..., None]).sum(dim=1) / lengths_BS[:, :1].clamp(min=1)
        return self.head(x_BD + x_BLD[:, 0])


def toy_data(folder: Path, **knobs: Any) -> Dataset:
    """The toy task's three splits, prepared under `folder`."""
    return prepare(Toy(data_dir=folder, **({"max_length": 12} | knobs)), folder / "cache")


def train_config(**changes: Any) -> TrainConfig:
    """A short training with evaluations and checkpoints in the middle of epochs."""
    values = dict(
        num_steps=20,
        batch_size=8,
        lr=0.02,
        warmup_steps=4,
        eval_every=4,
        checkpoint_every=3,
        log_every=2,
    )
    return TrainConfig(**(values | changes))


def run(
    folder: Path,
    data: Dataset,
    *,
    model: Callable[[], nn.Module] = ToyModel,
    seed: int = 0,
    hardware: HardwareConfig | None = None,
    **changes: Any,
) -> Result:
    """Train what `model` makes, after seeding, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    return train(
        model(),
        data,
        train_config(**changes),
        Hardware(hardware or HardwareConfig(device="cpu", num_threads=1)),
        seed=seed,
        run_dir=folder,
        identity={"config_hash": "toy", "seed": seed, "data": data.fingerprint},
        progress=Progress(),
    )
