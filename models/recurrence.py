"""Diagonal linear recurrences, h_t = decay h_{t-1} + u_t: the scan and the layers built around it.

LRU and S5 differ in how decay and input map come from their parameters; all else is here. Complex
numbers are stored as two planes, real and imaginary parts, on a first axis of 2.

Shapes: B batch, L length, R = B L rows, D d_model, N complex states, P = 2 N planes of states, real
parts first, G chunks of S positions in all rows. `mask` is bool, True = real token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.dropout import Dropout
from models.encoder import Block, Encoder
from models.layers import StackedLinear, check_causal
from models.norm import BatchNorm, NoNorm, RMSNorm, ScaleNorm, make_norm
from models.shape import Shape

CHUNK_LENGTH = 32  # of the scan: work per position grows with it, the number of passes shrinks
Gate = Literal["full_glu", "half_glu1", "half_glu2", "gelu"]


def scan(u_2NBL: Tensor, decay_N: Tensor, *, reverse: bool = False) -> Tensor:
    """h_t = decay h_{t-1} + u_t from h_{-1} = 0, or h_t = decay h_{t+1} + u_t; [2, N, B, L].

    `decay_N` is complex, best complex128 whatever the dtype of u, which is computed in float32 or
    wider. Only h is kept for the gradient, so memory and work are linear in L.
    """
    dtype = torch.promote_types(u_2NBL.dtype, torch.float32)
    h_2NBL: Tensor = _Scan.apply(u_2NBL.to(dtype), decay_N, reverse)
    return h_2NBL


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u_2NBL: Tensor, decay_N: Tensor, reverse: bool) -> Tensor:
        h_2NBL = _scan(u_2NBL, decay_N, reverse)
        ctx.save_for_backward(h_2NBL, decay_N)
        ctx.reverse = reverse
        return h_2NBL

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_2NBL: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        h_2NBL, decay_N = ctx.saved_tensors
        # What h_t gives to the loss itself and by way of all later states is again such a sum.
        du_2NBL = _scan(dh_2NBL, decay_N.conj(), not ctx.reverse)
        if not ctx.needs_input_grad[1]:
            return du_2NBL, None, None
        before, after = slice(None, -1), slice(1, None)
        if ctx.reverse:
            before, after = after, before
        with torch.autocast(dh_2NBL.device.type, enabled=False):
            # Sum of conj(h_{t-1}) du_t, by planes: rows of h, columns of du.
            product_N22 = (
                h_2NBL[..., before].permute(1, 2, 0, 3) @ du_2NBL[..., after].permute(1, 2, 3, 0)
            ).sum(dim=1)
        ddecay_N = torch.complex(
            product_N22[:, 0, 0] + product_N22[:, 1, 1], product_N22[:, 0, 1] - product_N22[:, 1, 0]
        )
        return du_2NBL, ddecay_N.to(decay_N.dtype), None


def _scan(u_2NBL: Tensor, decay_N: Tensor, reverse: bool) -> Tensor:
    """`scan` without gradient: inside chunks by matrices of powers, across chunks by itself."""
    num_states, batch_size, length = u_2NBL.shape[1:]
    width = min(length, CHUNK_LENGTH)
    num_chunks = -(-length // width)
    # In double precision, since an error of the decay grows with every power.
    decay_N1 = decay_N.to(torch.complex128)[:, None]
    power_NS = torch.cat([torch.ones_like(decay_N1), decay_N1.expand(-1, width)], dim=1).cumprod(1)
    lag_SS = torch.arange(width, device=u_2NBL.device)
    lag_SS = lag_SS[None, :] - lag_SS[:, None]
    carry_power_NS = power_NS[:, 1:]
    if reverse:
        lag_SS, carry_power_NS = -lag_SS, carry_power_NS.flip(1)
    matrix_NSS = power_NS[:, lag_SS.clamp(min=0)] * (lag_SS >= 0)
    real_NSS, imag_NSS = (part.to(u_2NBL.dtype) for part in (matrix_NSS.real, matrix_NSS.imag))

    if num_chunks * width != length:
        u_2NBL = F.pad(u_2NBL, (0, num_chunks * width - length))
    u_2NBGS = u_2NBL.reshape(2, num_states, -1, width)
    h_2NBGS = torch.empty_like(u_2NBGS)
    with torch.autocast(u_2NBL.device.type, enabled=False):
        torch.bmm(u_2NBGS[0], real_NSS, out=h_2NBGS[0])
        h_2NBGS[0].baddbmm_(u_2NBGS[1], imag_NSS, alpha=-1)
        torch.bmm(u_2NBGS[0], imag_NSS, out=h_2NBGS[1])
        h_2NBGS[1].baddbmm_(u_2NBGS[1], real_NSS)
        if num_chunks > 1:
            # The last states of all chunks are a shorter recurrence with a smaller decay.
            last_2NBG = h_2NBGS[..., 0 if reverse else -1].reshape(2, num_states, batch_size, -1)
            last_2NBG = _scan(last_2NBG, power_NS[:, -1], reverse)
            if reverse:
                carry_2NBG = F.pad(last_2NBG[..., 1:], (0, 1))
            else:
                carry_2NBG = F.pad(last_2NBG[..., :-1], (1, 0))
            carry_NG2 = carry_2NBG.flatten(2).permute(1, 2, 0).contiguous()
            real_NS, imag_NS = (
                part.to(u_2NBL.dtype) for part in (carry_power_NS.real, carry_power_NS.imag)
            )
            h_2NBGS[0].baddbmm_(carry_NG2, torch.stack([real_NS, -imag_NS], dim=1))
            h_2NBGS[1].baddbmm_(carry_NG2, torch.stack([imag_NS, real_NS], dim=1))
    h_2NBL = h_2NBGS.view(2, num_states, batch_size, num_chunks * width)
    return h_2NBL[..., :length].contiguous()


class DiagonalSystem(nn.Module):
    """y_t = Re(C h_t) + D x_t over the states h_t = decay h_{t-1} + B x_t, linear in length.

    `backward_C` reads a second run of the same recurrence, from the end to the start, which takes
    x_t in as well. A subclass has the parameters behind `decay_and_input`, and draws the initial
    values of all but D, which is N(0, 1).

    Args:
        shape: `d_model` is read here.
        num_states: N.
        bidirectional: with `backward_C`.
        output_scale: factor of the terms with C.
    """

    GROUPS: ClassVar[dict[str, str]] = {"B": "input", "C": "output", "backward_C": "output"}

    def __init__(
        self, shape: Shape, num_states: int, *, bidirectional: bool, output_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.num_states, self.output_scale = num_states, output_scale
        self.B = nn.Parameter(torch.empty(2, num_states, shape.d_model))
        self.C = nn.Parameter(torch.empty(2, shape.d_model, num_states))
        self.backward_C = nn.Parameter(torch.empty_like(self.C)) if bidirectional else None
        self.D = nn.Parameter(torch.randn(shape.d_model))

    def decay_and_input(self) -> tuple[Tensor, Tensor]:
        """Complex decay [N] and input map [N, D] of the recurrence, in double precision."""
        raise NotImplementedError

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Run over a sequence; padding counts as zeros. [B, L, D]."""
        batch_size, length = mask_BL.shape
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        decay_N, input_ND = self.decay_and_input()
        x_RD = (x_BLD.to(dtype) * mask_BL[..., None].to(dtype)).flatten(0, 1)
        # Time is last in memory, as the scan wants it, which costs the two products nothing.
        u_PR = join_planes(input_ND).to(dtype) @ x_RD.mT
        u_2NBL = u_PR.view(2, self.num_states, batch_size, length)
        y_RD = scan(u_2NBL, decay_N).view(u_PR.shape).mT @ self.output_map(self.C)
        if self.backward_C is not None:
            h_PR = scan(u_2NBL, decay_N, reverse=True).view(u_PR.shape)
            y_RD = torch.addmm(y_RD, h_PR.mT, self.output_map(self.backward_C))
        y_RD = torch.addcmul(y_RD, x_RD, self.D.to(dtype))
        return y_RD.view(x_BLD.shape).to(x_BLD.dtype)

    def start(self, batch_size: int) -> Tensor:
        """State before the first position; [2, N, B].

        Raises:
            ValueError: the system runs in both directions.
        """
        if self.backward_C is not None:
            raise ValueError(
                "model.bidirectional=true: positions cannot be taken one by one, since each sees "
                "all later ones; set model.bidirectional=false"
            )
        dtype = torch.promote_types(self.D.dtype, torch.float32)
        return self.D.new_zeros(2, self.num_states, batch_size, dtype=dtype)

    def step(self, x_B1D: Tensor, state_2NB: Tensor) -> tuple[Tensor, Tensor]:
        """The next position alone; [B, 1, D] and the state after it."""
        dtype = state_2NB.dtype
        decay_N, input_ND = self.decay_and_input()
        x_BD = x_B1D[:, 0].to(dtype)
        real_N1, imag_N1 = (part[:, None].to(dtype) for part in (decay_N.real, decay_N.imag))
        turned_2NB = torch.stack([-state_2NB[1], state_2NB[0]])  # times i
        u_2NB = (join_planes(input_ND).to(dtype) @ x_BD.mT).view_as(state_2NB)
        state_2NB = u_2NB + real_N1 * state_2NB + imag_N1 * turned_2NB
        y_BD = state_2NB.flatten(0, 1).mT @ self.output_map(self.C) + self.D.to(dtype) * x_BD
        return y_BD[:, None].to(x_B1D.dtype), state_2NB

    def output_map(self, C_2DN: Tensor) -> Tensor:
        """Re(C h), times `output_scale`, as one real map of the planes of h; [P, D]."""
        C_DP = torch.cat([C_2DN[0], -C_2DN[1]], dim=1)
        return self.output_scale * C_DP.mT.to(torch.promote_types(C_2DN.dtype, torch.float32))


