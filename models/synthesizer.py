"""Synthesizer: attention weights are learned or made from each token alone; quadratic in length.

Source: Tay et al. 2020, https://arxiv.org/abs/2005.00743, sections 3.1 to 3.3, and the arena's own
code, google-research/long-range-arena. Of the two, logits of several parts are added, as in the
code (the paper weighs them), and padding is read by nobody, as in neither without the dot product.

Shapes: B batch, L length, D d_model, H heads, K head dim, E = H * K, M rows of the tables (the
longest length), N queries worked on at a time, R rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.dropout import Dropout, has_fast_path
from models.layers import check_causal
from models.positions import Rotary
from models.shape import Shape

PARTS = ("dense", "factorized_dense", "random", "factorized_random")
LARGEST_SPREAD = 60.0  # of logits, whose exponentials float32 can still add and divide
BLOCK_SIZE = {"cpu": 2**20, "other": 2**26}  # logits formed at a time: few enough for CPU caches


class SynthesizerAttention(nn.Module):
    """The mixer: softmax(logits) V, with logits [L, L] for each head that are a sum of parts.

    - dense: row i is W2 relu(W1 x_i), W2 [K, M] shared by the heads, cut to L columns;
    - factorized_dense: the same from two shorter vectors a and b of each token, whose products
      a[j div n] b[j mod n], n = ceil(sqrt(M)), are the row;
    - random: a learned table [H, M, M], the same for every input, cut to L rows and columns;
    - factorized_random: that table as a product [H, M, R] [H, R, M];
    - the dot product q k^T / sqrt(K) on top of them, with dot_product.

    Without the dot product and dense parts all examples have the same logits, and differ only in
    where their tokens end. They then share one softmax and, in training, what dropout leaves of it,
    as in the arena's code. In all other modes logits are formed for some queries at a time, and
    again for the gradient, so that memory is linear in the length but for the tables.

    Args:
        shape: heads, widths, the longest length, `attention_bias` and `attention_dropout` are read
            here.
        mode: parts, joined by "+".
        rank: R of factorized_random.
        dot_product: add that of queries and keys; False leaves both maps out.
        causal: position t reads positions 0 .. t only. Padding must stand behind the tokens.

    Raises:
        ValueError: an option is out of range or does not act, or causal meets a pooling that reads
            position 0.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        mode: str = "factorized_random",
        rank: int = 2,
        dot_product: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_causal(shape, causal)
        parts = mode.split("+")
        if len(set(parts)) < len(parts) or not set(parts) <= set(PARTS):
            raise ValueError(
                f"model.mode={mode!r}: expected one or several of {', '.join(PARTS)}, joined by +"
            )
        if rank < 1:
            raise ValueError(f"model.rank={rank}: expected at least 1")
        if rank != 2 and "factorized_random" not in parts:
            raise ValueError(f"model.rank={rank}: acts only with model.mode=factorized_random")
        if shape.is_rotary and not dot_product:
            raise ValueError(
                f"shape.positions={shape.positions} with model.dot_product=false: there are no "
                "queries and keys to turn; set model.dot_product=true, or shape.positions=learned, "
                "sinusoidal or none"
            )
        self.num_heads = num_heads = shape.num_heads
        self.scale = shape.attention_head_dim**-0.5
        self.causal = causal
        self.is_alike = not dot_product and {"random", "factorized_random"} >= set(parts)
        width, bias = num_heads * shape.attention_head_dim, shape.attention_bias
        num_rows = shape.max_length + (shape.pooling == "cls")
        self.query = nn.Linear(shape.d_model, width, bias=bias) if dot_product else None
        self.key = nn.Linear(shape.d_model, width, bias=bias) if dot_product else None
        self.value = nn.Linear(shape.d_model, width, bias=bias)
        self.out = nn.Linear(width, shape.d_model, bias=bias)
        self.rotary = Rotary(shape)
        self.dropout = Dropout(shape.attention_dropout)

        self.random_HMM: nn.Parameter | None = None
        if "random" in parts:
            self.random_HMM = xavier_table(num_heads, num_rows, num_rows)
        self.random_HMR: nn.Parameter | None = None
        self.random_HRM: nn.Parameter | None = None
        if "factorized_random" in parts:
            self.random_HMR = xavier_table(num_heads, num_rows, rank)
            self.random_HRM = xavier_table(num_heads, rank, num_rows)
        self.dense = self.factor_a = self.factor_b = None
        if "dense" in parts:
            self.dense = DenseRow(shape, num_rows)
        if "factorized_dense" in parts:
            width_b = math.isqrt(num_rows - 1) + 1
            self.factor_a = DenseRow(shape, -(-num_rows // width_b))
            self.factor_b = DenseRow(shape, width_b)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        batch_size, length, _ = x_BLD.shape
        v_BHLK = self.split_heads(self.value(x_BLD))
        random_HLL = self.random_logits(length)
        if self.is_alike:
            assert random_HLL is not None
            # Only a CPU has the answer at once; for a GPU the host would wait in every layer.
            if not has_fast_path(x_BLD) or spread(random_HLL) < LARGEST_SPREAD:
                return self.out(self.read_alike(random_HLL, v_BHLK, mask_BL).to(x_BLD.dtype))
        k_BHLK = None
        if self.key is not None:
            (k_BHLK,) = self.rotary(self.split_heads(self.key(x_BLD)))
        # A row of padding reads everything, so that it stays finite.
        mask_BL = mask_BL | ~mask_BL.any(dim=1, keepdim=True)
        block_size = BLOCK_SIZE["cpu" if x_BLD.device.type == "cpu" else "other"]
        num_rows = max(1, block_size // (batch_size * self.num_heads * length))
        is_kept = num_rows >= length or not torch.is_grad_enabled()
        if not is_kept and torch.compiler.is_compiling():  # Dynamo of PyTorch 2.13 fails below
            return torch.compiler.disable(self.forward)(x_BLD, mask_BL)
        y_BNE = []
        for start in range(0, length, num_rows):
            rows = slice(start, start + num_rows)
            random_HNL = None if random_HLL is None else random_HLL[:, rows]
            args = (start, x_BLD[:, rows], random_HNL, k_BHLK, v_BHLK, mask_BL)
            y_BNE.append(
                self.read(*args) if is_kept else checkpoint(self.read, *args, use_reentrant=False)
            )
        return self.out(torch.cat(y_BNE, dim=1))

    def split_heads(self, x_BLE: Tensor) -> Tensor:
        """[B, L, E] to [B, H, L, K]."""
        return rearrange(x_BLE, "b l (h k) -> b h l k", h=self.num_heads)

    def random_logits(self, length: int) -> Tensor | None:
        """Those that depend on positions alone, [H, L, L] in float32 or wider, if there are any."""
        total: Tensor | None = None
        if self.random_HMM is not None:
            total = at_least_float32(self.random_HMM[:, :length, :length])
        if self.random_HMR is not None and self.random_HRM is not None:
            with torch.autocast(self.random_HMR.device.type, enabled=False):
                product = at_least_float32(self.random_HMR[:, :length]) @ at_least_float32(
                    self.random_HRM[..., :length]
                )
            total = product if total is None else total + product
        return total

    def read(
        self,
        start: int,
        x_BND: Tensor,
        random_HNL: Tensor | None,
        k_BHLK: Tensor | None,
        v_BHLK: Tensor,
        mask_BL: Tensor,
    ) -> Tensor:
        """What the N queries from position `start` on read, [B, N, E]."""
        length = mask_BL.shape[1]
        parts: list[Tensor] = []
        if self.dense is not None:
            parts.append(self.dense(x_BND, length))
        if self.factor_a is not None and self.factor_b is not None:
            b_BHNb = self.factor_b(x_BND)
            a_BHNa = self.factor_a(x_BND, -(-length // b_BHNb.shape[-1]))
            row_BHNab = a_BHNa[..., None] * b_BHNb[..., None, :]
            parts.append(row_BHNab.flatten(-2)[..., :length])
        if self.query is not None and k_BHLK is not None:
            q_BHNK = self.split_heads(self.query(x_BND) * self.scale)
            (q_BHNK,) = self.rotary(q_BHNK, first=start)
            parts.append(q_BHNK @ k_BHLK.mT)
        if random_HNL is not None:
            parts.append(random_HNL[None])
        # In place, as these are the largest tensors there are; only a table must be left as it is.
        logits_BHNL = at_least_float32(parts[0])
        for part in parts[1:]:
            logits_BHNL.add_(part)
        hidden_BNL = ~mask_BL[:, None]
        if self.causal:
            position_L = torch.arange(length, device=mask_BL.device)
            hidden_BNL = hidden_BNL | (position_L > position_L[start:, None][: x_BND.shape[1]])
        fill = logits_BHNL.masked_fill if self.is_alike else logits_BHNL.masked_fill_
        weight_BHNL = fill(hidden_BNL[:, None], -torch.inf).softmax(dim=-1)
        y_BHNK = self.dropout(weight_BHNL.to(v_BHLK.dtype)) @ v_BHLK
        return rearrange(y_BHNK, "b h n k -> b n (h k)")

    def read_alike(self, logits_HLL: Tensor, v_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
        """The result [B, L, E] where all examples have the same logits.

        Weights are normalised over all positions, and again, for each example, over its tokens.
        """
        with torch.autocast(v_BHLK.device.type, enabled=False):
            if self.causal:
                later_LL = torch.ones_like(logits_HLL[0], dtype=torch.bool).triu(1)
                logits_HLL = logits_HLL.masked_fill(later_LL, -torch.inf)
            fast = has_fast_path(v_BHLK)
            if not fast:
                logits_HLL = lowered(logits_HLL, mask_BL)
            weight_HLL = logits_HLL.softmax(dim=-1)
            v_BHLK = v_BHLK.to(weight_HLL.dtype)
            has_padding = not fast or not bool(mask_BL.all())
            if has_padding:
                v_BHLK = v_BHLK * mask_BL[:, None, :, None]
            y_HLBK = self.dropout(weight_HLL) @ rearrange(v_BHLK, "b h l k -> h l (b k)")
            y_HLBK = y_HLBK.unflatten(-1, (len(v_BHLK), -1))
            if has_padding:
                total_HLB = weight_HLL @ mask_BL.to(weight_HLL.dtype).T
                total_HLB = total_HLB.masked_fill(total_HLB == 0, 1.0)  # a row of padding
                y_HLBK = y_HLBK / total_HLB[..., None]
        return rearrange(y_HLBK, "h l b k -> b l (h k)")


class DenseRow(nn.Module):
    """W2 relu(W1 x), for each head from its own K columns of W1 x; W2 is shared by the heads."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.num_heads, bias = shape.num_heads, shape.attention_bias
        head_dim = shape.attention_head_dim
        self.hidden = nn.Linear(shape.d_model, shape.num_heads * head_dim, bias=bias)
        self.row = nn.Linear(head_dim, width, bias=bias)

    def forward(self, x_BLD: Tensor, width: int | None = None) -> Tensor:
        """[B, H, L, width], the first `width` outputs or all."""
        hidden_BHLK = rearrange(self.hidden(x_BLD).relu(), "b l (h k) -> b h l k", h=self.num_heads)
        bias = None if self.row.bias is None else self.row.bias[:width]
        return F.linear(hidden_BHLK, self.row.weight[:width], bias)


def xavier_table(num_heads: int, num_rows: int, num_columns: int) -> nn.Parameter:
    """[H, rows, columns], uniform within the arena code's limit, which counts heads as extent."""
    limit = math.sqrt(6 / (num_heads * (num_rows + num_columns)))
    return nn.Parameter(torch.empty(num_heads, num_rows, num_columns).uniform_(-limit, limit))


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision widened."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def lowered(logits_HLL: Tensor, mask_BL: Tensor) -> Tensor:
    """None of them further above the largest that all examples read than one softmax can serve.

    So examples that end early keep weights that can be divided. In longer ones a position that far
    above takes all, as before; several, whose order is lost here, share it.
    """
    read_L = (mask_BL | ~mask_BL.any(dim=1, keepdim=True)).all(dim=0)
    largest_HL1 = logits_HLL.detach().masked_fill(~read_L, -torch.inf).amax(dim=-1, keepdim=True)
    largest_HL1 = largest_HL1.masked_fill(largest_HL1 == -torch.inf, torch.inf)
    return logits_HLL.minimum(largest_HL1 + LARGEST_SPREAD)


@torch.no_grad()
def spread(logits_HLL: Tensor) -> float:
    """How far the logits of one row are apart at most."""
    return float((logits_HLL.amax(dim=-1) - logits_HLL.amin(dim=-1)).max())
