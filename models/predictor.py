"""Predictor: an encoder and one linear map that tells the tokens at some places of its input.

What self-pretraining trains; the encoder is then a classifier's.
Shapes: B batch, S sequences for each example, L length, M places, D d_model, V values.
"""

from __future__ import annotations

import copy

import torch
from einops import rearrange
from torch import Tensor, nn

from models.encoder import Encoder, EncoderState
from models.layers import initialise
from models.shape import Shape

# Of the input on which an encoder shows whether it reads ahead; one that leaves out what lies near
# is shown as many positions more as it steps over.
PROBE_LENGTH = 512


class Predictor(nn.Module):
    """Scores of the values at places of sequences, each sequence on its own.

    Args:
        encoder: token ids and mask to one vector for each token.
        shape: of the encoder.
        reads_mask: whether the input may hold a mask symbol, the id behind the last of the data.

    Raises:
        ValueError: the encoder gives no vector for each token.
    """

    def __init__(self, encoder: Encoder, shape: Shape, *, reads_mask: bool) -> None:
        super().__init__()
        self.num_before = int(shape.pooling == "cls")  # rows in front of the tokens'
        one_row = torch.ones(1, shape.max_length, dtype=torch.bool)
        num_rows = encoder.output_mask(one_row).shape[1]
        if not encoder.rows_are_tokens or num_rows != shape.max_length + self.num_before:
            raise ValueError(
                f"{type(encoder).__name__} returns no row for each token "
                "(model.pool_memory=true?), to tell a hidden token from; use pretrain=none"
            )
        self.encoder = encoder
        if reads_mask:
            encoder.embedding.add_mask_symbol()
        self.head = nn.Linear(shape.d_model, shape.vocab_size - 1)
        initialise(self.head, "xavier" if shape.init == "mega" else shape.init)

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor, places_BSM: Tensor) -> Tensor:
        """Logits [B, S, M, V] of the raw values (id - 1) at the places."""
        num_sequences = tokens_BSL.shape[1]
        positions_L = torch.arange(tokens_BSL.shape[2], device=tokens_BSL.device)
        mask_BSL = positions_L < lengths_BS[..., None]
        x_BLD = self.encoder(
            rearrange(tokens_BSL, "b s l -> (b s) l"), rearrange(mask_BSL, "b s l -> (b s) l")
        )
        places_BM1 = rearrange(places_BSM, "b s m -> (b s) m 1") + self.num_before
        logits_BMV = self.head(x_BLD.take_along_dim(places_BM1, dim=1))
        return rearrange(logits_BMV, "(b s) m v -> b s m v", s=num_sequences)

    def start(self, batch_size: int) -> EncoderState:
        """State before the first token, for `step`; refused by a model that reads ahead."""
        return self.encoder.start(batch_size)

    def step(self, tokens_B1: Tensor, state: EncoderState) -> tuple[Tensor, EncoderState]:
        """Logits [B, V] of the raw values at the next token alone, and the state after it."""
        x_B1D, state = self.encoder.step(tokens_B1, state)
        return self.head(x_B1D[:, 0]), state


@torch.no_grad()
def reads_ahead(encoder: Encoder) -> bool:
    """Whether what an encoder says of a token depends on later ones, tried on one input."""
    shape = encoder.shape
    length = min(shape.max_length, PROBE_LENGTH + encoder.stride - 1)
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(1, shape.vocab_size, (1, length), generator=generator).repeat(3, 1)
    # Two neighbours: the blocks of a model that sees to the end of a block may end before one.
    cuts = (length // 2, length // 2 + 1)
    for b, cut in enumerate(cuts):
        tokens_BL[b, cut:] = tokens_BL[b, cut:] % (shape.vocab_size - 1) + 1
    # In double precision, since fresh weights may let a token hear little of the others: rounding,
    # of sums by Fourier transform, is then far below any influence.
    probe = copy.deepcopy(encoder).double().eval()
    *changed, x_LD = probe(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))
    tolerance = 1e-9 * float(x_LD.abs().max())
    num_before = int(shape.pooling == "cls")  # rows in front of the tokens'
    return any(
        float((other_LD - x_LD)[: cut + num_before].abs().max()) > tolerance
        for other_LD, cut in zip(changed, cuts, strict=True)
        if cut
    )
