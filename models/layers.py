"""Parts that all encoders share: embedding with positions, feed-forward, attention, initial values.

Shapes: B batch, L length of the queries, N length of the keys, D d_model, H heads, K head dim.
`mask` is bool, True = real token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.dropout import Dropout, attend_with_dropout, has_fast_path
from models.norm import NoNorm, make_norm
from models.shape import Shape


def sinusoidal_table(
    num_rows: int, width: int, *, first_row: int = 0, sines_first: bool = False
) -> Tensor:
    """Fixed position vectors [num_rows, width] for positions first_row, first_row + 1, ...

    Computed in float64, returned in torch's default dtype. Two forms are in use:

    - interleaved (Vaswani et al. 2017; Long Range Arena): sine and cosine alternate, wave lengths
      10000^(2i / width);
    - `sines_first` (tensor2tensor, fairseq): all sines, then all cosines, wave lengths
      10000^(i / (width / 2 - 1)), and a zero column at the end when the width is odd.
    """
    position_L1 = torch.arange(first_row, first_row + num_rows, dtype=torch.float64)[:, None]
    if sines_first:
        half = width // 2
        exponent = torch.arange(half, dtype=torch.float64) / max(half - 1, 1)
        angle = position_L1 * 10000.0**-exponent
        table = torch.cat([angle.sin(), angle.cos()], dim=1)
        table = F.pad(table, (0, width - 2 * half))
    else:
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
        angle = position_L1 * 10000.0**-exponent
        table = torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)[:, :width]
    return table.to(torch.get_default_dtype())


def attend(
    q_BHLK: Tensor,
    k_BHNK: Tensor,
    v_BHNK: Tensor,
    mask_BN: Tensor | None,
    *,
    query_mask_BL: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Softmax attention, softmax(q k^T / sqrt(K)) v, in memory linear in L and N; [B, H, L, K].

    `mask_BN` says which keys may be read. A row without any readable key reads all of them, so that
    it stays finite on every backend; its result is for nobody to use. A causal row t reads keys
    0 .. t and needs no mask as long as padding stands behind the tokens. `query_mask_BL` says which
    results are of use, so that work on the others may be saved.
    """
    assert mask_BN is None or not causal
    if mask_BN is not None:
        mask_BN = mask_BN | ~mask_BN.any(dim=1, keepdim=True)
    if dropout > 0 and has_fast_path(q_BHLK):
        return attend_with_dropout(
            q_BHLK, k_BHNK, v_BHNK, mask_BN, query_mask_BL, p=dropout, causal=causal
        )
    mask_B11N = None if mask_BN is None else mask_BN[:, None, None, :]
    return F.scaled_dot_product_attention(
        q_BHLK, k_BHNK, v_BHNK, attn_mask=mask_B11N, dropout_p=dropout, is_causal=causal
    )


@dataclass(frozen=True)
class PastTokens:
    """What step-by-step attention carries: keys and values that are read again, oldest first."""

    k_BHNK: Tensor
    v_BHNK: Tensor
    num_steps: int = 0  # made so far; more than there are keys where old ones are dropped

    @classmethod
    def none(cls, like: Tensor, size: tuple[int, int, int]) -> PastTokens:
        """Before the first token; `size` is B, H, K."""
        batch_size, num_heads, head_dim = size
        empty_BH0K = like.new_zeros(batch_size, num_heads, 0, head_dim)
        return cls(empty_BH0K, empty_BH0K)

    def newest(self, count: int) -> PastTokens:
        """The last ones alone."""
        first = max(0, self.k_BHNK.shape[2] - count)
        return replace(self, k_BHNK=self.k_BHNK[:, :, first:], v_BHNK=self.v_BHNK[:, :, first:])

    def and_next(self, k_BH1K: Tensor, v_BH1K: Tensor) -> PastTokens:
        """With one more."""
        return PastTokens(
            torch.cat([self.k_BHNK, k_BH1K], dim=2),
            torch.cat([self.v_BHNK, v_BH1K], dim=2),
            self.num_steps + 1,
        )


def check_stepwise(causal: bool) -> None:
    """Refuse steps of attention that also reads later positions.

    Raises:
        ValueError: it is not causal.
    """
    if not causal:
        raise ValueError("model.causal=false: only a causal model can be run step by step")


