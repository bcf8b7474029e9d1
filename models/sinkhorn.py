"""Sinkhorn attention: a block of tokens reads itself and one block sorted to it, block by block.

Source: Tay et al. 2020, https://arxiv.org/abs/2002.11296, sections 3.1 to 3.3, with the sort net of
the package sinkhorn-transformer: blocks are matched by their mean queries and keys. Two deviations,
so that a row depends neither on padding nor on the padded length: only blocks with real tokens are
balanced and means are taken over real tokens, and a sorted slot counts by its share of real ones.

Shapes: B batch, L length, D d_model, H heads, K head dim, N blocks, S block size, J = 2 S slots
that a block reads, T = 3 for query, key, value, E = H * K; X = H * N blocks of an example, P
worked on together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.dropout import Dropout, draw_kept, has_fast_path, keep_probability, side_by_side
from models.layers import StackedLinear
from models.positions import Rotary
from models.ring_attention import LOG2_E, Memory, Take
from models.shape import Shape, check_positive

Variant = Literal["sorted", "arena"]
HIDDEN = -1e4  # the logit of a slot without a token: its exponential is 0
PIECE_SIZE = 2**18  # logits that a thread forms at a time
SMALLEST_SHARE = 1e-30  # of a slot that is there; far smaller ones float32 cannot divide by
SMALLEST_LOG, LARGEST_LOG = -60.0, 20.0  # of the largest entry in a row of R, if not balanced


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
        ValueError: an option is out of range or does not act, or causal attention is asked for.
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
        check_positive("model.temperature", temperature)
        if variant not in get_args(Variant):
            raise ValueError(
                f"model.variant={variant!r}: expected one of {', '.join(get_args(Variant))}"
            )
        if variant == "arena" and (num_iterations, temperature, gumbel_noise) != (7, 0.75, False):
            raise ValueError(
                f"model.num_iterations={num_iterations} model.temperature={temperature} "
                f"model.gumbel_noise={gumbel_noise}: act only with model.variant=sorted; expected "
                "7, 0.75 and false"
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
        size = min(self.block_size, length)
        qkv_BLTHK = self.qkv(x_BLD).unflatten(2, (3, self.num_heads, -1))
        qkv_BLE = self.rotary.stacked(qkv_BLTHK, 2).flatten(2)
        if length % size:
            rest = -length % size
            qkv_BLE = F.pad(qkv_BLE, (0, 0, 0, rest))
            mask_BL = F.pad(mask_BL, (0, rest))
        mask_BNS = mask_BL.unflatten(1, (-1, size))
        sizes = {"h": self.num_heads, "s": size}
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
        dtype = torch.promote_types(qkv_TBHNSK.dtype, torch.float32)
        with torch.autocast("cpu", enabled=False):
            wide_TBHNSK = qkv_TBHNSK.to(dtype)
            share_BNS = mask_BNS.to(dtype)
            share_BNS = share_BNS / share_BNS.sum(dim=2, keepdim=True).clamp(min=1)
            mean_q, mean_k = torch.einsum("bns,tbhnsk->tbhnk", share_BNS, wide_TBHNSK[:2])
            order_BHNN = self.balanced(mean_q, mean_k, mask_BNS)
            p = self.dropout.p if self.training else 0.0
            y_BHNSK = _EachExample.apply(wide_TBHNSK, order_BHNN, mask_BNS, p)
        return y_BHNSK.to(qkv_TBHNSK.dtype)

    def attend_sorted(self, qkv_TBHNSK: Tensor, mask_BNS: Tensor) -> Tensor:
        """Attention of each block to its own tokens and to those sorted to it, [B, H, N, S, K]."""
        qkv_TBHNSK = qkv_TBHNSK * mask_BNS[:, None, ..., None].to(qkv_TBHNSK.dtype)
        q_1BHNSK, kv_2BHNSK = qkv_TBHNSK.split([1, 2])
        q_BHNSK = q_1BHNSK[0]
        with torch.autocast(qkv_TBHNSK.device.type, enabled=False):
            order_BHNN = self.order(q_BHNSK, kv_2BHNSK[0], mask_BNS)
            kv_2BHNJK, bias_BHNJ = with_sorted(kv_2BHNSK, order_BHNN, mask_BNS)
        # Formed as they are, since no kernel of attention takes a bias with a gradient and dropout;
        # in place, as these are the largest tensors here.
        logits_BHNSJ = (q_BHNSK * self.scale) @ kv_2BHNJK[0].mT
        logits_BHNSJ = logits_BHNSJ.to(bias_BHNJ.dtype).add_(bias_BHNJ[..., None, :])
        weight_BHNSJ = logits_BHNSJ.softmax(dim=-1).to(q_BHNSK.dtype)
        return self.dropout(weight_BHNSJ) @ kv_2BHNJK[1]

    def order(self, q_BHNSK: Tensor, k_BHNSK: Tensor, mask_BNS: Tensor) -> Tensor:
        """The matrix R that sorts blocks, [B, H, N, N] in float32 or wider.

        Among blocks of padding it is the identity, and zero between them and the others, which
        therefore do not notice them. Queries and keys at padding must be zero.
        """
        dtype = torch.promote_types(q_BHNSK.dtype, torch.float32)
        count_B1N1 = mask_BNS.sum(dim=-1).clamp(min=1)[:, None, :, None]
        mean_q, mean_k = (x.sum(dim=-2, dtype=dtype) / count_B1N1 for x in (q_BHNSK, k_BHNSK))
        return self.balanced(mean_q, mean_k, mask_BNS)

    def balanced(self, mean_q: Tensor, mean_k: Tensor, mask_BNS: Tensor) -> Tensor:
        """As `order`, from the means of the real tokens of blocks, [B, H, N, K]."""
        log_BHNN = (((mean_q * self.scale) @ mean_k.mT).relu() + 1e-6).log()
        if self.gumbel_noise and self.training:
            log_BHNN = log_BHNN - torch.empty_like(log_BHNN).exponential_().log()
        is_real_BN = mask_BNS.any(dim=-1)
        is_pair_BNN = is_real_BN[:, :, None] & is_real_BN[:, None, :]
        is_alone_BNN = torch.diag_embed(~is_real_BN)
        log_BHNN = (log_BHNN / self.temperature).masked_fill(~is_pair_BNN[:, None], -torch.inf)
        log_BHNN = log_BHNN.masked_fill(is_alone_BNN[:, None], 0.0)
        if self.num_iterations == 0:
            # Unbalanced rows may vanish, but shares are divided by their sums. Raised as a whole to
            # what is still next to nothing, a row has the same shares.
            largest_BHN1 = log_BHNN.detach().amax(dim=-1, keepdim=True)
            # A huge one, which noise over a low temperature makes, has no finite results.
            log_BHNN = log_BHNN + (SMALLEST_LOG - largest_BHN1).clamp(min=0.0)
            log_BHNN = log_BHNN + (LARGEST_LOG - largest_BHN1).clamp(max=0.0)
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
    """Attention of examples side by side, of some blocks at a time, and once more for the gradient.

    What it needs then stays in caches, and no weights are kept. Each example has a seed of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_TBHNSK: Tensor, order_BHNN: Tensor, mask_BNS: Tensor, p: float
    ) -> Tensor:
        batch_size, num_heads, num_blocks, size, width = qkv_TBHNSK.shape[1:]
        seeds = torch.randint(2**32, (batch_size,)).tolist() if p > 0 else [0] * batch_size
        y_BNSHK = qkv_TBHNSK.new_empty(batch_size, num_blocks, size, num_heads, width)
        y_BHNSK = rearrange(y_BNSHK, "b n s h k -> b h n s k")
        log_sum_BXS1 = qkv_TBHNSK.new_empty(batch_size, num_heads * num_blocks, size, 1)
        memory = Memory(qkv_TBHNSK)

        def work(b: int) -> None:
            q_XSK, kv_2HNSK = example(qkv_TBHNSK, mask_BNS, b, memory.take)
            kv_2HNJK, bias_HNJ = with_sorted(kv_2HNSK, order_BHNN[b], mask_BNS[b])
            y_XSK = memory.take("y", *q_XSK.shape)
            generator = torch.Generator().manual_seed(seeds[b])
            for q, k, v, bias, y, log_sum in pieces(
                q_XSK, *kv_2HNJK.flatten(1, 2), bias_HNJ.flatten(0, 1), y_XSK, log_sum_BXS1[b]
            ):
                weight_PSJ = logits(q, k, bias, memory.take)
                largest_PS1 = weight_PSJ.amax(dim=2, keepdim=True)
                weight_PSJ.sub_(largest_PS1).exp2_()
                sum_PS1 = weight_PSJ.sum(dim=2, keepdim=True)
                if p > 0:
                    weight_PSJ *= draw_kept(weight_PSJ.shape, p, generator)
                torch.bmm(weight_PSJ, v, out=y)
                y.mul_((sum_PS1 * keep_probability(p)).reciprocal_())
                torch.add(largest_PS1, sum_PS1.log2_(), out=log_sum)
            y_BHNSK[b] = y_XSK.view(y_BHNSK.shape[1:])

        side_by_side(work, batch_size)
        ctx.save_for_backward(qkv_TBHNSK, order_BHNN, mask_BNS, y_BHNSK, log_sum_BXS1)
        ctx.p, ctx.seeds = p, seeds
        return y_BHNSK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHNSK: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        qkv_TBHNSK, order_BHNN, mask_BNS, y_BHNSK, log_sum_BXS1 = ctx.saved_tensors
        dqkv_TBHNSK, dorder_BHNN = torch.empty_like(qkv_TBHNSK), torch.empty_like(order_BHNN)
        scale, keep_scale = qkv_TBHNSK.shape[-1] ** -0.5, 1 / keep_probability(ctx.p)
        memory = Memory(qkv_TBHNSK)

        def work(b: int) -> None:
            q_XSK, kv_2HNSK = example(qkv_TBHNSK, mask_BNS, b, memory.take)
            order_HNN = order_BHNN[b].detach().requires_grad_()
            kv_2HNSK = kv_2HNSK.detach().requires_grad_()
            with torch.enable_grad():
                kv_2HNJK, bias_HNJ = with_sorted(kv_2HNSK, order_HNN, mask_BNS[b])
            # The softmax takes from each weight's gradient the mean of them under the weights.
            mean_XS1 = (dy_BHNSK[b] * y_BHNSK[b]).sum(dim=-1).view(*q_XSK.shape[:2], 1)
            dy_XSK = (dy_BHNSK[b] * keep_scale).flatten(0, 1)
            dq_XSK = memory.take("dq", *q_XSK.shape)
            dkv_2XJK = memory.take("dkv", 2, len(q_XSK), *kv_2HNJK.shape[3:])
            dbias_XJ = memory.take("dbias", *dkv_2XJK.shape[1:3])
            generator = torch.Generator().manual_seed(ctx.seeds[b])
            for q, k, v, bias, log_sum, dy, mean, dq, dk, dv, dbias in pieces(
                q_XSK, *kv_2HNJK.detach().flatten(1, 2), bias_HNJ.detach().flatten(0, 1),
                log_sum_BXS1[b], dy_XSK, mean_XS1, dq_XSK, *dkv_2XJK, dbias_XJ,
            ):  # fmt: skip
                weight_PSJ = dropped_PSJ = logits(q, k, bias, memory.take).sub_(log_sum).exp2_()
                if ctx.p > 0:
                    kept_PSJ = draw_kept(weight_PSJ.shape, ctx.p, generator)
                    dropped_PSJ = memory.take("dropped", *weight_PSJ.shape)
                    torch.mul(weight_PSJ, kept_PSJ, out=dropped_PSJ)
                torch.bmm(dropped_PSJ.mT, dy, out=dv)
                dlogit_PSJ = torch.bmm(dy, v.mT, out=memory.take("dlogits", *weight_PSJ.shape))
                dlogit_PSJ.mul_(dropped_PSJ).addcmul_(weight_PSJ, mean, value=-1)
                torch.bmm(dlogit_PSJ, k, out=dq)
                torch.bmm(dlogit_PSJ.mT, q, out=dk)
                torch.sum(dlogit_PSJ, dim=1, out=dbias)
            dkv_2XJK[0] *= 1 / LOG2_E
            dkv_2HNSK, dorder_BHNN[b] = torch.autograd.grad(
                (kv_2HNJK, bias_HNJ),
                (kv_2HNSK, order_HNN),
                (dkv_2XJK.view_as(kv_2HNJK), dbias_XJ.view_as(bias_HNJ)),
            )
            real_NS1 = mask_BNS[b, ..., None].to(q_XSK.dtype)
            torch.mul(dq_XSK.view(dy_BHNSK.shape[1:]), real_NS1 * scale, out=dqkv_TBHNSK[0, b])
            torch.mul(dkv_2HNSK, real_NS1, out=dqkv_TBHNSK[1:, b])

        side_by_side(work, len(mask_BNS))
        return dqkv_TBHNSK, dorder_BHNN, None, None


