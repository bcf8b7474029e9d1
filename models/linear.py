"""Linear Transformer: attention with the features elu(x) + 1 of queries and keys, linear in length.

Source: Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, section 3; the small number in
the divisor is that of the Long Range Arena's code.
Shapes: B batch, L length, D d_model, H heads, K head dim, J = K + 1, T = 3 for query, key, value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.kernels import all_sums, causal_sums, widened, with_count
from models.layers import StackedLinear, check_causal, check_stepwise
from models.positions import Rotary
from models.shape import Shape

EPSILON = 1e-6  # added to the sum of weights


@dataclass(frozen=True)
class LinearState:
    """What step-by-step causal attention carries; nothing in it grows with the number of steps."""

    sum_BHKJ: Tensor  # of outer products of features and values
    num_steps: int = 0


class LinearAttention(nn.Module):
    """The mixer: sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j), phi(x) = elu(x) + 1.

    Queries and keys are not scaled. Sums run over real tokens, in float32 or wider also under
    autocast; a row of padding only mixes to zero. There are no weights to drop, so attention
    dropout does not act. Rotary positions turn the features, and only of the weights over the
    division line, as Su et al. 2021 (https://arxiv.org/abs/2104.09864, section 3.3) have it.

    Args:
        shape: heads, widths, `attention_bias` and `max_length` are read here.
        normalize: divide by the sum of weights. False divides by the square root of
            `shape.max_length` alone, as the LRA code of Nystromformer, which pads every row to that
            length. (It is meant to be the head's width there, but the wrong axis is measured.)
        causal: position t sees positions 0 .. t only.

    Raises:
        ValueError: causal together with a pooling that reads the first position.
    """

    def __init__(self, shape: Shape, *, normalize: bool = True, causal: bool = False) -> None:
        super().__init__()
        check_causal(shape, causal)
        self.num_heads = shape.num_heads
        self.head_dim = shape.attention_head_dim
        self.max_length = shape.max_length
        self.normalize = normalize
        self.causal = causal
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        y_BHLK = self.attend(self._project(x_BLD), mask_BL)
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)"))

    def attend(self, qkv_TBHLK: Tensor, mask_BL: Tensor) -> Tensor:
        """Attention between the linear maps; [B, H, L, K]."""
        with torch.autocast(qkv_TBHLK.device.type, enabled=False):
            q_BHLK, k_BHLK, v_BHLJ = self._features(qkv_TBHLK, mask_BL)
            sums = causal_sums if self.causal else all_sums
            if self.rotary.is_on:
                v_BHLK, count_BHL1 = v_BHLJ.split((self.head_dim, 1), dim=-1)
                turned_q_BHLK, turned_k_BHLK = self.rotary(q_BHLK, k_BHLK)
                sum_BHLK = sums(turned_q_BHLK, turned_k_BHLK, v_BHLK)
                sum_BHLJ = torch.cat([sum_BHLK, sums(q_BHLK, k_BHLK, count_BHL1)], dim=-1)
            else:
                sum_BHLJ = sums(q_BHLK, k_BHLK, v_BHLJ)
            return self._divide(sum_BHLJ).to(qkv_TBHLK.dtype)

    def start(self, batch_size: int) -> LinearState:
        """State before the first position.

        Raises:
            ValueError: the model is not causal.
        """
        check_stepwise(self.causal)
        zero = widened(self.qkv.weight.new_zeros(()))
        return LinearState(
            zero.repeat(batch_size, self.num_heads, self.head_dim, self.head_dim + 1)
        )

    def step(self, x_B1D: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
        """The next position alone, of causal attention; [B, 1, D] and the state after it."""
        qkv_TBH1K = self._project(x_B1D)
        with torch.autocast(x_B1D.device.type, enabled=False):
            mask_B1 = torch.ones(x_B1D.shape[:2], dtype=torch.bool, device=x_B1D.device)
            q_BH1K, k_BH1K, v_BH1J = self._features(qkv_TBH1K, mask_B1)
            v_BH1K, count_BH11 = v_BH1J.split((self.head_dim, 1), dim=-1)
            turned_q_BH1K, turned_k_BH1K = self.rotary(q_BH1K, k_BH1K, first=state.num_steps)
            new_BHKJ = torch.cat([turned_k_BH1K.mT @ v_BH1K, k_BH1K.mT @ count_BH11], dim=-1)
            state = LinearState(state.sum_BHKJ + new_BHKJ, state.num_steps + 1)
            sum_BHKK, weight_BHK1 = state.sum_BHKJ.split((self.head_dim, 1), dim=-1)
            sum_BH1J = torch.cat([turned_q_BH1K @ sum_BHKK, q_BH1K @ weight_BHK1], dim=-1)
            y_BH1K = self._divide(sum_BH1J).to(qkv_TBH1K.dtype)
        return self.out(rearrange(y_BH1K, "b h l k -> b l (h k)")), state

    def _project(self, x_BLD: Tensor) -> Tensor:
        parts = rearrange(self.qkv(x_BLD), "b l (t h k) -> t b h l k", t=3, h=self.num_heads)
        return parts.contiguous()

    def _features(self, qkv_TBHLK: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries and of keys, and values with their count."""
        q_BHLK, k_BHLK, v_BHLK = widened(qkv_TBHLK)
        features = F.elu(q_BHLK).add_(1.0), F.elu(k_BHLK).add_(1.0)
        return *features, with_count(v_BHLK, mask_BL)

    def _divide(self, sum_BHLJ: Tensor) -> Tensor:
        sum_BHLK, weight_BHL1 = sum_BHLJ.split((self.head_dim, 1), dim=-1)
        if not self.normalize:
            return sum_BHLK / math.sqrt(self.max_length)
        return sum_BHLK * (weight_BHL1 + EPSILON).reciprocal()