def check_causal(shape: Shape, causal: bool) -> None:
    """Refuse causal attention where the classifier reads a position that then sees only itself.

    Raises:
        ValueError: causal with `shape.pooling` cls or first.
    """
    if causal and shape.pooling in ("cls", "first"):
        raise ValueError(
            f"model.causal=true with shape.pooling={shape.pooling}: the first position would see "
            "only itself; use shape.pooling=last, mean, max or attention"
        )


def check_directions(shape: Shape, *, bidirectional: bool, causal: bool) -> None:
    """Refuse options of a model that runs along the sequence, one way or both, that cannot be.

    Raises:
        ValueError: causal with both directions, or one direction with a `shape.pooling` that reads
            a position which then sees only itself.
    """
    if causal and bidirectional:
        raise ValueError(
            "model.causal=true with model.bidirectional=true: the second direction shows each "
            "token all later ones; set model.bidirectional=false"
        )
    check_causal(shape, causal)
    if not bidirectional and shape.pooling in ("cls", "first"):
        raise ValueError(
            f"model.bidirectional=false with shape.pooling={shape.pooling}: the first position "
            "would see only itself; use shape.pooling=last, mean, max or attention, or both "
            "directions"
        )


class StackedLinear(nn.Linear):
    """`parts` linear maps of the same input in one product: [..., D] -> [..., parts * width]."""

    def __init__(self, in_features: int, width: int, *, parts: int, bias: bool = True) -> None:
        super().__init__(in_features, parts * width, bias=bias)
        self.parts = parts


class FeedForward(nn.Module):
    """Two linear maps with an activation between them, D -> d_ff -> D."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner_dropout = shape.activation_dropout
        self.up = nn.Linear(shape.d_model, shape.d_ff)
        self.activation = nn.ReLU() if shape.activation == "relu" else nn.GELU()  # exact, with erf
        self.inner_dropout = Dropout(shape.dropout if inner_dropout is None else inner_dropout)
        self.down = nn.Linear(shape.d_ff, shape.d_model)
        self.dropout = Dropout(shape.dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Same map at every position; [B, L, D]."""
        return self.dropout(self.down(self.inner_dropout(self.activation(self.up(x_BLD)))))


class RealInput(nn.Module):
    """Pixels as numbers: ids 1 .. 256 are values 0 .. 255, scaled and shifted, in a linear map.

    What the state-space papers and Mega feed to their models. The scale comes from the vocabulary,
    so that the largest id is 1.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.vocab_size < 3:
            raise ValueError(
                f"shape.input=real: needs at least two values, here {shape.vocab_size - 1}"
            )
        self.largest = shape.vocab_size - 2  # as a value, one less than the id
        self.mean, self.std = shape.input_mean, shape.input_std
        self.weight = nn.Parameter(torch.empty(shape.d_model))
        self.bias = nn.Parameter(torch.empty(shape.d_model))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """[B, L, D]. At padding stands a number like any other, which the mask hides."""
        value_BL = (tokens_BL - 1).to(self.weight.dtype) / self.largest
        return ((value_BL - self.mean) / self.std)[..., None] * self.weight + self.bias


class Embedding(nn.Module):
    """Token ids to vectors: [class token, ] token and position, then norm and dropout.

    With `shape.pooling="cls"` a learned vector stands in front of the tokens and takes the first
    position, so the result has one row more than the input.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.max_length, self.d_model = shape.max_length, shape.d_model
        self.mask_id = shape.vocab_size
        self.scale = math.sqrt(shape.d_model) if shape.embedding_scale else 1.0
        self.tokens: RealInput | nn.Embedding = (
            RealInput(shape)
            if shape.input == "real"
            else nn.Embedding(shape.vocab_size, shape.d_model)
        )
        self.class_token = (
            nn.Parameter(torch.empty(shape.d_model)) if shape.pooling == "cls" else None
        )
        num_rows = shape.max_length + (shape.pooling == "cls")
        self.positions: Tensor | None
        if shape.positions == "learned":
            self.positions = nn.Parameter(torch.empty(num_rows, shape.d_model))
        elif shape.positions == "sinusoidal":
            table = sinusoidal_table(num_rows, shape.d_model)
            self.register_buffer("positions", table, persistent=False)
        else:
            self.positions = None
        self.norm = make_norm(shape) if shape.embedding_norm else NoNorm()
        self.mask_symbol: nn.Parameter | None = None
        own_rate = shape.embedding_dropout
        self.dropout = Dropout(shape.dropout if own_rate is None else own_rate)

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor, first: int = 0) -> Tensor:
        """Embed ids; [B, L, D], or [B, L + 1, D] with a class token. The mask is of these rows.

        Args:
            first: position of the first one.

        Raises:
            ValueError: the input is longer than `shape.max_length`.
        """
        length = first + tokens_BL.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"input of {length} tokens, but the model was built for shape.max_length="
                f"{self.max_length}; build it with the task's own length or cut the input"
            )
        x_BLD = self._look_up(tokens_BL)
        if self.class_token is not None:
            class_B1D = self.class_token.expand(len(x_BLD), 1, -1)
            x_BLD = torch.cat([class_B1D, x_BLD], dim=1)
        if self.scale != 1.0:
            x_BLD = x_BLD * self.scale
        if self.positions is not None:
            x_BLD = x_BLD + self.positions[first : first + x_BLD.shape[1]]
        return self.dropout(self.norm(x_BLD, mask_BL))

    def add_mask_symbol(self) -> None:
        """From now on id `shape.vocab_size` is a mask symbol with a vector of its own.

        Where pixels are numbers, it stands in place of the number: the weight of a second input
        that says which pixels are hidden, whose own value is then 0.
        """
        self.mask_symbol = nn.Parameter(self.tokens.weight.detach().new_empty(self.d_model))
        nn.init.normal_(self.mask_symbol, std=float(self.tokens.weight.detach().std()))

    def _look_up(self, tokens_BL: Tensor) -> Tensor:
        if self.mask_symbol is None:
            return self.tokens(tokens_BL)
        is_hidden_BL = tokens_BL == self.mask_id
        x_BLD = self.tokens(tokens_BL.masked_fill(is_hidden_BL, 0))
        hidden_D: Tensor = self.mask_symbol
        if isinstance(self.tokens, RealInput):
            hidden_D = hidden_D + self.tokens.bias
        return torch.where(is_hidden_BL[..., None], hidden_D, x_BLD)


