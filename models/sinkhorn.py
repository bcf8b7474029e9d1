"""Sinkhorn attention: a block of tokens reads itself and one block sorted to it, block by block.

Source: Tay et al. 2020, https://arxiv.org/abs/2002.11296, sections 3.1 to 3.3, with the sort net of
the package sinkhorn-transformer: blocks are matched by their mean queries and keys. Two deviations,
so that a row depends neither on padding nor on the padded length: only blocks with real tokens are
balanced and means are taken over real tokens, and a sorted slot counts by its share of real ones.

Shapes: B batch, L length, D d_model, H heads, K head dim, N blocks, S block size, J = 2 S slots
that a block reads, T = 3 for query, key, value, E = H * K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.dropout import Dropout, draw_kept, has_fast_path, keep_probability, side_by_side
from models.layers import StackedLinear
from models.positions import Rotary
from models.shape import Shape

Variant = Literal["sorted", "arena"]
HIDDEN = -1e4  # the logit of a slot without a token: its exponential is 0
SMALLEST_SHARE = 1e-30  # of a slot that is there; far smaller ones float32 cannot divide by


class SinkhornAttention(nn.Module):
    """The mixer: queries of block u attend to its own keys and to the sorted ones of block u.

    Sorted keys are sums over blocks, R[u, v] k[v] slot by slot, and values likewise. R is near a
    permutation: (relu(mean query of u * mean key of v / sqrt(K)) + 1e-6)^(1 / temperature), then
    rows and columns divided by their sums in turn. Work is L S for attention and L N for the sums,
    so linear in length up to about S blocks.

    `variant="arena"` computes what google-research/long-range-arena does, to reproduce its
    published row: a block holds every N-th token instead of S neighbours, while its mask is that of
    S neighbours; the block's attention is added to one that reads the sum of all blocks, as sorting
    has no effect there; padded keys are read in both, and results depend on the padded length.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here.
        block_size: S.
        num_iterations: rounds of the balancing.
        temperature: the lower, the nearer R is to a permutation.
        gumbel_noise: in training, add Gumbel noise to the scores before the temperature.
        variant: "sorted", or "arena"; the three options above are for "sorted".
        causal: refused.

    Raises:
        ValueError: an option is out of range, or causal attention is asked for.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block_size: int = 64,
        num_iterations: int = 7,
        temperature: float = 0.75,
        gumbel_noise: bool = False,
        variant: Variant = "sorted",
        causal: bool = False,
    ) -> None:
        super().__init__()
        if causal:
            raise ValueError(
                "model.causal=true: not offered for Sinkhorn attention, whose sorted blocks come "
                "from all of the row; use model=softmax or model=luna"
            )
        if block_size < 1:
            raise ValueError(f"model.block_size={block_size}: expected at least 1")
        if num_iterations < 0:
            raise ValueError(f"model.num_iterations={num_iterations}: expected at least 0")
        if not 0 < temperature < math.inf:
            raise ValueError(f"model.temperature={temperature}: expected more than 0")
        if variant not in get_args(Variant):
            raise ValueError(
                f"model.variant={variant!r}: expected one of {', '.join(get_args(Variant))}"
            )
        self.num_heads = shape.num_heads
        self.scale = shape.attention_head_dim**-0.5
        self.block_size = block_size
        self.num_iterations = num_iterations
        self.temperature = temperature
        self.gumbel_noise = gumbel_noise
        self.variant: Variant = variant
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)
        self.dropout = Dropout(shape.attention_dropout)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; mask_BL is True at real tokens. Results at padding mean nothing."""
        length = x_BLD.shape[1]
        qkv_BLTHK = self.qkv(x_BLD).unflatten(2, (3, self.num_heads, -1))
        qkv_BLE = self.rotary.stacked(qkv_BLTHK, 2).flatten(2)
        if length % self.block_size:
            rest = -length % self.block_size
            qkv_BLE = F.pad(qkv_BLE, (0, 0, 0, rest))
            mask_BL = F.pad(mask_BL, (0, rest))
        mask_BNS = mask_BL.unflatten(1, (-1, self.block_size))
        sizes = {"h": self.num_heads, "s": self.block_size}
        if self.variant == "arena":
            qkv = rearrange(qkv_BLE, "b (s n) (t h k) -> t b h n s k", t=3, **sizes)
            y_BLE = rearrange(self.attend_as_arena(qkv, mask_BNS), "b h n s k -> b (s n) (h k)")
        else:
            qkv = rearrange(qkv_BLE, "b (n s) (t h k) -> t b h n s k", t=3, **sizes)
            y_BLE = rearrange(self.attend(qkv, mask_BNS), "b h n s k -> b (n s) (h k)")
        return self.out(y_BLE[:, :length])

    def attend(self, qkv_TBHNSK: Tensor, mask_BNS: Tensor) -> Tensor:
        """`attend_sorted`, on a CPU of each example on its own."""
        if not has_fast_path(qkv_TBHNSK):
            return self.attend_sorted(qkv_TBHNSK, mask_BNS)
        p = self.dropout.p if self.training else 0.0
        return _EachExample.apply(qkv_TBHNSK, mask_BNS, self.attend_sorted, p)

    def attend_sorted(
        self,
        qkv_TBHNSK: Tensor,
        mask_BNS: Tensor,
        dropout: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attention of each block to its own tokens and to those sorted to it, [B, H, N, S, K]."""
        qkv_TBHNSK = qkv_TBHNSK * mask_BNS[:, None, ..., None].to(qkv_TBHNSK.dtype)
        q_1BHNSK, kv_2BHNSK = qkv_TBHNSK.split([1, 2])
        q_BHNSK = q_1BHNSK[0]
        with torch.autocast(qkv_TBHNSK.device.type, enabled=False):
            order_BHNN = self.order(q_BHNSK, kv_2BHNSK[0], mask_BNS)
            real_BNS = mask_BNS.to(order_BHNN.dtype)
            share_BHNS = order_BHNN @ real_BNS[:, None] / order_BHNN.sum(dim=-1, keepdim=True)
            # A slot of which a part is padding counts by the other part, as if it were there that
            # many times; one with next to nothing else is not there.
            is_hidden_BHNS = share_BHNS < SMALLEST_SHARE
            share_BHNS = share_BHNS.masked_fill(is_hidden_BHNS, 1.0)
            sorted_2BHNSK = sort_blocks(order_BHNN, kv_2BHNSK) / share_BHNS[..., None]
            bias_BHNS = share_BHNS.log().masked_fill(is_hidden_BHNS, HIDDEN)
            own_bias_BHNS = ((1 - real_BNS) * HIDDEN)[:, None].expand_as(bias_BHNS)
            bias_BHNJ = torch.cat([bias_BHNS, own_bias_BHNS], dim=-1)
            k_BHNJK, v_BHNJK = torch.cat([sorted_2BHNSK.to(q_BHNSK.dtype), kv_2BHNSK], dim=-2)
        # Formed as they are, since no kernel of attention takes a bias with a gradient and dropout;
        # in place, as these are the largest tensors here.
        logits_BHNSJ = (q_BHNSK * self.scale) @ k_BHNJK.mT
        logits_BHNSJ = logits_BHNSJ.to(bias_BHNJ.dtype).add_(bias_BHNJ[..., None, :])
        weight_BHNSJ = logits_BHNSJ.softmax(dim=-1).to(v_BHNJK.dtype)
        return (dropout or self.dropout)(weight_BHNSJ) @ v_BHNJK

    def order(self, q_BHNSK: Tensor, k_BHNSK: Tensor, mask_BNS: Tensor) -> Tensor:
        """The matrix R that sorts blocks, [B, H, N, N] in float32 or wider.

        Among blocks of padding it is the identity, and zero between them and the others, which
        therefore do not notice them. Queries and keys at padding must be zero.
        """
        dtype = torch.promote_types(q_BHNSK.dtype, torch.float32)
        count_B1N1 = mask_BNS.sum(dim=-1).clamp(min=1)[:, None, :, None]
        mean_q, mean_k = (x.sum(dim=-2, dtype=dtype) / count_B1N1 for x in (q_BHNSK, k_BHNSK))
        log_BHNN = (((mean_q * self.scale) @ mean_k.mT).relu() + 1e-6).log()
        if self.gumbel_noise and self.training:
            log_BHNN = log_BHNN - torch.empty_like(log_BHNN).exponential_().log()
        is_real_BN = mask_BNS.any(dim=-1)
        is_pair_BNN = is_real_BN[:, :, None] & is_real_BN[:, None, :]
        is_alone_BNN = torch.diag_embed(~is_real_BN)
        log_BHNN = (log_BHNN / self.temperature).masked_fill(~is_pair_BNN[:, None], -torch.inf)
        log_BHNN = log_BHNN.masked_fill(is_alone_BNN[:, None], 0.0)
        for _ in range(self.num_iterations):
            log_BHNN = log_BHNN.log_softmax(dim=-1).log_softmax(dim=-2)
        return log_BHNN.exp()

    def attend_as_arena(self, qkv_TBHNSK: Tensor, mask_BNS: Tensor) -> Tensor:
        """Attention in each block plus attention to the sum of all blocks, [B, H, N, S, K].

        A slot pair may be used if both are real. Where a row has no pair, all get the same weight:
        its logits vanish beside a large number, through which gradients still flow.
        """
        dtype = qkv_TBHNSK.dtype
        with torch.autocast(qkv_TBHNSK.device.type, enabled=False):
            q_BHNSK, k_BHNSK, v_BHNSK = qkv_TBHNSK.to(torch.promote_types(dtype, torch.float32))
            q_BHNSK = q_BHNSK * self.scale
            pair_BNSS = mask_BNS[..., :, None] & mask_BNS[..., None, :]
            y_BHNSK = torch.zeros_like(v_BHNSK)
            for k, v, pair in (
                (k_BHNSK, v_BHNSK, pair_BNSS),
                (k_BHNSK.sum(2, True), v_BHNSK.sum(2, True), pair_BNSS.any(1, True)),
            ):
                logits = q_BHNSK @ k.mT + (~pair[:, None]).to(q_BHNSK.dtype) * -1e30
                y_BHNSK = y_BHNSK + self.dropout(logits.softmax(dim=-1)) @ v
        return y_BHNSK.to(dtype)


