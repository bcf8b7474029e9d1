"""Sizes and layout that all models of one comparison share; free of torch, so it loads fast."""

from __future__ import annotations

import difflib
import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

Pooling = Literal["mean", "padded_mean", "cls", "first", "last", "max", "attention"]
Positions = Literal["learned", "sinusoidal", "none", "rotary", "rotary_2d"]  # 2d: of pixels


def check_positive(key: str, value: float) -> None:
    """Refuse a number that is not above 0, or that float32 holds as 0 or as infinity.

    Raises:
        ValueError: names the key.
    """
    if not 2.0**-126 <= value < 2.0**128:
        raise ValueError(f"{key}={value}: expected more than 0, from 1.2e-38 to 3.4e38 (float32)")


@dataclass(frozen=True)
class Shape:
    """The architecture around a mixer: the task gives its ids and length, a recipe the rest.

    Raises:
        ValueError: a value is none of the choices, a size not positive, a rate outside [0, 1), or
            heads do not divide the width.
    """

    vocab_size: int  # ids 0 .. vocab_size - 1; 0 is padding
    max_length: int  # longest sequence in tokens, without the class token
    d_model: int = 64  # width of the model
    d_ff: int = 128  # width of the feed-forward
    num_layers: int = 2  # mixer and feed-forward count as one
    num_heads: int = 2  # of the attention
    head_dim: int | None = None  # None: d_model / num_heads
    dropout: float = 0.1  # rate, on embeddings and on what each layer adds
    attention_dropout: float = 0.1  # rate, on attention weights
    activation_dropout: float | None = None  # inside the feed-forward; None: as dropout
    activation: Literal["gelu", "relu"] = "gelu"  # of the feed-forward
    norm: Literal["pre", "post"] = "pre"  # normalise before or behind each part of a layer
    norm_kind: Literal["layer", "batch", "scale", "rms"] = "layer"  # batch: over real tokens
    norm_momentum: float = 0.1  # of running statistics, norm_kind=batch: share of the newest batch
    positions: Positions = "learned"  # rotary ones turn queries and keys, the others are added
    rotary_theta: float = 10000.0  # positions=rotary: the larger, the slower the slowest angle
    input: Literal["ids", "real"] = "ids"  # real: a pixel is a number, in a linear map, not an id
    input_mean: float = 0.0  # input=real: taken from pixels in [0, 1]
    input_std: float = 1.0  # input=real: then they are divided by it
    embedding_norm: bool = False  # norm on token + position
    embedding_dropout: float | None = None  # on embeddings; None: as dropout
    embedding_scale: bool = False  # token embeddings times sqrt(d_model)
    attention_bias: bool = True  # bias in the linear maps of the mixer
    tie_layers: bool = False  # one block applied num_layers times
    init: Literal["torch", "bert", "lra", "s4", "flax", "mega"] = "torch"  # how weights are drawn
    pooling: Pooling = "mean"  # over real tokens; padded_mean: divided by all
    head_hidden: tuple[int, ...] = (128,)  # widths of the classifier's hidden layers
    head_activation: Literal["relu", "gelu", "gelu_tanh"] = "relu"  # of these hidden layers
    head_dropout: float = 0.0  # rate, inside the classifier, before its activations
    head_bias: bool = True  # bias of the classifier's last layer
    pair_features: Literal["four", "concat"] = "four"  # u, v, u*v, u-v or u, v
    picture_width: int | None = None  # of a task whose values are pixels, row by row

    def __post_init__(self) -> None:
        for name, choices in _choices().items():
            if (value := getattr(self, name)) not in choices:
                close = difflib.get_close_matches(str(value), choices, n=1)
                hint = f"did you mean '{close[0]}'? " if close else ""
                raise ValueError(
                    f"shape.{name}={value!r}: not a choice; {hint}known: {', '.join(choices)}"
                )
        for name in ("vocab_size", "max_length", "d_model", "d_ff", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"shape.{name}={getattr(self, name)}: expected at least 1")
        rates = ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")
        for name in (*rates, "head_dropout"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(f"shape.{name}={getattr(self, name)}: expected 0 <= {name} < 1")
        if not 0 < self.norm_momentum <= 1:
            raise ValueError(f"shape.norm_momentum={self.norm_momentum}: expected 0 < share <= 1")
        if not math.isfinite(self.input_mean):
            raise ValueError(f"shape.input_mean={self.input_mean}: expected a number")
        check_positive("shape.input_std", self.input_std)
        if any(width < 1 for width in self.head_hidden):
            raise ValueError(
                f"shape.head_hidden={list(self.head_hidden)}: expected widths of at least 1"
            )
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"shape.num_heads={self.num_heads} does not divide shape.d_model={self.d_model}; "
                "choose a divisor or set shape.head_dim"
            )
        if self.head_dim is not None and self.head_dim < 1:
            raise ValueError(f"shape.head_dim={self.head_dim}: expected at least 1")
        if not 0 < self.rotary_theta < math.inf:
            raise ValueError(f"shape.rotary_theta={self.rotary_theta}: expected a number above 0")
        multiple = {"rotary": 2, "rotary_2d": 4}.get(self.positions, 1)
        if self.attention_head_dim % multiple:
            raise ValueError(
                f"shape.positions={self.positions}: heads are {self.attention_head_dim} wide, "
                f"expected a multiple of {multiple}; set shape.head_dim or shape.num_heads"
            )

    @property
    def is_rotary(self) -> bool:
        """Whether positions turn queries and keys."""
        return self.positions in ("rotary", "rotary_2d")

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Of each key that takes one of a few words, these."""
    hints = get_type_hints(Shape)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
