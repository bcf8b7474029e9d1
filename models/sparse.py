"""Sparse Transformer attention: each position reads some of the past, by a fixed or strided rule.

Source: Child et al. 2019, https://arxiv.org/abs/1904.10509, section 4; all heads read the union of
both parts of a pattern, as in Long Range Arena's code. Work grows as L (S + L / S) for blocks of S.
Shapes: B batch, L length, D d_model, H heads, K head dim; G blocks, R rows of a block, M summary
positions.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.layers import StackedLinear, check_causal
from models.patterns import attend_pieces
from models.pieces import Chosen, Column, Piece, Window, distance_mask, key_mask
from models.positions import Rotary
from models.shape import Shape

Pattern = Literal["fixed", "strided"]


class SparseAttention(nn.Module):
    """Softmax attention of position i to these j <= i, counted from 0, with S = `block_size`.

    - fixed: those of the same block, and of all blocks the last `num_summary` and the first, which
      the arena's code adds;
    - strided: those with i - j < S, and those with i - j a multiple of S.

    So no position sees a later one, but for the pooled one where it stands first: with
    `shape.pooling` cls or first, position 0 sees all and all see it, and the pattern counts from
    position 1, as in the arena's code.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here.
        pattern: which positions.
        block_size: S.
        num_summary: positions at the end of a block that all later blocks read, pattern fixed.
        causal: refuse a shape whose first position would see later ones.

    Raises:
        ValueError: an option is out of range, or causal attention is asked for with a pooling that
            reads the first position.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pattern: Pattern = "fixed",
        block_size: int = 64,
        num_summary: int = 4,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if pattern not in get_args(Pattern):
            raise ValueError(
                f"model.pattern={pattern!r}: expected one of {', '.join(get_args(Pattern))}"
            )
        if block_size < 2:
            raise ValueError(f"model.block_size={block_size}: expected at least 2")
        if not 1 <= num_summary < block_size:
            raise ValueError(
                f"model.num_summary={num_summary}: expected at least 1 and less than "
                f"model.block_size={block_size}"
            )
        check_causal(shape, causal)
        self.num_heads = shape.num_heads
        self.dropout = shape.attention_dropout
        self.pattern: Pattern = pattern
        self.block_size = block_size
        self.num_summary = num_summary
        self.opens_first = shape.pooling in ("cls", "first")
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        q_BHLK, k_BHLK, v_BHLK = self.rotary.heads(self.qkv(x_BLD), self.num_heads)
        rate = self.dropout if self.training else 0.0
        rows = min(self.block_size, max(1, x_BLD.shape[1] - int(self.opens_first)))
        # The opened position becomes the last row of a block of its own, in front of the others.
        front = rows - 1 if self.opens_first else 0
        y_BHLK = attend_pieces(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            self.pieces(mask_BL, rows, front),
            block_rows=rows,
            front=front,
            dropout=rate,
            open_M=mask_BL.new_zeros(1, dtype=torch.long) if self.opens_first else None,
            mask_BL=mask_BL,
        )
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)"))

    def pieces(self, mask_BL: Tensor, rows: int, front: int) -> list[Piece]:
        """What the blocks of `rows` read, which lie behind `front` rows of zeros."""
        device, first = mask_BL.device, int(self.opens_first)
        # The opened position is a key apart.
        mask_BP = F.pad(mask_BL[:, first:], (front + first, 0))
        mask_BP = F.pad(mask_BP, (0, -mask_BP.shape[1] % rows))
        num_blocks = mask_BP.shape[1] // rows
        block_G = torch.arange(num_blocks, device=device)
        pieces: list[Piece] = []
        if self.opens_first:
            allowed_B1111 = mask_BL[:, None, None, None, :1]
            index_M = mask_BL.new_full((1,), front, dtype=torch.long)  # made on the device itself
            pieces.append(Chosen([allowed_B1111], index_M))
        if self.pattern == "fixed":
            pieces.append(
                Window([distance_mask(rows, device, back=rows, ahead=0), key_mask(mask_BP, rows)])
            )
            row_R = torch.arange(rows, device=device)
            summary_S = torch.cat([row_R[:1], row_R[rows - self.num_summary :]])
            index_M = (block_G[first:-1, None] * rows + summary_S).flatten()
            is_past_GM = index_M // rows < block_G[:, None]
            allowed = [mask_BP[:, None, None, None, index_M], is_past_GM[:, None]]
            ends = [max(0, g - first) * len(summary_S) for g in range(num_blocks)]
            pieces.append(Chosen(allowed, index_M, ends))
        else:
            near = distance_mask(rows, device, back=rows - 1, ahead=0, before=1)
            pieces.append(Window([near, key_mask(mask_BP, rows, before=1)], before=1))
            # A row's distance to itself is a multiple too, but the window has it.
            is_past_G1G = (block_G < block_G[:, None])[:, None]
            real_BRG = mask_BP.unflatten(1, (num_blocks, rows)).mT
            pieces.append(Column([is_past_G1G, real_BRG[:, None, None]]))
        return pieces
