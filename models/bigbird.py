"""BigBird attention: blocks read their neighbours, the first and last block, and random ones, O(L).

Source: Zaheer et al. 2020, https://arxiv.org/abs/2007.14062, section 2 and appendix D; which blocks
each block reads as in Long Range Arena's and Hugging Face's code.
Shapes: B batch, L length, D d_model, H heads, K head dim; G blocks, R rows of a block, r random
blocks, M positions of the first and the last block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.layers import StackedLinear, attend
from models.patterns import attend_pieces
from models.pieces import Chosen, Drawn, Window, key_mask
from models.positions import Rotary
from models.shape import Shape


class BigBirdAttention(nn.Module):
    """Softmax attention of each block to itself, its two neighbours, the first, last and r others.

    The first and the last block read everything. The last block is that of the longest input,
    `shape.max_length`: a shorter row has none, so that it does not depend on its batch. A block
    that is drawn and also read for another reason counts twice. If the longest input has at most
    5 + 2 r blocks, attention is full, as in Hugging Face's code.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here.
        block_size: positions of a block.
        num_random: r, blocks drawn for each block and head, when the model is made; they are part
            of its state. Not drawn are the neighbours, the first and the last block.
        random_span: they are drawn from the first so many positions; null: from all.
        filled_keys: the published BigBird row of the arena (its Table 1) is of true: the longest
            input is filled up with 1 to `block_size` rows of zeros, which all count as real keys,
            the random blocks may contain the last, and attention is never full.
        causal: refused.

    Raises:
        ValueError: an option is out of range, too few blocks are there to draw from, or causal
            attention is asked for.
    """

    random_HGr: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        block_size: int = 16,
        num_random: int = 3,
        random_span: int | None = None,
        filled_keys: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if causal:
            raise ValueError(
                "model.causal=true: BigBird cannot be causal, since its first and last block read "
                "everything; use model=local or model=softmax"
            )
        if block_size < 1:
            raise ValueError(f"model.block_size={block_size}: expected at least 1")
        if num_random < 0:
            raise ValueError(f"model.num_random={num_random}: expected at least 0")
        if random_span is not None and random_span < 1:
            raise ValueError(f"model.random_span={random_span}: expected at least 1 or null")
        self.num_heads = shape.num_heads
        self.dropout = shape.attention_dropout
        self.block_size = block_size
        self.filled_keys = filled_keys
        self.longest = shape.max_length + (shape.pooling == "cls")
        self.num_blocks = (
            self.longest // block_size + 1 if filled_keys else -(-self.longest // block_size)
        )
        self.is_full = not filled_keys and self.num_blocks <= 5 + 2 * num_random
        if not self.is_full:
            span = self.longest if random_span is None else random_span
            last = min(self.num_blocks - (not filled_keys), -(-span // block_size))
            table_HGr = draw_blocks(shape.num_heads, self.num_blocks, last, num_random)
            self.register_buffer("random_HGr", table_HGr)
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        length = x_BLD.shape[1]
        if self.filled_keys:
            filled = self.num_blocks * self.block_size
            x_BLD = F.pad(x_BLD, (0, 0, 0, filled - length))
            mask_BL = F.pad(mask_BL, (0, self.longest - length))
            mask_BL = F.pad(mask_BL, (0, filled - self.longest), value=True)
        q_BHLK, k_BHLK, v_BHLK = self.rotary.heads(self.qkv(x_BLD), self.num_heads)
        rate = self.dropout if self.training else 0.0
        if self.is_full:
            y_BHLK = attend(q_BHLK, k_BHLK, v_BHLK, mask_BL, query_mask_BL=mask_BL, dropout=rate)
        else:
            y_BHLK = self.attend(q_BHLK, k_BHLK, v_BHLK, mask_BL, rate)
        return self.out(rearrange(y_BHLK[:, :, :length], "b h l k -> b l (h k)"))

    def attend(
        self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, mask_BL: Tensor, dropout: float
    ) -> Tensor:
        """Heads in, heads out, [B, H, L, K]."""
        length, device = q_BHLK.shape[2], q_BHLK.device
        rows = min(self.block_size, length)
        num_blocks = -(-length // rows)
        has_last = num_blocks == self.num_blocks
        end_start = (num_blocks - 1) * rows if has_last else length  # where the last block begins

        position_L = torch.arange(length, device=device)
        index_M = torch.cat([position_L[:rows], position_L[max(rows, end_start) :]])
        block_G1 = torch.arange(num_blocks, device=device)[:, None]
        # Blocks that have them as neighbours read them there.
        is_far_GM = (block_G1 - index_M // rows).abs() > 1
        chosen = Chosen([mask_BL[:, None, None, None, index_M], is_far_GM[:, None]], index_M)
        near = Window([key_mask(mask_BL, rows, before=1, after=1)], 1, 1)

        # The first and the last block of the table's own are read below.
        table_HGr = F.pad(self.random_HGr, (0, 0, 1, 1))[:, :num_blocks]
        real_BGR = F.pad(mask_BL, (0, -length % rows)).unflatten(1, (num_blocks, rows))
        real_BHGJ = real_BGR[:, table_HGr.clamp(max=num_blocks - 1)].flatten(3)
        is_there_HGJ = (table_HGr < num_blocks).repeat_interleave(rows, dim=-1)
        drawn = Drawn(
            [(real_BHGJ & is_there_HGJ)[:, :, :, None]], table_HGr.clamp(max=num_blocks - 1)
        )
        return attend_pieces(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            [near, chosen, drawn],
            block_rows=rows,
            dropout=dropout,
            open_M=index_M,
            mask_BL=mask_BL,
        )


def draw_blocks(num_heads: int, num_blocks: int, last: int, num_random: int) -> Tensor:
    """For each head and each block but the first and the last, others among 1 ... last - 1.

    None is drawn twice, nor the block or its neighbours; [H, G - 2, r].

    Raises:
        ValueError: there are too few.
    """
    fewest = min(
        (last - 1 - len(range(max(1, i - 1), min(last, i + 2))) for i in range(1, num_blocks - 1)),
        default=0,
    )
    if fewest < num_random or num_blocks < 3:
        raise ValueError(
            f"model.num_random={num_random}: only {fewest} blocks of model.block_size are there to "
            f"draw from, {num_blocks} in all; choose smaller blocks or fewer of them, or a larger "
            "model.random_span"
        )
    other_G = torch.arange(num_blocks)
    may_GG = ((other_G[1:-1, None] - other_G).abs() > 1) & (other_G >= 1) & (other_G < last)
    order_HGG = torch.rand(num_heads, *may_GG.shape).masked_fill(~may_GG, -1.0)
    return order_HGG.topk(num_random, dim=-1).indices
