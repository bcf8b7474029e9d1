"""Examples that ask for their own tokens: what self-pretraining trains on, without any label.

- masked: some tokens are hidden behind a mask symbol and asked for, each with the same probability
  and independently of the others (Devlin et al. 2019, https://arxiv.org/abs/1810.04805, in the form
  of Amos et al. 2024, https://arxiv.org/abs/2310.02980: always the mask symbol, never another one);
- next: at every token but the last the one that follows is asked for.

What is hidden depends on the seed, the epoch and the example alone, so on no batch, worker or
device. Padding is never hidden or asked for, nor is a class token, which is no token of the data.

Shapes: B batch, S sequences of each example, L length, M answers that are asked for at most in one
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lra.tasks.batches import Batch, TokenArrays

if TYPE_CHECKING:
    from torch import Tensor

Objective = Literal["masked", "next"]
NOTHING = -100  # a label where nothing is asked; PyTorch's losses leave it out by themselves
STREAM = 0x5E1F  # keeps these draws apart from others of the same seed


@dataclass(frozen=True)
class HiddenBatch(Batch):
    """Tokens, some behind the mask symbol, and where which raw value is asked for.

    `labels_B` is [B, S, M] here, NOTHING where a sequence has fewer answers than M.
    """

    places_BSM: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model takes."""
        return self.tokens_BSL, self.lengths_BS, self.places_BSM

    @property
    def num_answers(self) -> int:
        """How many tokens the model is asked for."""
        return int((self.labels_B != NOTHING).sum())


class HiddenTokens:
    """A split whose questions are its own tokens; takes the place of `TokenArrays` in a training.

    Args:
        examples: the split.
        objective: masked or next.
        mask_id: id of the mask symbol.
        mask_rate: probability with which a token is hidden.
        seed: of the run.
        part: number of the split; each has draws of its own.
    """

    def __init__(
        self,
        examples: TokenArrays,
        objective: Objective,
        *,
        mask_id: int,
        mask_rate: float,
        seed: int,
        part: int,
    ) -> None:
        self.examples, self.objective = examples, objective
        self.mask_id, self.mask_rate = mask_id, mask_rate
        self.seed, self.part = seed, part
        self.folder, self.lengths_NS = examples.folder, examples.lengths_NS

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> np.ndarray:
        """Longest sequence of each example [N]."""
        return self.examples.lengths

    def hidden(self, index: int, position: int, epoch: int) -> np.ndarray:
        """Places that are hidden in one sequence of one example, ascending."""
        key = [self.seed, STREAM, self.part, epoch, index, position]
        draws_L = np.random.default_rng(key).random(self.lengths_NS[index, position], np.float32)
        return np.flatnonzero(draws_L < self.mask_rate)

    def num_answers(self, indices: np.ndarray, epoch: int = 0) -> int:
        """As of the batch of these examples, which need not be built."""
        return sum(len(places) for row in self._places(indices, epoch) for places in row)

    def batch(self, indices: np.ndarray, pad_to: int | None = None, epoch: int = 0) -> HiddenBatch:
        """The examples at `indices` with the questions of this epoch."""
        import torch

        plain = self.examples.batch(indices, pad_to)
        tokens_BSL = plain.tokens_BSL.numpy()
        places = self._places(indices, epoch)
        most = max(1, max(len(p) for row in places for p in row))
        places_BSM = np.zeros((*plain.lengths_BS.shape, most), np.int64)
        labels_BSM = np.full_like(places_BSM, NOTHING)
        ahead = int(self.objective == "next")
        for i, row in enumerate(places):
            for s, p in enumerate(row):
                places_BSM[i, s, : len(p)] = p
                labels_BSM[i, s, : len(p)] = tokens_BSL[i, s, p + ahead] - 1
                if self.objective == "masked":
                    tokens_BSL[i, s, p] = self.mask_id
        return HiddenBatch(
            plain.tokens_BSL, plain.lengths_BS, torch.from_numpy(labels_BSM),
            places_BSM=torch.from_numpy(places_BSM),
        )  # fmt: skip

    def _places(self, indices: np.ndarray, epoch: int) -> list[list[np.ndarray]]:
        """Places that are asked for, by example and sequence."""

        def asked(index: int, position: int) -> np.ndarray:
            if self.objective == "next":
                return np.arange(max(0, self.lengths_NS[index, position] - 1))
            return self.hidden(index, position, epoch)

        num_sequences = self.examples.num_sequences
        return [[asked(int(i), s) for s in range(num_sequences)] for i in indices]


@dataclass(frozen=True)
class Questions:
    """What self-pretraining takes in place of a `Dataset`: two splits, and none to be tested on."""

    train: HiddenTokens
    val: HiddenTokens
    meta: dict[str, Any]
    test: None = None
