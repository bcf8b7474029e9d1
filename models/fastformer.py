"""Fastformer: additive attention with one global query and one global key, O(L) in sequence length.

Source: Wu et al. 2021, https://arxiv.org/abs/2108.09084, section 3; where paper and code differ the
defaults follow the authors' code, https://github.com/wuch15/Fastformer.
Shapes: B batch, L length, D d_model, H heads, K head dim, E = H * K.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor, nn

from models.encoder import Encoder
from models.norm import set_eps
from models.shape import Shape, check_positive

Interaction = Literal["product", "add", "concat"]


class FastformerAttention(nn.Module):
    """The mixer: tokens meet a global query, then a global key, each a weighted sum of tokens.

    Weights come from one score vector per head that reads all E columns (the paper's reads its own
    head's only) and has no bias, since the softmax over positions cancels it. They are computed in
    float32 or wider, and are exactly zero at padding.

    Args:
        share_qv: the value is the query, as in the code and as the paper recommends; False gives
            values a projection of their own.
        interaction: how a global vector meets a token: elementwise product or sum, or a linear map
            of both side by side.
        output_projection: the code's extra linear map after the paper's own output. It also brings
            the parameter count to within 1 % of softmax attention at the shared small size.
        causal: refused.

    Raises:
        ValueError: an option is out of range, or causal attention is asked for.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        share_qv: bool = True,
        interaction: Interaction = "product",
        output_projection: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if causal:
            raise ValueError(
                "model.causal=true: Fastformer cannot be causal, since its global query and key "
                "are sums over all tokens; use model=softmax or model=luna"
            )
        if interaction not in get_args(Interaction):
            raise ValueError(
                f"model.interaction={interaction!r}: expected one of "
                f"{', '.join(get_args(Interaction))}"
            )
        width = shape.num_heads * shape.attention_head_dim
        if not output_projection and width != shape.d_model:
            raise ValueError(
                f"model.output_projection=false: needs num_heads * head_dim = shape.d_model, not "
                f"{shape.num_heads} * {shape.attention_head_dim} and {shape.d_model}"
            )
        bias = shape.attention_bias
        self.num_heads = shape.num_heads
        self.interaction: Interaction = interaction
        self.is_plain = share_qv and interaction == "product"
        self.scale = shape.attention_head_dim**-0.5
        self.query = nn.Linear(shape.d_model, width, bias=bias)
        self.key = nn.Linear(shape.d_model, width, bias=bias)
        self.value = None if share_qv else nn.Linear(shape.d_model, width, bias=bias)
        self.query_score = nn.Linear(width, shape.num_heads, bias=False)
        self.key_score = nn.Linear(width, shape.num_heads, bias=False)
        concat = interaction == "concat"
        self.merge = nn.Linear(2 * width, width, bias=bias) if concat else nn.Identity()
        self.transform = nn.Linear(2 * width if concat else width, width, bias=bias)
        self.out = (
            nn.Linear(width, shape.d_model, bias=bias) if output_projection else nn.Identity()
        )

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; mask_BL is True at real tokens. Results at padding mean nothing."""
        q_BLE = self.query(x_BLD)
        global_query_B1E = self.weighted_sum(q_BLE, self.weights(self.query_score(q_BLE), mask_BL))
        if self.is_plain and x_BLD.shape[1] > q_BLE.shape[2]:
            return self.finish_plain(x_BLD, q_BLE, global_query_B1E, mask_BL)
        k_BLE = self.merge(self.interact(global_query_B1E, self.key(x_BLD)))
        global_key_B1E = self.weighted_sum(k_BLE, self.weights(self.key_score(k_BLE), mask_BL))
        v_BLE = q_BLE if self.value is None else self.value(x_BLD)
        return self.out(self.transform(self.interact(global_key_B1E, v_BLE)) + q_BLE)

    def finish_plain(
        self, x_BLD: Tensor, q_BLE: Tensor, global_query_B1E: Tensor, mask_BL: Tensor
    ) -> Tensor:
        """The rest of `forward` if values are shared and interactions are products.

        Two of four maps for each token are saved. Keys enter one score and one sum for each head,
        both linear, so the key map is applied to the score vectors and to the sums. Of the output,
        out(transform(global key * q) + q), the maps are multiplied first: one for each example.
        """
        # The bias of the keys adds the same to all scores of a head: the softmax cancels it.
        score_BHD = (global_query_B1E * self.key_score.weight) @ self.key.weight
        weight_BHL = self.weights(x_BLD @ score_BHD.mT, mask_BL)
        sum_BHE = self.key(weight_BHL.to(x_BLD.dtype) @ x_BLD)
        global_key_B1E = global_query_B1E * self.own_columns(sum_BHE)

        identity_EE = torch.eye(q_BLE.shape[2], dtype=q_BLE.dtype, device=q_BLE.device)
        map_BEE = global_key_B1E.mT * self.transform.weight.T + identity_EE
        if isinstance(self.out, nn.Linear):
            map_BEE = map_BEE @ self.out.weight.T
        if self.transform.bias is None:
            return torch.bmm(q_BLE, map_BEE)
        return torch.baddbmm(self.out(self.transform.bias), q_BLE, map_BEE)

    def weights(self, score_BLH: Tensor, mask_BL: Tensor) -> Tensor:
        """Softmax over real tokens of the scaled scores [B, L, H] -> [B, H, L]; 0 at padding."""
        score_BHL = score_BLH.mT.to(torch.promote_types(score_BLH.dtype, torch.float32))
        padding_B1L = ~mask_BL[:, None, :]
        score_BHL = score_BHL.masked_fill(padding_B1L, torch.finfo(score_BHL.dtype).min)
        # In a row of padding only, the softmax is uniform: the second fill makes its weights zero.
        weight_BHL = (score_BHL * self.scale).softmax(dim=-1)
        return weight_BHL.masked_fill(padding_B1L, 0.0).to(score_BLH.dtype)

    def weighted_sum(self, x_BLE: Tensor, weight_BHL: Tensor) -> Tensor:
        """Per head, the sum of tokens times weights; heads joined -> [B, 1, E]."""
        # Every head sums all columns, since that reads the tokens as they lie.
        return self.own_columns(weight_BHL.to(x_BLE.dtype) @ x_BLE)

    def own_columns(self, sum_BHE: Tensor) -> Tensor:
        """Of each head's sums those of the head's own columns, side by side -> [B, 1, E]."""
        sum_BHHK = sum_BHE.unflatten(2, (self.num_heads, -1))
        return rearrange(sum_BHHK.diagonal(dim1=1, dim2=2), "b k h -> b 1 (h k)")

    def interact(self, global_B1E: Tensor, x_BLE: Tensor) -> Tensor:
        """A global vector and every token: [B, L, E], or [B, L, 2 E] side by side."""
        if self.interaction == "product":
            return global_B1E * x_BLE
        if self.interaction == "add":
            return global_B1E + x_BLE
        return torch.cat([global_B1E.expand_as(x_BLE), x_BLE], dim=-1)


class FastformerEncoder(Encoder):
    """Encoder with Fastformer attention.

    The authors' BERT-style layers are `shape.norm="post"` with `shape.embedding_norm=true`,
    `shape.pooling="attention"` and `norm_eps=1e-12`.

    Args:
        share_layers: one mixer for all layers, as in the paper; False gives each its own, as in the
            code. (`shape.tie_layers` shares the feed-forward and the norms too.)
        norm_eps: added to the variance in every norm.

    Raises:
        ValueError: an option of `FastformerAttention` is out of range, or norm_eps is not positive.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        share_qv: bool = True,
        share_layers: bool = False,
        interaction: Interaction = "product",
        output_projection: bool = True,
        norm_eps: float = 1e-5,
        causal: bool = False,
    ) -> None:
        check_positive("model.norm_eps", norm_eps)
        mixers: list[nn.Module] = []

        def next_mixer() -> nn.Module:
            if share_layers and mixers:
                return SharedMixer(mixers[0])
            mixers.append(
                FastformerAttention(
                    shape,
                    share_qv=share_qv,
                    interaction=interaction,
                    output_projection=output_projection,
                    causal=causal,
                )
            )
            return mixers[-1]

        super().__init__(shape, next_mixer)
        set_eps(self, norm_eps)


class SharedMixer(nn.Module):
    """A mixer that another layer owns: used here, but its parameters are listed and stored once."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.owner = (mixer,)  # in a tuple, since an attribute would register it a second time

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens as the owner does."""
        return self.owner[0](x_BLD, mask_BL)
