"""Diagonal linear recurrences, h_t = decay h_{t-1} + u_t: the scan and the layers built around it.

LRU and S5 differ in how decay and input map come from their parameters; all else is here. Complex
numbers are stored as two planes, real and imaginary parts, on a first axis of 2.

Shapes: B batch, L length, R = B L rows, D d_model, N complex states, P = 2 N planes of states, real
parts first, Q = P planes or 2 P, those of the way back last; G chunks of S positions, of one
sequence or of all. `mask` is bool, True = real token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.dropout import Dropout, TiedDropout, has_fast_path, side_by_side
from models.encoder import Block, Encoder, MixerBlock
from models.layers import StackedLinear, check_directions
from models.norm import NoNorm, set_eps
from models.shape import Shape, check_positive

CHUNK_LENGTH = 32  # of the scan: work per position grows with it, the number of passes shrinks
Gate = Literal["full_glu", "half_glu1", "half_glu2", "gelu"]


def scan(
    u_2NBL: Tensor, decay_N: Tensor, *, reverse: bool = False, out: Tensor | None = None
) -> Tensor:
    """h_t = decay h_{t-1} + u_t from h_{-1} = 0, or h_t = decay h_{t+1} + u_t; [2, N, B, L].

    Inside chunks by matrices of powers, one for each state; the last states of all chunks are a
    shorter recurrence. Work is linear in L, and the number of operations nearly independent of it.
    No gradient flows through: `run_system` has its own. `u_2NBL` is float32 or float64, `decay_N`
    complex, best complex128, since an error of the decay grows with every power.
    """
    num_states, batch_size, length = u_2NBL.shape[1:]
    width = min(length, CHUNK_LENGTH)
    num_chunks = -(-length // width)
    if num_chunks * width != length:
        whole_2NBL = F.pad(u_2NBL, (0, num_chunks * width - length))
        h_2NBL = scan(whole_2NBL, decay_N, reverse=reverse)[..., :length]
        return h_2NBL if out is None else out.copy_(h_2NBL)

    decay_N1 = decay_N.to(torch.complex128)[:, None]
    power_NS = torch.cat([torch.ones_like(decay_N1), decay_N1.expand(-1, width)], dim=1).cumprod(1)
    step_S = torch.arange(width, device=u_2NBL.device)
    lag_SS = step_S[None, :] - step_S[:, None]  # from the row's step to the column's
    carry_NS = power_NS[:, 1:]  # what becomes of a state that stands before a chunk
    if reverse:
        lag_SS, carry_NS = -lag_SS, carry_NS.flip(1)
    map_NSS = power_NS[:, lag_SS.clamp(min=0)] * (lag_SS >= 0)
    real_NSS, imag_NSS = (part.to(u_2NBL.dtype) for part in (map_NSS.real, map_NSS.imag))

    h_2NBL = torch.empty_like(u_2NBL) if out is None else out
    u_2NGS, h_2NGS = (x.unflatten(3, (-1, width)).flatten(2, 3) for x in (u_2NBL, h_2NBL))
    with torch.autocast(u_2NBL.device.type, enabled=False):
        torch.bmm(u_2NGS[0], real_NSS, out=h_2NGS[0])
        h_2NGS[0].baddbmm_(u_2NGS[1], imag_NSS, alpha=-1)
        torch.bmm(u_2NGS[0], imag_NSS, out=h_2NGS[1])
        h_2NGS[1].baddbmm_(u_2NGS[1], real_NSS)
        if num_chunks > 1:
            last_2NBG = h_2NGS[..., 0 if reverse else -1].unflatten(2, (batch_size, num_chunks))
            last_2NBG = scan(last_2NBG.contiguous(), power_NS[:, -1], reverse=reverse)
            before_2NBG = (
                F.pad(last_2NBG[..., 1:], (0, 1)) if reverse else F.pad(last_2NBG[..., :-1], (1, 0))
            )
            before_NG2 = before_2NBG.flatten(2).permute(1, 2, 0).contiguous()
            real_NS, imag_NS = (part.to(u_2NBL.dtype) for part in (carry_NS.real, carry_NS.imag))
            h_2NGS[0].baddbmm_(before_NG2, torch.stack([real_NS, -imag_NS], dim=1))
            h_2NGS[1].baddbmm_(before_NG2, torch.stack([imag_NS, real_NS], dim=1))
    return h_2NBL


def scan_into(h_2NBL: Tensor, u_2NBL: Tensor, decay_N: Tensor, reverse: bool) -> None:
    """`scan` with its result in `h_2NBL`; on a CPU each thread has states of its own.

    A product for each state is too small to be divided among threads that have to be woken for it.
    """
    num_states = len(decay_N)
    num_parts = min(torch.get_num_threads(), num_states) if has_fast_path(u_2NBL) else 1
    parts = [
        slice(num_states * i // num_parts, num_states * (i + 1) // num_parts)
        for i in range(num_parts)
    ]

    def scan_part(i: int) -> None:
        part = parts[i]
        scan(u_2NBL[:, part], decay_N[part], reverse=reverse, out=h_2NBL[:, part])

    if num_parts == 1:
        scan_part(0)
    else:
        side_by_side(scan_part, num_parts)


def run_system(
    x_BLD: Tensor,
    mask_BL: Tensor,
    decay_N: Tensor,
    input_PD: Tensor,
    output_QD: Tensor,
    skip_D: Tensor,
) -> Tensor:
    """y_t = output h_t + skip x_t over h_t = decay h_{t-1} + input x_t, x zero at padding.

    With Q = 2 P the second half of the output map reads a second run, from the end to the start.
    All are float32 or all float64 but for the complex decay. Kept for the gradient are x and the
    states. [B, L, D].
    """
    if torch.compiler.is_compiling():
        # Compiled code has no complex numbers, and no results in strided memory.
        return torch.compiler.disable(run_system)(
            x_BLD, mask_BL, decay_N, input_PD, output_QD, skip_D
        )
    y_BLD: Tensor = _System.apply(x_BLD, mask_BL, decay_N, input_PD, output_QD, skip_D)
    return y_BLD


class _System(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BLD: Tensor,
        mask_BL: Tensor,
        decay_N: Tensor,
        input_PD: Tensor,
        output_QD: Tensor,
        skip_D: Tensor,
    ) -> Tensor:
        batch_size, length = mask_BL.shape
        with torch.autocast(x_BLD.device.type, enabled=False):
            x_RD = rows_of_chunks(x_BLD * mask_BL[..., None])
            u_PR = times_rows(input_PD, x_RD)
            h_QR = new_planes(len(output_QD), x_RD)
            for h_PR, reverse in directions(h_QR, len(u_PR)):
                u_2NBL, h_2NBL = (by_state(part, batch_size) for part in (u_PR, h_PR))
                scan_into(h_2NBL, u_2NBL, decay_N, reverse)
            y_RD = (x_RD * skip_D).addmm_(h_QR.mT, output_QD)
        ctx.save_for_backward(x_RD, h_QR, mask_BL, decay_N, input_PD, output_QD, skip_D)
        return y_RD.unflatten(0, (batch_size, -1))[:, :length].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BLD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_RD, h_QR, mask_BL, decay_N, input_PD, output_QD, skip_D = ctx.saved_tensors
        batch_size, length = mask_BL.shape
        with torch.autocast(dy_BLD.device.type, enabled=False):
            dy_RD = rows_of_chunks(dy_BLD)
            dh_QR = times_rows(output_QD, dy_RD)
            # A state enters the loss itself and by way of all later ones: a scan back in time.
            g_QR, ddecay_N = new_planes(len(output_QD), dy_RD), torch.zeros_like(decay_N)
            for (h_PR, reverse), (dh_PR, _), (g_PR, _) in zip(
                *(directions(planes, len(input_PD)) for planes in (h_QR, dh_QR, g_QR)), strict=True
            ):
                h_2NBL, dh_2NBL, g_2NBL = (by_state(z, batch_size) for z in (h_PR, dh_PR, g_PR))
                scan_into(g_2NBL, dh_2NBL, decay_N.conj(), not reverse)
                ddecay_N += correlate(h_2NBL, g_2NBL, reverse)
            du_PR = g_PR if len(g_QR) == len(g_PR) else g_QR[: len(g_PR)].add_(g_PR)
            dx_RD = (dy_RD * skip_D).addmm_(du_PR.mT, input_PD)
            dx_BLD = dx_RD.unflatten(0, (batch_size, -1))[:, :length].mul_(mask_BL[..., None])
            dinput_PD, doutput_QD = du_PR @ x_RD, h_QR @ dy_RD
            dskip_D = (dy_RD * x_RD).sum(dim=0)
        return dx_BLD, None, ddecay_N, dinput_PD, doutput_QD, dskip_D


def rows_of_chunks(x_BLD: Tensor) -> Tensor:
    """All positions as rows; zeros behind a sequence make its length whole chunks. [R, D]."""
    length = x_BLD.shape[1]
    if length > CHUNK_LENGTH and length % CHUNK_LENGTH:
        x_BLD = F.pad(x_BLD, (0, 0, 0, -length % CHUNK_LENGTH))
    return x_BLD.flatten(0, 1)


def new_planes(num_planes: int, x_RD: Tensor) -> Tensor:
    """Memory for [P, R]. Planes a power of two apart would share a few lines of the caches."""
    return x_RD.new_empty(num_planes, len(x_RD) + 16)[:, : len(x_RD)]


def times_rows(map_PD: Tensor, x_RD: Tensor) -> Tensor:
    """map x^T in memory of its own; [P, R]."""
    return torch.mm(map_PD, x_RD.mT, out=new_planes(len(map_PD), x_RD))


def directions(h_QR: Tensor, num_planes: int) -> list[tuple[Tensor, bool]]:
    """The planes [P, R] of each run, and whether it goes from the end to the start."""
    return list(zip(h_QR.split(num_planes), (False, True), strict=False))


def by_state(h_PR: Tensor, batch_size: int) -> Tensor:
    """[P, R] as [2, N, B, L]."""
    return h_PR.unflatten(1, (batch_size, -1)).unflatten(0, (2, -1))


def correlate(h_2NBL: Tensor, g_2NBL: Tensor, reverse: bool) -> Tensor:
    """Gradient of the decay: of all positions the sum of conj(h_{t-1}) g_t; [N], complex."""
    if reverse:
        return correlate(g_2NBL, h_2NBL, False).conj()
    # All sequences in one row, less the products across the seams.
    product_N22 = outer_sums(h_2NBL.flatten(2)[..., :-1], g_2NBL.flatten(2)[..., 1:])
    product_N22 -= outer_sums(h_2NBL[..., :-1, -1], g_2NBL[..., 1:, 0])
    (re_re, re_im), (im_re, im_im) = product_N22.permute(1, 2, 0)
    return torch.complex(re_re + im_im, re_im - im_re)


def outer_sums(h_2NR: Tensor, g_2NR: Tensor) -> Tensor:
    """Sums over R of the products of each plane of h with each of g; [N, 2, 2]."""
    return torch.bmm(h_2NR.transpose(0, 1), g_2NR.permute(1, 2, 0))


class DiagonalSystem(nn.Module, ABC):
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

    @abstractmethod
    def decay_and_input(self) -> tuple[Tensor, Tensor]:
        """Complex decay [N] and input map [N, D] of the recurrence, in double precision."""

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Run over a sequence; padding counts as zeros. [B, L, D]."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        decay_N, input_ND = self.decay_and_input()
        maps = [self.output_map(self.C)]
        if self.backward_C is not None:
            maps.append(self.output_map(self.backward_C))
        y_BLD = run_system(
            x_BLD.to(dtype),
            mask_BL,
            decay_N,
            join_planes(input_ND).to(dtype),
            torch.cat(maps).to(dtype),
            self.D.to(dtype),
        )
        return y_BLD.to(x_BLD.dtype)

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
        y_BD = state_2NB.flatten(0, 1).mT @ self.output_map(self.C).to(dtype)
        y_BD = y_BD + self.D.to(dtype) * x_BD
        return y_BD[:, None].to(x_B1D.dtype), state_2NB

    def output_map(self, C_2DN: Tensor) -> Tensor:
        """Re(C h), times `output_scale`, as one real map of the planes of h; [P, D]."""
        return self.output_scale * torch.cat([C_2DN[0], -C_2DN[1]], dim=1).mT


def join_planes(x_ND: Tensor) -> Tensor:
    """A complex matrix as a real one, [P, D]."""
    return torch.cat([x_ND.real, x_ND.imag])


class GatedRecurrence(nn.Module):
    """The mixer: a diagonal system, tanh gelu and a gate; v is the system's output.

    z = dropout(gelu(v)), and with linear maps W1, W2 the result is (W1 z) sigmoid(W2 z) (full_glu),
    z sigmoid(W2 z) (half_glu1), v sigmoid(W2 z) (half_glu2) or gelu(v) (gelu).

    Args:
        shape: `d_model`, `dropout` and `attention_bias`, of W1 and W2, are read here.
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
        self.out: nn.Module = nn.Identity()
        if gate != "gelu":
            parts, bias = 2 if gate == "full_glu" else 1, shape.attention_bias
            self.out = StackedLinear(shape.d_model, shape.d_model, parts=parts, bias=bias)

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


class RecurrentEncoder(Encoder):
    """Encoder of diagonal recurrences: what the options of LRU and S5 have in common.

    Args:
        shape: sizes and layout.
        mixer: makes one mixer.
        bidirectional: whether its system runs both ways.
        causal: refuses what lets a token see later ones.
        block: shared: mixer and feed-forward, as every model; own: `MixerBlock`, and no norm
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
        check_positive("model.norm_eps", norm_eps)
        check_directions(shape, bidirectional=bidirectional, causal=causal)
        own = partial(MixerBlock, tie_dropout=tie_dropout)
        super().__init__(shape, mixer, Block if block == "shared" else own)
        if block == "own":
            self.norm = NoNorm()
        set_eps(self, norm_eps)