def example(qkv_TBHNSK: Tensor, mask_BNS: Tensor, b: int, take: Take) -> tuple[Tensor, Tensor]:
    """Of one example scaled base-2 queries [X, S, K], and keys and values; zero at padding."""
    qkv_THNSK = take("qkv", 3, *qkv_TBHNSK.shape[2:])
    real_NS1 = mask_BNS[b, ..., None].to(qkv_TBHNSK.dtype)
    torch.mul(qkv_TBHNSK[:, b], real_NS1, out=qkv_THNSK)
    q_HNSK = qkv_THNSK[0].mul_(qkv_THNSK.shape[-1] ** -0.5 * LOG2_E)
    return q_HNSK.flatten(0, 1), qkv_THNSK[1:]


def with_sorted(kv_2BHNSK: Tensor, order_BHNN: Tensor, mask_BNS: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that a block reads, those sorted to it first, and what its logits get added.

    That is [2, B, H, N, J, K] and [B, H, N, J], or all without B. Keys and values at padding must
    be zero.
    """
    real_BNS = mask_BNS.to(order_BHNN.dtype)
    share_BHNS = order_BHNN @ real_BNS.unsqueeze(-3) / order_BHNN.sum(dim=-1, keepdim=True)
    # A slot of which a part is padding counts by the other part, as if it were there that
    # many times; one with next to nothing else is not there.
    is_hidden_BHNS = share_BHNS < SMALLEST_SHARE
    share_BHNS = share_BHNS.masked_fill(is_hidden_BHNS, 1.0)
    sorted_2BHNSK = sort_blocks(order_BHNN, kv_2BHNSK) / share_BHNS[..., None]
    bias_BHNS = share_BHNS.log().masked_fill(is_hidden_BHNS, HIDDEN)
    own_bias_BHNS = ((1 - real_BNS) * HIDDEN).unsqueeze(-3).expand_as(bias_BHNS)
    kv_2BHNJK = torch.cat([sorted_2BHNSK.to(kv_2BHNSK.dtype), kv_2BHNSK], dim=-2)
    return kv_2BHNJK, torch.cat([bias_BHNS, own_bias_BHNS], dim=-1)


def logits(q_PSK: Tensor, k_PJK: Tensor, bias_PJ: Tensor, take: Take) -> Tensor:
    """Of some blocks, in base 2; [P, S, J]."""
    out = take("logits", *q_PSK.shape[:2], k_PJK.shape[1])
    return torch.baddbmm((bias_PJ * LOG2_E)[:, None].expand_as(out), q_PSK, k_PJK.mT, out=out)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What the tensors say of some blocks after the other; the first two are queries and keys."""
    size = PIECE_SIZE // (tensors[0].shape[1] * tensors[1].shape[1])
    return zip(*(x.split(max(1, size)) for x in tensors), strict=True)


def sort_blocks(order_BHNN: Tensor, kv_2BHNSK: Tensor) -> Tensor:
    """Sums over blocks, slot by slot, in the dtype of `order_BHNN`; [2, B, H, N, S, K]."""
    sorted_2BHNE = order_BHNN @ kv_2BHNSK.flatten(-2).to(order_BHNN.dtype)
    return sorted_2BHNE.unflatten(-1, kv_2BHNSK.shape[-2:])
