"""Exact loss and accuracy of a split, each example once, and whether that is above chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lra.tasks.batches import TokenArrays, eval_batches
from lra.training import distributed
from lra.training.hardware import Hardware

Z_99 = 2.326347874040841  # one-sided 99 % point of the normal distribution


@dataclass(frozen=True)
class Metrics:
    """Accuracy as a fraction, mean loss in nats, and which examples [N] were right."""

    accuracy: float
    loss: float
    num_examples: int
    correct_N: np.ndarray


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    split: TokenArrays,
    hardware: Hardware,
    *,
    batch_size: int,
    pad_to: int | None = None,
    check: Callable[[int], None] = lambda done: None,
) -> Metrics:
    """Evaluate without dropout; the model's mode and all random states are left as they were.

    `check` is called between batches with the examples done so far, and may raise to stop early.
    """
    was_training = model.training
    model.eval()
    losses, hits, order = [], [], eval_batches(split.lengths, batch_size)
    try:
        for i, indices in enumerate(order[distributed.rank() :: distributed.world_size()]):
            check(min(i * distributed.world_size() * batch_size, len(split)))
            batch = split.batch(indices, pad_to).to(hardware.device)
            with hardware.autocast():
                logits_BC = model(batch.tokens_BSL, batch.lengths_BS)
            losses.append(F.cross_entropy(logits_BC.float(), batch.labels_B, reduction="none"))
            hits.append(logits_BC.argmax(dim=1) == batch.labels_B)
    finally:
        model.train(was_training)
    # Several processes have parts of the examples each; a sum puts the parts together exactly.
    correct = torch.zeros(len(split), dtype=torch.int32, device=hardware.device)
    loss = torch.zeros((), dtype=torch.float64, device=hardware.device)
    if mine := order[distributed.rank() :: distributed.world_size()]:
        correct[torch.from_numpy(np.concatenate(mine)).to(hardware.device)] = torch.cat(hits).int()
        loss += torch.cat(losses).double().sum()
    correct_N = distributed.all_sum(correct).cpu().numpy().astype(bool)
    return Metrics(
        accuracy=int(correct_N.sum()) / len(split),
        loss=float(distributed.all_sum(loss)) / len(split),
        num_examples=len(split),
        correct_N=correct_N,
    )


def is_at_chance(val_accuracy: float, val_label_histogram: Iterable[int]) -> bool:
    """Whether an accuracy is within the 99 % binomial bound of always saying the majority class."""
    counts = list(val_label_histogram)
    n, majority = sum(counts), max(counts) / sum(counts)
    return val_accuracy <= majority + Z_99 * math.sqrt(majority * (1 - majority) / n)
