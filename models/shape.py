"""Sizes and layout that all models of one comparison share; free of torch, so it loads fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pooling = Literal["mean", "padded_mean", "cls", "first", "max", "attention"]


@dataclass(frozen=True)
class Shape:
    """The architecture around a mixer: the task gives its ids and length, a recipe the rest.

    Raises:
        ValueError: a size is not positive, a rate outside [0, 1), or heads do not divide the width.
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
    activation: Literal["gelu", "relu"] = "gelu"  # of feed-forward and classifier
    norm: Literal["pre", "post"] = "pre"  # LayerNorm before or behind each part of a layer
    positions: Literal["learned", "sinusoidal", "none"] = "learned"  # added to the tokens
    embedding_norm: bool = False  # LayerNorm on token + position
    embedding_scale: bool = False  # token embeddings times sqrt(d_model)
    attention_bias: bool = True  # bias in the linear maps of the mixer
    tie_layers: bool = False  # one block applied num_layers times
    init: Literal["torch", "bert", "lra"] = "torch"  # how first weights are drawn
    pooling: Pooling = "mean"  # over real tokens; padded_mean: divided by all
    head_hidden: tuple[int, ...] = (128,)  # widths of the classifier's hidden layers
    head_bias: bool = True  # bias of the classifier's last layer
    pair_features: Literal["four", "concat"] = "four"  # u, v, u*v, u-v or u, v

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_length", "d_model", "d_ff", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"shape.{name}={getattr(self, name)}: expected at least 1")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(f"shape.{name}={getattr(self, name)}: expected 0 <= {name} < 1")
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

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim
