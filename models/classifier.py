"""Classifier: masks from lengths, encoder, pooling, features of one sequence or a pair, MLP head.

Shapes: B batch, S sequences for each example, L length, D d_model, C classes, F features.
`mask` is bool, True = real token; it comes from lengths, never from token ids.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from models.dropout import Dropout
from models.encoder import Encoder
from models.layers import initialise
from models.shape import Shape


class AttentionPooling(nn.Module):
    """Mean of the real rows, weighted by exp(w . tanh(W x)).

    Source: wuch15/Fastformer, whose divisor has 1e-8 added to the sum of the unshifted
    exponentials; here the maximum comes off first, in numbers that cannot overflow.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, d_model)
        self.score = nn.Linear(d_model, 1)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Pool; [B, D]. A row of padding only gives zeros."""
        score_BL = self.score(torch.tanh(self.hidden(x_BLD))).squeeze(-1)
        if score_BL.dtype in (torch.float16, torch.bfloat16):
            score_BL = score_BL.float()
        score_BL = score_BL.masked_fill(~mask_BL, -torch.inf)
        # The shift cancels, so no gradient has to flow through it.
        shift_B1 = score_BL.detach().amax(dim=1, keepdim=True).clamp(min=-80.0)
        weight_BL = (score_BL - shift_B1).exp()
        total_B1 = weight_BL.sum(dim=1, keepdim=True) + 1e-8 * (-shift_B1).exp()
        return weighted_sum(x_BLD, weight_BL / total_B1)


def weighted_sum(x_BLD: Tensor, weight_BL: Tensor) -> Tensor:
    """Sum over positions in one product, so that low precision adds up in float32; [B, D]."""
    return torch.einsum("bld,bl->bd", x_BLD, weight_BL.to(x_BLD.dtype))


def pool_tokens(x_BLD: Tensor, mask_BL: Tensor, pooling: str) -> Tensor:
    """One vector for each sequence from its real rows; [B, D], zeros where no row is real.

    `pooling` is mean, max, cls or first (row 0), last (real row), or padded_mean: the sum of the
    real rows divided by the padded length, as mlpen/Nystromformer has it; that one depends on the
    padding.
    """
    if pooling in ("mean", "padded_mean"):
        weight_BL = mask_BL.to(torch.promote_types(x_BLD.dtype, torch.float32))
        if pooling == "padded_mean":
            return weighted_sum(x_BLD, weight_BL / mask_BL.shape[1])
        return weighted_sum(x_BLD, weight_BL / weight_BL.sum(dim=1, keepdim=True).clamp(min=1))
    if pooling == "max":
        max_BD = x_BLD.masked_fill(~mask_BL[..., None], -torch.inf).amax(dim=1)
        return max_BD.masked_fill(~mask_BL.any(dim=1, keepdim=True), 0.0)
    if pooling == "last":
        last_B11 = (mask_BL.sum(dim=1) - 1).clamp(min=0)[:, None, None]
        last_BD = x_BLD.take_along_dim(last_B11, dim=1).squeeze(1)
        return last_BD.masked_fill(~mask_BL.any(dim=1, keepdim=True), 0.0)
    assert pooling in ("cls", "first"), pooling
    return x_BLD[:, 0].masked_fill(~mask_BL[:, :1], 0.0)


def inner_layers(shape: Shape) -> list[nn.Module]:
    """What stands behind a hidden map of the head."""
    activations: dict[str, nn.Module] = {
        "relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"),
    }  # fmt: skip
    dropout = [Dropout(shape.head_dropout)] if shape.head_dropout else []
    return [*dropout, activations[shape.head_activation]]


class Classifier(nn.Module):
    """Class scores of examples with one sequence, or with two that share the encoder.

    Args:
        encoder: token ids and mask to vectors.
        shape: pooling, pair features and head layout are read here.
        num_classes: C.
        num_sequences: S; the sequences of an example meet only in the head.

    Raises:
        ValueError: the four features (u, v, u*v, u-v) are asked of other than two sequences.
    """

    def __init__(
        self, encoder: Encoder, shape: Shape, num_classes: int, num_sequences: int = 1
    ) -> None:
        super().__init__()
        if num_sequences > 2 and shape.pair_features == "four":
            raise ValueError(
                f"num_sequences={num_sequences} with shape.pair_features='four': the features "
                "u, v, u*v, u-v need two sequences; use 'concat'"
            )
        self.shape = shape
        self.num_classes, self.num_sequences = num_classes, num_sequences
        self.encoder = encoder
        self.attention_pool = (
            AttentionPooling(shape.d_model) if shape.pooling == "attention" else None
        )
        four = num_sequences == 2 and shape.pair_features == "four"
        widths = [shape.d_model * (4 if four else num_sequences), *shape.head_hidden]
        layers: list[nn.Module] = []
        for width, next_width in zip(widths[:-1], widths[1:], strict=True):
            layers += [nn.Linear(width, next_width), *inner_layers(shape)]
        self.head = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes, bias=shape.head_bias))
        initialise(self.head, "xavier" if shape.init == "mega" else shape.init)
        if self.attention_pool is not None:
            initialise(self.attention_pool, shape.init)

    def forward(self, tokens_BSL: Tensor, lengths_BS: Tensor) -> Tensor:
        """Logits [B, C] of token ids [B, S, L] (int64) with `lengths_BS` real tokens each.

        Raises:
            ValueError: the batch has another number of sequences than the model, or is too long.
        """
        if tokens_BSL.shape[1] != self.num_sequences:
            raise ValueError(
                f"batch with {tokens_BSL.shape[1]} sequences for each example, "
                f"but the model was built for num_sequences={self.num_sequences}"
            )
        positions_L = torch.arange(tokens_BSL.shape[2], device=tokens_BSL.device)
        mask_BSL = positions_L < lengths_BS[..., None]
        # All sequences pass the encoder as rows of one batch, in which no row sees another.
        pooled_BsD = self.represent(
            rearrange(tokens_BSL, "b s l -> (b s) l"), rearrange(mask_BSL, "b s l -> (b s) l")
        )
        return self.score(rearrange(pooled_BsD, "(b s) d -> b s d", s=self.num_sequences))

    def represent(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Encode and pool single sequences; [B, D]."""
        x_BLD = self.encoder(tokens_BL, mask_BL)
        mask_BL = self.encoder.output_mask(mask_BL)
        if self.attention_pool is not None:
            return self.attention_pool(x_BLD, mask_BL)
        return pool_tokens(x_BLD, mask_BL, self.shape.pooling)

    def score(self, pooled_BSD: Tensor) -> Tensor:
        """Logits [B, C] of the pooled vectors of each example's sequences."""
        features_BF = rearrange(pooled_BSD, "b s d -> b (s d)")
        if self.num_sequences == 2 and self.shape.pair_features == "four":
            u_BD, v_BD = pooled_BSD.unbind(dim=1)
            features_BF = torch.cat([features_BF, u_BD * v_BD, u_BD - v_BD], dim=1)
        return self.head(features_BF)