class _EachExample(torch.autograd.Function):
    """Attention of each example side by side, and once more for the gradient.

    What it needs then stays in caches, and no weights are kept. Each example has a seed of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_TBHNSK: Tensor, mask_BNS: Tensor, attend: Callable[..., Tensor], p: float
    ) -> Tensor:
        seeds = torch.randint(2**32, (len(mask_BNS),)).tolist()
        y_BNSHK = torch.empty_like(
            rearrange(qkv_TBHNSK[0], "b h n s k -> b n s h k"),
            memory_format=torch.contiguous_format,
        )
        y_BHNSK = rearrange(y_BNSHK, "b n s h k -> b h n s k")

        def work(b: int) -> None:
            part = slice(b, b + 1)
            y_BHNSK[part] = attend(
                qkv_TBHNSK[:, part], mask_BNS[part], dropout_of_seed(p, seeds[b])
            )

        side_by_side(work, len(mask_BNS))
        ctx.save_for_backward(qkv_TBHNSK, mask_BNS)
        ctx.attend, ctx.p, ctx.seeds = attend, p, seeds
        return y_BHNSK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHNSK: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        qkv_TBHNSK, mask_BNS = ctx.saved_tensors
        dqkv_TBHNSK = torch.empty_like(qkv_TBHNSK)

        @torch.enable_grad()
        def work(b: int) -> None:
            part = slice(b, b + 1)
            leaf = qkv_TBHNSK[:, part].detach().requires_grad_()
            y = ctx.attend(leaf, mask_BNS[part], dropout_of_seed(ctx.p, ctx.seeds[b]))
            (dqkv_TBHNSK[:, part],) = torch.autograd.grad(y, leaf, dy_BHNSK[part])

        side_by_side(work, len(mask_BNS))
        return dqkv_TBHNSK, None, None, None


def sort_blocks(order_BHNN: Tensor, kv_2BHNSK: Tensor) -> Tensor:
    """Sums over blocks, slot by slot, in the dtype of `order_BHNN`; [2, B, H, N, S, K]."""
    sorted_2BHNE = order_BHNN @ kv_2BHNSK.flatten(-2).to(order_BHNN.dtype)
    return sorted_2BHNE.unflatten(-1, kv_2BHNSK.shape[-2:])


def dropout_of_seed(p: float, seed: int) -> Callable[[Tensor], Tensor]:
    """The same numbers in each of two passes, in whatever thread."""

    def drop(x: Tensor) -> Tensor:
        if p == 0:
            return x
        kept = draw_kept(x.shape, p, torch.Generator().manual_seed(seed))
        return x * kept.to(x.dtype).mul_(1 / keep_probability(p))

    return drop
