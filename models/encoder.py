"""Encoder: embed, N blocks of (mixer, feed-forward), final norm; models differ in the mixer.

A mixer is an `nn.Module` built as `FooMixer(shape, *, own_knob)` with
`forward(x_BLD, mask_BL) -> x_BLD`; attention dropout is its own, residual dropout the block's. One
that can go from token to token also has `start(batch_size) -> state` and
`step(x_B1D, state) -> (x_B1D, state)`; one that reads so far and no further, `reach`, in positions,
and one that reads none of its neighbours, `stride`, how far off the nearest is that it does read.

Shapes: B batch, L length, D d_model. `mask` is bool, True = real token.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.dropout import Dropout, TiedDropout
from models.layers import Embedding, FeedForward, initialise
from models.norm import NoNorm, frozen_statistics, make_norm
from models.positions import Rotary
from models.shape import Shape

# Models that go from token to token if they are causal.
STEPWISE = ("softmax", "luna", "s4d", "lru", "s5", "mega", "linear", "performer", "local")


class Block(nn.Module):
    """One layer: mixer and feed-forward, each with a residual connection and a norm.

    Pre-norm (`shape.norm="pre"`): x + f(norm(x)). Post-norm: norm(x + f(x)).
    """

    def __init__(self, shape: Shape, mixer: nn.Module) -> None:
        super().__init__()
        self.pre_norm = shape.norm == "pre"
        self.norm1 = make_norm(shape)
        self.mixer: Any = mixer  # not every one has steps
        self.dropout = Dropout(shape.dropout)
        self.norm2 = make_norm(shape)
        self.ffn = FeedForward(shape)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix over positions, then transform each position; [B, L, D]."""
        x_BLD = x_BLD + self.dropout(self.mixer(self._mixer_input(x_BLD, mask_BL), mask_BL))
        return self._finish(x_BLD, mask_BL)

    def start(self, batch_size: int) -> Any:
        """State before the first position, for `step`; the mixer's."""
        return self.mixer.start(batch_size)

    def step(self, x_B1D: Tensor, mask_B1: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The next position alone; [B, 1, D] and the state after it."""
        mixed_B1D, state = self.mixer.step(self._mixer_input(x_B1D, mask_B1), state)
        return self._finish(x_B1D + self.dropout(mixed_B1D), mask_B1), state

    def _mixer_input(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        return self.norm1(x_BLD, mask_BL) if self.pre_norm else x_BLD

    def _finish(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """What follows the residual connection around the mixer."""
        if self.pre_norm:
            return x_BLD + self.ffn(self.norm2(x_BLD, mask_BL))
        x_BLD = self.norm1(x_BLD, mask_BL)
        return self.norm2(x_BLD + self.ffn(x_BLD), mask_BL)


class MixerBlock(nn.Module):
    """One layer that is the mixer alone, with a residual connection and a norm: no feed-forward.

    Args:
        shape: `norm`, `norm_kind` and `dropout` are read here.
        mixer: of the layer.
        tie_dropout: one dropout mask for all positions of a sequence.
    """

    def __init__(self, shape: Shape, mixer: nn.Module, *, tie_dropout: bool) -> None:
        super().__init__()
        self.pre_norm = shape.norm == "pre"
        self.norm = make_norm(shape)
        self.mixer: Any = mixer  # not every one has steps
        self.dropout = (TiedDropout if tie_dropout else Dropout)(shape.dropout)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """x + mixer(norm(x)), or norm(x + mixer(x)); [B, L, D]."""
        if self.pre_norm:
            return x_BLD + self.dropout(self.mixer(self.norm(x_BLD, mask_BL), mask_BL))
        return self.norm(x_BLD + self.dropout(self.mixer(x_BLD, mask_BL)), mask_BL)

    def start(self, batch_size: int) -> Any:
        """State before the first position, for `step`; the mixer's."""
        return self.mixer.start(batch_size)

    def step(self, x_B1D: Tensor, mask_B1: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The next position alone; [B, 1, D] and the state after it."""
        inner_B1D = self.norm(x_B1D, mask_B1) if self.pre_norm else x_B1D
        mixed_B1D, state = self.mixer.step(inner_B1D, state)
        x_B1D = x_B1D + self.dropout(mixed_B1D)
        return x_B1D if self.pre_norm else self.norm(x_B1D, mask_B1), state


@dataclass(frozen=True)
class EncoderState:
    """What an encoder carries from token to token."""

    layers: tuple[Any, ...]  # the state of each layer, in the order of their use
    position: int  # of the next token, from 0


class Encoder(nn.Module):
    """Token ids to one vector for each position.

    Args:
        shape: sizes and layout.
        mixer: makes one mixer; called once for each layer, or once in all with `shape.tie_layers`.
        block: makes a layer from `shape` and a mixer, for models whose layers differ in more.

    Raises:
        ValueError: `shape.positions` are rotary, and a layer does not turn by them.
    """

    def __init__(
        self,
        shape: Shape,
        mixer: Callable[[], nn.Module],
        block: Callable[[Shape, nn.Module], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape)
        num_blocks = 1 if shape.tie_layers else shape.num_layers
        self.blocks = nn.ModuleList(block(shape, mixer()) for _ in range(num_blocks))
        for layer in self.blocks if shape.is_rotary else ():
            if not any(isinstance(part, Rotary) for part in layer.modules()):
                name = type(getattr(layer, "mixer", layer)).__name__
                raise ValueError(
                    f"shape.positions={shape.positions}: {name} turns no queries and keys by their "
                    "positions; expected learned, sinusoidal or none"
                )
        self.norm = make_norm(shape) if shape.norm == "pre" else NoNorm()
        self.uses_all = True  # False: some parameters take no part in what `forward` returns
        self.rows_are_tokens = True  # False: rows that `forward` returns stand for other things
        self.checkpoint_layers = False  # in training, recompute each layer instead of keeping it
        initialise(self, shape.init)

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Encode; [B, L, D], with the class token first, [B, L + 1, D], for `shape.pooling="cls"`.

        `output_mask` tells which rows are real. Rows at padding hold numbers without meaning.

        Raises:
            ValueError: the input is longer than `shape.max_length`.
        """
        mask_BL = self.output_mask(mask_BL)
        x_BLD = self.embedding(tokens_BL, mask_BL)
        for block in self.layers():
            x_BLD = self.apply_layer(block, x_BLD, mask_BL)
        return self.norm(x_BLD, mask_BL)

    def start(self, batch_size: int) -> EncoderState:
        """State before the first token, for `step`.

        Raises:
            ValueError: the model cannot go from token to token.
        """
        for block in self.blocks:
            if not hasattr(block.mixer, "step"):
                raise ValueError(
                    f"{type(block.mixer).__name__} cannot go from token to token; with "
                    f"model.causal=true these models can: {', '.join(STEPWISE)}"
                )
        assert self.shape.pooling != "cls"  # a causal model refuses to stand behind it
        return EncoderState(tuple(self.start_layers(batch_size)), position=0)

    def step(self, tokens_B1: Tensor, state: EncoderState) -> tuple[Tensor, EncoderState]:
        """The next token alone: what `forward` gives at it, [B, 1, D], and the state after it.

        Raises:
            ValueError: there have been `shape.max_length` tokens.
        """
        mask_B1 = torch.ones_like(tokens_B1, dtype=torch.bool)
        x_B1D = self.embedding(tokens_B1, mask_B1, first=state.position)
        layers = []
        for block, carried in zip(self.layers(), state.layers, strict=True):
            x_B1D, carried = block.step(x_B1D, mask_B1, carried)
            layers.append(carried)
        return self.norm(x_B1D, mask_B1), EncoderState(tuple(layers), state.position + 1)

    def start_layers(self, batch_size: int) -> list[Any]:
        """The states of all layers before the first token; a tied layer has several."""
        return [block.start(batch_size) for block in self.layers()]

    def apply_layer(self, block: nn.Module, *tensors: Tensor) -> Any:
        """`block(*tensors)`; with `checkpoint_layers` its activations live only in the backward."""
        if self.checkpoint_layers and self.training:
            return checkpoint(
                block, *tensors, use_reentrant=False,
                context_fn=lambda: (contextlib.nullcontext(), frozen_statistics(block)),
            )  # fmt: skip
        return block(*tensors)

    def output_mask(self, mask_BL: Tensor) -> Tensor:
        """Mask of the rows that `forward` returns: with a class token, one True in front."""
        return F.pad(mask_BL, (1, 0), value=True) if self.shape.pooling == "cls" else mask_BL

    @property
    def reach(self) -> list[int] | None:
        """Positions to either side that each layer reads at most; None where one may read all.

        No output depends on tokens further away than their sum.
        """
        mixers = [getattr(block, "mixer", block) for block in self.layers()]
        reaches: list[Any] = [getattr(mixer, "reach", None) for mixer in mixers]
        return None if None in reaches else reaches

    @property
    def stride(self) -> int:
        """Length of the longest step between positions that a layer reads; of most models 1.

        An input of fewer positions does not show all that such a layer reads.
        """
        return max(getattr(getattr(block, "mixer", block), "stride", 1) for block in self.layers())

    def layers(self) -> list[Any]:
        """The blocks in the order of their use; the same one again when layers are tied."""
        return [self.blocks[i % len(self.blocks)] for i in range(self.shape.num_layers)]


def make_encoder(target: Callable[..., nn.Module], shape: Shape, **knobs: Any) -> Encoder:
    """Build the encoder of a model: `target` is a mixer class or, if it is one, an `Encoder` class.

    Raises:
        ValueError: a knob is not an argument of `target`, or `target` refuses its value.
    """
    allowed = [
        name
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in knobs:
        if name not in allowed:
            raise ValueError(
                f"model.{name}: {getattr(target, '__name__', target)} has no such option; "
                f"it has {', '.join(allowed) or 'none'}"
            )
    make: Callable[..., nn.Module] = target
    if isinstance(target, type) and issubclass(target, Encoder):
        return target(shape, **knobs)
    return Encoder(shape, lambda: make(shape, **knobs))
