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
from lra.tasks.hidden import HiddenTokens
from lra.training import distributed
from lra.training.hardware import Hardware

Z_99 = 2.326347874040841  # one-sided 99 % point of the normal distribution


@dataclass(frozen=True)
class Metrics:
    """Accuracy as a fraction, mean loss in nats, and how many answers [N] were right by example."""

    accuracy: float
    loss: float
    num_examples: int
    hits_N: np.ndarray

    @property
    def correct_N(self) -> np.ndarray:
        """Which examples were right, where each asks for its class alone."""
        return self.hits_N.astype(bool)


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    split: TokenArrays | HiddenTokens,
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
    losses, hits, num_answers, order = [], [], 0, eval_batches(split.lengths, batch_size)
    try:
        for i, indices in enumerate(order[distributed.rank() :: distributed.world_size()]):
            check(min(i * distributed.world_size() * batch_size, len(split)))
            batch = split.batch(indices, pad_to)
            num_answers += batch.num_answers
            batch = batch.to(hardware.device)
            with hardware.autocast():
                logits = model(*batch.inputs)
            losses_B, hits_B = loss_and_hits(logits, batch.labels_B)
            losses.append(losses_B)
            hits.append(hits_B)
    finally:
        model.train(was_training)
    # Several processes have parts of the examples each; a sum puts the parts together exactly.
    right = torch.zeros(len(split), dtype=torch.int32, device=hardware.device)
    totals = torch.zeros(2, dtype=torch.float64, device=hardware.device)  # loss, answers
    if mine := order[distributed.rank() :: distributed.world_size()]:
        right[torch.from_numpy(np.concatenate(mine)).to(hardware.device)] = torch.cat(hits).int()
        totals[0] += torch.cat(losses).double().sum()
        totals[1] += num_answers
    hits_N = distributed.all_sum(right).cpu().numpy()
    total_loss, all_answers = distributed.all_sum(totals).tolist()
    return Metrics(
        accuracy=int(hits_N.sum()) / max(1, all_answers),
        loss=total_loss / max(1, all_answers),
        num_examples=len(split),
        hits_N=hits_N,
    )


def loss_and_hits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses in nats, and number of right answers, of each example; [B] each.

    Logits [B, C] and labels [B], or [B, .., C] and [B, ..] where an example asks for several
    answers; a label of -100 asks for none.
    """
    answers = labels.flatten()
    losses = F.cross_entropy(logits.flatten(0, -2).float(), answers, reduction="none")
    hits = logits.detach().flatten(0, -2).argmax(dim=1) == answers
    return losses.view(len(labels), -1).sum(dim=1), hits.view(len(labels), -1).sum(dim=1)


def is_at_chance(val_accuracy: float, val_label_histogram: Iterable[int]) -> bool:
    """Whether an accuracy is within the 99 % binomial bound of always saying the majority class."""
    counts = list(val_label_histogram)
    n, majority = sum(counts), max(counts) / sum(counts)
    return val_accuracy <= majority + Z_99 * math.sqrt(majority * (1 - majority) / n)