@torch.no_grad()
def initialise(module: nn.Module, init: str) -> None:
    """Draw the initial values of all linear maps and embeddings inside `module` in place.

    - torch: linear maps as PyTorch draws them, embedding tables N(0, 0.02^2) (mlpen/Nystromformer);
    - bert: linear maps and embedding tables N(0, 0.02^2), biases 0;
    - lra: token embeddings N(0, 1), Xavier-uniform kernels, biases N(0, 1e-12), class token 0
      (google-research/long-range-arena);
    - s4: linear maps as PyTorch draws them, embedding tables N(0, 1) (state-spaces/s4);
    - flax: LeCun-normal kernels, the table's too, as the map of one-hot rows that it is, biases 0
      (S5, minimal-LRU);
    - mega: linear maps N(0, 0.02^2), biases 0, embedding tables N(0, 1 / D), and the classifier
      is `xavier`: Xavier-uniform kernels, biases 0 (facebookresearch/mega).

    Learned positions are N(0, 0.02^2) in all of them.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear) and init not in ("torch", "s4"):
            if init in ("lra", "xavier"):
                # Each stacked map has the range of a map of its own.
                for weight in part.weight.chunk(getattr(part, "parts", 1)):
                    nn.init.xavier_uniform_(weight)
            elif init == "flax":
                lecun_normal_(part.weight, part.in_features)
            else:
                nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None and init == "lra":
                nn.init.normal_(part.bias, std=1e-6)
            elif part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding) and init == "flax":
            lecun_normal_(part.weight, part.num_embeddings)
        elif isinstance(part, nn.Embedding):
            std = {"lra": 1.0, "s4": 1.0, "mega": part.embedding_dim**-0.5}.get(init, 0.02)
            nn.init.normal_(part.weight, std=std)
        elif isinstance(part, RealInput) and init == "flax":  # a linear map of one feature
            lecun_normal_(part.weight, 1)
            nn.init.zeros_(part.bias)
        elif isinstance(part, RealInput) and init == "mega":
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias, std=0.1)
        elif isinstance(part, RealInput):  # as PyTorch draws a linear map of one feature
            nn.init.uniform_(part.weight, -1.0, 1.0)
            nn.init.uniform_(part.bias, -1.0, 1.0)
        elif isinstance(part, Embedding):
            if isinstance(part.positions, nn.Parameter):
                nn.init.normal_(part.positions, std=0.02)
            if part.class_token is not None:
                nn.init.normal_(part.class_token, std=0.0 if init == "lra" else 0.02)


def lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """Normal numbers of variance 1 / fan_in, cut at two standard deviations, as Flax draws them."""
    # The standard deviation of a standard normal number that is cut there.
    std = fan_in**-0.5 / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
