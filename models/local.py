"""Local attention: every token reads those near it, in a sliding window or in blocks, O(L).

Source: the local attention of Long Range Arena, https://arxiv.org/abs/2011.04006, section 3.2, in
plain form, and the sliding window of Longformer, https://arxiv.org/abs/2004.05150, section 3.1.
Pattern `strided` is what the arena's code computes, https://github.com/google-research/
long-range-arena.
Shapes: B batch, L length, D d_model, H heads, K head dim; G blocks, R rows of a block.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.layers import PastTokens, StackedLinear, attend, check_causal, check_stepwise
from models.patterns import attend_pieces
from models.pieces import Window, distance_mask, key_mask, near_keys
from models.positions import Rotary
from models.shape import Shape

Pattern = Literal["window", "blocks", "strided"]


class LocalAttention(nn.Module):
    """Softmax attention of each position to near ones.

    Patterns:

    - window: `window` positions, (window - 1) // 2 before, the position itself, window // 2 behind;
    - blocks: the positions of the same block, of `block_size`, counted from the first;
    - strided: the published Local row of the arena (its Table 1) is of this one, faults and all.
      The longest input, with at least one position more, is cut into n blocks; block k holds the
      positions k, k + n, k + 2n, ..., so that blocks are not local. What is behind the longest
      input counts as a real key of zeros. Which rows of a block count as padding is read from the
      mask as if blocks held n positions in a row: padding is read, real keys are missed, and a row
      taken for padding reads its block evenly.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here.
        pattern: which positions.
        window: keys of a position, pattern window.
        block_size: positions of a block, patterns blocks and strided.
        causal: of these keys only those that come no later than the position itself.

    Raises:
        ValueError: an option is out of range or does not act, causal attention is asked for with a
            pooling that reads the first position, or with pattern strided, or that pattern with
            rotary positions.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        pattern: Pattern = "window",
        window: int = 64,
        block_size: int = 64,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if pattern not in get_args(Pattern):
            raise ValueError(
                f"model.pattern={pattern!r}: expected one of {', '.join(get_args(Pattern))}"
            )
        if window < 2:
            raise ValueError(f"model.window={window}: expected at least 2")
        if window != 64 and pattern != "window":
            raise ValueError(f"model.window={window}: acts only with model.pattern=window")
        if block_size < 2:
            raise ValueError(f"model.block_size={block_size}: expected at least 2")
        if causal and pattern == "strided":
            raise ValueError(
                "model.causal=true with model.pattern=strided: its blocks mix what comes early and "
                "late; use model.pattern=window or blocks"
            )
        if shape.is_rotary and pattern == "strided":
            raise ValueError(
                f"shape.positions={shape.positions} with model.pattern=strided, which is the "
                "arena's own code: use model.pattern=window or blocks, or shape.positions=learned, "
                "sinusoidal or none"
            )
        check_causal(shape, causal)
        self.num_heads, self.head_dim = shape.num_heads, shape.attention_head_dim
        self.dropout = shape.attention_dropout
        self.pattern: Pattern = pattern
        self.window = window
        self.block_size = block_size
        self.causal = causal
        longest = shape.max_length + (shape.pooling == "cls")
        self.num_strided = longest // block_size + 1  # blocks of the longest input and one more row
        self.longest = longest
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)

    @property
    def reach(self) -> int | None:
        """Largest distance between a position and one that it reads; None: any."""
        if self.pattern == "strided":
            return None
        if self.pattern == "blocks":
            return self.block_size - 1
        return (self.window - 1) // 2 if self.causal else self.window // 2

    @property
    def stride(self) -> int:
        """Distance between a position and the nearest other that it reads."""
        return self.num_strided if self.pattern == "strided" else 1

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody, but for pattern strided. [B, L, D]."""
        length = x_BLD.shape[1]
        if self.pattern == "strided":
            x_BLD, mask_BL = self._deal(x_BLD, mask_BL)
        q_BHLK, k_BHLK, v_BHLK = self.rotary.heads(self.qkv(x_BLD), self.num_heads)
        y_BLD = self.out(
            rearrange(self.attend(q_BHLK, k_BHLK, v_BHLK, mask_BL), "b h l k -> b l (h k)")
        )
        if self.pattern == "strided":
            y_BLD = rearrange(y_BLD, "b (g r) d -> b (r g) d", g=self.num_strided)[:, :length]
        return y_BLD

    def attend(self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
        """Heads in, heads out, [B, H, L, K]; of pattern strided in the order of its blocks."""
        if self.pattern == "window":
            back, ahead = (self.window - 1) // 2, 0 if self.causal else self.window // 2
            piece, rows = near_keys(mask_BL, back=back, ahead=ahead)
        else:
            rows = min(self.block_size, mask_BL.shape[1])
            allowed = [key_mask(mask_BL, rows)]
            if self.pattern == "strided":  # queries that count as padding read evenly
                allowed = [allowed[0] & allowed[0].mT]
            elif self.causal:
                allowed += [distance_mask(rows, q_BHLK.device, back=rows, ahead=0)]
            piece = Window(allowed)
        return attend_pieces(
            q_BHLK,
            k_BHLK,
            v_BHLK,
            [piece],
            block_rows=rows,
            dropout=self.dropout if self.training else 0.0,
        )

    def start(self, batch_size: int) -> PastTokens:
        """State before the first position; bounded by the window or the block.

        Raises:
            ValueError: the model is not causal.
        """
        check_stepwise(self.causal)
        size = (batch_size, self.num_heads, self.head_dim)
        return PastTokens.none(self.qkv.weight, size)

    def step(self, x_B1D: Tensor, past: PastTokens) -> tuple[Tensor, PastTokens]:
        """The next position alone; [B, 1, D] and the state after it."""
        q_BH1K, k_BH1K, v_BH1K = self.rotary.heads(
            self.qkv(x_B1D), self.num_heads, first=past.num_steps
        )
        if self.pattern == "window":
            past = past.newest((self.window - 1) // 2)
        elif past.k_BHNK.shape[2] == self.block_size:  # full: a new block begins
            past = past.newest(0)
        past = past.and_next(k_BH1K, v_BH1K)
        dropout = self.dropout if self.training else 0.0
        y_BH1K = attend(q_BH1K, past.k_BHNK, past.v_BHNK, None, dropout=dropout)
        return self.out(rearrange(y_BH1K, "b h l k -> b l (h k)")), past

    def _deal(self, x_BLD: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Fill up, then the tokens block by block; the mask stays in its order."""
        filled = self.num_strided * self.block_size
        x_BLD = F.pad(x_BLD, (0, 0, 0, filled - x_BLD.shape[1]))
        mask_BL = F.pad(mask_BL, (0, self.longest - mask_BL.shape[1]))
        mask_BL = F.pad(mask_BL, (0, filled - self.longest), value=True)
        return rearrange(x_BLD, "b (r g) d -> b (g r) d", g=self.num_strided), mask_BL