def join_planes(x_ND: Tensor) -> Tensor:
    """A complex matrix as a real one, [P, D]."""
    return torch.cat([x_ND.real, x_ND.imag])


class TiedDropout(Dropout):
    """Dropout with one mask for all positions of a sequence."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Same shape and dtype."""
        if not self.training or self.p == 0.0:
            return x_BLD
        return x_BLD * super().forward(torch.ones_like(x_BLD[:, :1]))


class GatedRecurrence(nn.Module):
    """The mixer: a diagonal system, tanh gelu and a gate; v is the system's output.

    z = dropout(gelu(v)), and with linear maps W1, W2 the result is (W1 z) sigmoid(W2 z) (full_glu),
    z sigmoid(W2 z) (half_glu1), v sigmoid(W2 z) (half_glu2) or gelu(v) (gelu).

    Args:
        shape: `d_model` and `dropout` are read here.
        system: maps [B, L, D] and a mask to [B, L, D].
        gate: which of the four.
        tie_dropout: one dropout mask for all positions of a sequence.

    Raises:
        ValueError: an unknown gate.
    """

    def __init__(
        self, shape: Shape, system: DiagonalSystem, *, gate: Gate, tie_dropout: bool
    ) -> None:
        super().__init__()
        if gate not in get_args(Gate):
            raise ValueError(f"model.gate={gate!r}: expected one of {', '.join(get_args(Gate))}")
        self.gate = gate
        self.system = system
        # Without a map behind it, the dropout of the branch stands right behind the gelu.
        rate = 0.0 if gate == "gelu" else shape.dropout
        self.dropout = TiedDropout(rate) if tie_dropout else Dropout(rate)
        self.out = (
            nn.Identity()
            if gate == "gelu"
            else StackedLinear(shape.d_model, shape.d_model, parts=2 if gate == "full_glu" else 1)
        )

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is seen by nobody. [B, L, D]."""
        return self._finish(self.system(x_BLD, mask_BL))

    def start(self, batch_size: int) -> Tensor:
        """State before the first position; refused by a bidirectional system."""
        return self.system.start(batch_size)

    def step(self, x_B1D: Tensor, state_2NB: Tensor) -> tuple[Tensor, Tensor]:
        """The next position alone; [B, 1, D] and the state after it."""
        v_B1D, state_2NB = self.system.step(x_B1D, state_2NB)
        return self._finish(v_B1D), state_2NB

    def _finish(self, v_BLD: Tensor) -> Tensor:
        z_BLD = self.dropout(F.gelu(v_BLD, approximate="tanh"))
        if self.gate == "gelu":
            return z_BLD
        if self.gate == "full_glu":
            return F.glu(self.out(z_BLD))
        return (z_BLD if self.gate == "half_glu1" else v_BLD) * self.out(z_BLD).sigmoid()


class RecurrentBlock(nn.Module):
    """A layer as LRU and S5 have it: the mixer with a residual connection and a norm, no more."""

    def __init__(self, shape: Shape, mixer: nn.Module, *, tie_dropout: bool) -> None:
        super().__init__()
        self.pre_norm = shape.norm == "pre"
        self.norm = make_norm(shape)
        self.mixer = mixer
        self.dropout = (TiedDropout if tie_dropout else Dropout)(shape.dropout)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """[B, L, D]."""
        if self.pre_norm:
            return x_BLD + self.dropout(self.mixer(self.norm(x_BLD, mask_BL), mask_BL))
        return self.norm(x_BLD + self.dropout(self.mixer(x_BLD, mask_BL)), mask_BL)


class RecurrentEncoder(Encoder):
    """Encoder of diagonal recurrences: what the options of LRU and S5 have in common.

    Args:
        shape: sizes and layout.
        mixer: makes one mixer.
        bidirectional: whether its system runs both ways.
        causal: refuses what lets a token see later ones.
        block: shared: mixer and feed-forward, as every model; own: `RecurrentBlock`, and no norm
            behind the last one.
        tie_dropout: of the own block.
        norm_eps: added to the variance in every norm.

    Raises:
        ValueError: a value is out of range, or two options cannot hold together.
    """

    def __init__(
        self,
        shape: Shape,
        mixer: Callable[[], nn.Module],
        *,
        bidirectional: bool,
        causal: bool,
        block: Literal["shared", "own"],
        tie_dropout: bool,
        norm_eps: float,
    ) -> None:
        if block not in ("shared", "own"):
            raise ValueError(f"model.block={block!r}: expected shared or own")
        if norm_eps <= 0:
            raise ValueError(f"model.norm_eps={norm_eps}: expected more than 0")
        if causal and bidirectional:
            raise ValueError(
                "model.causal=true with model.bidirectional=true: the run from the end shows each "
                "token all later ones; set model.bidirectional=false"
            )
        check_causal(shape, causal)
        if not bidirectional and shape.pooling in ("cls", "first"):
            raise ValueError(
                f"model.bidirectional=false with shape.pooling={shape.pooling}: the first position "
                "would see only itself; set model.bidirectional=true or another shape.pooling"
            )
        own = partial(RecurrentBlock, tie_dropout=tie_dropout)
        super().__init__(shape, mixer, Block if block == "shared" else own)
        if block == "own":
            self.norm = NoNorm()
        for part in self.modules():
            if isinstance(part, (nn.LayerNorm, BatchNorm, RMSNorm, ScaleNorm)):
                part.eps = norm_eps
