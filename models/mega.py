"""Mega: a moving average of each feature, then gated attention within chunks; linear in length.

Source: Ma et al. 2023, https://arxiv.org/abs/2209.10655, equations 3 to 17, and the authors' code,
https://github.com/facebookresearch/mega, which is followed where the two differ: the average gets
an identity path and a silu, a two-sided one counts the present position in both directions, softmax
scores are divided by the root of the width of queries, and the scores of the other two functions by
the number of real tokens in the chunk. Unlike there, a sequence need not be a multiple of the chunk
nor as long as one; chunks are filled up inside, which changes no number.

Shapes: B batch, L length, D d_model, Z width of queries and keys, V width of values, C positions of
a chunk, G chunks of all examples, T taps of a kernel or distances of positions; N averages of each
feature in one direction, E averaged features (D, or 2 D in two directions), M averages of a feature
in all directions; I positions of a block of the average, K blocks of an example, X of all examples.
`mask` is bool, True = real token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.convolution import long_convolution, powers, sum_of_powers
from models.dropout import BLOCK_SIZE, Dropout, draw_kept, has_fast_path, keep_probability
from models.encoder import Block, Encoder
from models.layers import check_causal, check_stepwise
from models.shape import Shape

AttentionFunction = Literal["softmax", "laplace", "relu2"]
PositionBias = Literal["simple", "rotary"]

# Location and scale of the error function that stands in for relu2, six digits as in the code.
LAPLACE_MU, LAPLACE_SIGMA = 0.707107, 0.282095

AVERAGE_BLOCK = 32  # positions whose moving sums are formed together


@dataclass(frozen=True)
class AverageState:
    """What a moving average carries from step to step; its size does not grow.

    One number for each of the N averages, with their weights and decays; with truncation the last T
    inputs, latest first, with the taps of the kernel as weights.
    """

    weight_DN: Tensor
    decay_DN: Tensor | None
    memory_BDN: Tensor


class MovingAverage(nn.Module):
    """Damped exponential moving average: each feature is averaged at N rates, and those summed.

    y = silu(e + omega * x) with e_t = sum_s kernel_s x_(t - s), plus the same with x_(t + s) and a
    kernel of its own if `bidirectional`; both count the present.
    kernel_s = N^-1/2 sum_n gamma p beta q^s, p = sigmoid(delta), q = 1 - p sigmoid(alpha)
    (equation 3 with the code's names: the paper's alpha is p, its delta is sigmoid(alpha)).

    Args:
        d_model: D.
        ema_size: N.
        bidirectional: average over later positions too.
        truncation: T, taps in each direction; None: as many as the sequence has positions.
    """

    def __init__(
        self, d_model: int, *, ema_size: int, bidirectional: bool, truncation: int | None
    ) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.truncation = truncation
        sizes = (d_model * (2 if bidirectional else 1), ema_size)
        self.delta = nn.Parameter(0.2 * torch.randn(sizes))
        self.alpha = nn.Parameter(0.2 * torch.randn(sizes))
        sign_N = 1.0 - 2.0 * (torch.arange(ema_size) % 2)
        self.beta = nn.Parameter(sign_N + 0.02 * torch.randn(sizes))
        self.gamma = nn.Parameter(torch.randn(sizes))
        self.omega = nn.Parameter(torch.randn(d_model))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Weight and decay of each average, in float32 or wider; [E, N] both."""
        dtype = torch.promote_types(self.delta.dtype, torch.float32)
        rate_EN = self.delta.to(dtype).sigmoid()
        decay_EN = 1 - rate_EN * self.alpha.to(dtype).sigmoid()
        scale = self.delta.shape[1] ** -0.5
        return scale * rate_EN * self.beta.to(dtype) * self.gamma.to(dtype), decay_EN

    def kernel(self, length: int) -> Tensor:
        """Taps 0, 1, ... of the kernels for a sequence of `length`; [E, T]."""
        weight_EN, decay_EN = self.coefficients()
        num_taps = length if self.truncation is None else min(length, self.truncation)
        with torch.autocast(weight_EN.device.type, enabled=False):
            # Two at least, so that even a single tap leaves no parameter without a gradient.
            return sum_of_powers(weight_EN, decay_EN, max(num_taps, 2))[:, :num_taps]

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Average real tokens; [B, L, D]. Rows at padding are not zero, and nobody's."""
        fast = has_fast_path(x_BLD)
        # A copy of what has no padding would cost a tenth of the average.
        is_real = fast and bool(mask_BL.all())
        real_BLD = x_BLD if is_real else x_BLD.masked_fill(~mask_BL[..., None], 0.0)
        if fast and self.truncation is None:
            average_BLD = moving_sums(real_BLD, *self.coefficients())
        else:
            kernels = self.kernel(x_BLD.shape[1]).chunk(2 if self.bidirectional else 1)
            average_BLD = long_convolution(real_BLD, *kernels)
        return F.silu(torch.addcmul(average_BLD, self.omega, x_BLD))

    def start(self, batch_size: int) -> AverageState:
        """State before the first position, for `step`."""
        assert not self.bidirectional
        weight_DN, decay_DN = self.coefficients()
        if self.truncation is not None:
            tap_DT = self.kernel(self.truncation)
            return AverageState(tap_DT, None, tap_DT.new_zeros(batch_size, *tap_DT.shape))
        return AverageState(weight_DN, decay_DN, weight_DN.new_zeros(batch_size, *weight_DN.shape))

    def step(self, x_BD: Tensor, state: AverageState) -> tuple[Tensor, AverageState]:
        """The next position alone; [B, D] and the state after it."""
        new_BD1 = x_BD[..., None].to(state.memory_BDN.dtype)
        if state.decay_DN is None:
            memory_BDN = torch.cat([new_BD1, state.memory_BDN[..., :-1]], dim=-1)
        else:
            memory_BDN = state.decay_DN * state.memory_BDN + new_BD1
        average_BD = (state.weight_DN * memory_BDN).sum(dim=-1).to(x_BD.dtype)
        return F.silu(average_BD + self.omega * x_BD), replace(state, memory_BDN=memory_BDN)


def moving_sums(x_BLD: Tensor, weight_EN: Tensor, decay_EN: Tensor) -> Tensor:
    """What `long_convolution` gives for kernels sum_n weight_n decay_n^s, on a CPU; [B, L, D].

    Within blocks of positions one matrix product for each feature forms the sums and what the block
    adds to each average; a recurrence carries the averages from block to block. That is linear in L
    and takes half to three quarters of the time of Fourier transforms.
    """
    batch_size, length, width = x_BLD.shape
    block, num_averages = AVERAGE_BLOCK, weight_EN.shape[1]
    with torch.autocast("cpu", enabled=False):
        padded_BLD = F.pad(x_BLD.to(weight_EN.dtype), (0, 0, 0, -length % block))
        power_ENI = powers(decay_EN, block + 1)  # one more, for the step to the next block
        now, later = power_ENI[..., :-1], power_ENI[..., 1:]
        tap_EI, later = (weight_EN[..., None] * now).sum(dim=1), weight_EN[..., None] * later
        # Of each direction. What looks ahead runs the other way.
        (tap_DI, *ahead_DI), (now, *now_ahead), (later, *later_ahead) = (
            x.split(width) for x in (tap_EI, now, later)
        )
        lags = F.pad(tap_DI, (block - 1, 0))
        for tap_DI in ahead_DI:
            lags = lags + F.pad(tap_DI.flip(1), (0, block - 1))
        # In a block from input to output, from input to average, and from average to output.
        inside_DII = lags.unfold(1, block, 1).flip(1)
        enter_DMI = torch.cat([now.flip(2), *now_ahead], dim=1)
        leave_DMI = torch.cat([later, *(x.flip(2) for x in later_ahead)], dim=1)
        x_DXI = _Transpose.apply(padded_BLD.flatten(0, 1)).unflatten(1, (-1, block))
        y_DXJ = torch.bmm(x_DXI, torch.cat([inside_DII, enter_DMI.mT], dim=2))
        sum_KBDM = y_DXJ[..., block:].unflatten(1, (batch_size, -1)).permute(2, 1, 0, 3)
        parts = zip(
            sum_KBDM.split(num_averages, dim=3), power_ENI[..., -1].split(width), strict=True
        )
        states = [
            _Carry.apply(sums.flip(0), decay_DN).flip(0) if ahead else _Carry.apply(sums, decay_DN)
            for ahead, (sums, decay_DN) in enumerate(parts)
        ]
        state_DXM = torch.cat(states, dim=3).permute(2, 1, 0, 3).flatten(1, 2)
        y_DXI = torch.baddbmm(y_DXJ[..., :block], state_DXM, leave_DMI)
        y_BLD = _Transpose.apply(y_DXI.flatten(1)).view_as(padded_BLD)
    return y_BLD[:, :length].to(x_BLD.dtype)


class _Transpose(torch.autograd.Function):
    """A transposed copy whose gradient is a copy too, so that no product reads across its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.contiguous().mT.contiguous()


class _Carry(torch.autograd.Function):
    """state_0 = 0, state_k = decay state_(k - 1) + input_(k - 1), over the first axis."""

    @staticmethod
    def forward(ctx: Any, input_KBDN: Tensor, decay_DN: Tensor) -> Tensor:
        state_KBDN = torch.zeros_like(input_KBDN, memory_format=torch.contiguous_format)
        for k in range(1, len(state_KBDN)):
            torch.addcmul(input_KBDN[k - 1], decay_DN, state_KBDN[k - 1], out=state_KBDN[k])
        ctx.save_for_backward(state_KBDN, decay_DN)
        return state_KBDN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_KBDN: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        state_KBDN, decay_DN = ctx.saved_tensors
        # What state_k is worth, to its own reader and to those behind it.
        worth_KBDN = grad_KBDN.clone(memory_format=torch.contiguous_format)
        for k in range(len(worth_KBDN) - 2, -1, -1):
            worth_KBDN[k].addcmul_(decay_DN, worth_KBDN[k + 1])
        dinput_KBDN = F.pad(worth_KBDN[1:], (0, 0, 0, 0, 0, 0, 0, 1))
        return dinput_KBDN, (worth_KBDN[1:] * state_KBDN[:-1]).sum(dim=(0, 1))


class SimpleBias(nn.Module):
    """A learned number for each distance of key and query, for `max_positions` positions."""

    def __init__(self, max_positions: int) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.table = nn.Parameter(0.02 * torch.randn(2 * max_positions - 1))

    def forward(self, length: int) -> Tensor:
        """To be added to scores; [length, length], query before key."""
        return bias_matrix(self.distances(length))

    def distances(self, length: int) -> Tensor:
        """For key minus query from -(length - 1) to length - 1; [2 * length - 1].

        Raises:
            ValueError: there are more positions than the table has.
        """
        if length > self.max_positions:
            raise ValueError(
                f"{length} positions that attend to each other, but the model was built for "
                f"{self.max_positions}; build it with a larger shape.max_length"
            )
        return self.table[self.max_positions - length : self.max_positions + length - 1]


class RotaryBias(nn.Module):
    """Product of two learned vectors, each turned by its own position; queries and keys stay.

    (R_i alpha) . (R_j beta) depends on j - i alone, so one row of products is enough.
    """

    def __init__(self, z_size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(0.02 * torch.randn(z_size))
        self.beta = nn.Parameter(0.02 * torch.randn(z_size))

    def forward(self, length: int) -> Tensor:
        """To be added to scores; [length, length], query before key."""
        return bias_matrix(self.distances(length))

    def distances(self, length: int) -> Tensor:
        """For key minus query from -(length - 1) to length - 1; [2 * length - 1]."""
        dtype = torch.promote_types(self.alpha.dtype, torch.float32)
        (a_R, b_R), (c_R, d_R) = self.alpha.to(dtype).chunk(2), self.beta.to(dtype).chunk(2)
        wide: Any = {"dtype": torch.float64, "device": a_R.device}
        rate_R = 10000.0 ** (-torch.arange(len(a_R), **wide) / len(a_R))
        angle_TR = torch.arange(length - 1, -length, -1, **wide)[:, None] * rate_R
        cos_TR, sin_TR = angle_TR.cos().to(dtype), angle_TR.sin().to(dtype)
        return (cos_TR * (a_R * c_R + b_R * d_R) + sin_TR * (a_R * d_R - b_R * c_R)).sum(dim=1)


def bias_matrix(distance_T: Tensor) -> Tensor:
    """bias[i, j] = what belongs to j - i, from all distances in order; [C, C] from [2 C - 1]."""
    return distance_T.unfold(0, (len(distance_T) + 1) // 2, 1).flip(0)


def laplace(x: Tensor) -> Tensor:
    """(1 + erf((x - mu) / (sigma sqrt 2))) / 2, near relu2 but bounded (equation 16)."""
    return 0.5 * (1 + ((x - LAPLACE_MU) / (LAPLACE_SIGMA * math.sqrt(2))).erf())


def weights(score: Tensor, function: AttentionFunction) -> Tensor:
    """Attention weights of scores, same shape; 0 at -inf."""
    if function == "softmax":
        return score.softmax(dim=-1)
    return laplace(score) if function == "laplace" else score.relu().square()


def attend_in_chunks(
    q_GCZ: Tensor,
    k_GCZ: Tensor,
    v_GCV: Tensor,
    bias_CC: Tensor,
    hidden_GC: Tensor,
    *,
    function: AttentionFunction,
    dropout: float = 0.0,
) -> Tensor:
    """weights(q k^T + bias) v, each chunk by itself; [G, C, V].

    Queries come scaled. Nobody reads the keys of `hidden_GC`, nor those where the bias is -inf. On
    a CPU blocks of weights are formed, and again for the gradient, so memory is linear in C.
    """
    dtype = torch.promote_types(q_GCZ.dtype, torch.float32)
    if has_fast_path(q_GCZ):
        with torch.autocast("cpu", enabled=False):
            tensors = (x.to(dtype) for x in (q_GCZ, k_GCZ, v_GCV, bias_CC))
            return _Attention.apply(*tensors, hidden_GC, function, dropout).to(v_GCV.dtype)
    bias_GCC = bias_CC.to(q_GCZ.dtype).masked_fill(hidden_GC[:, None], -torch.inf)
    if function == "softmax":
        k_GCZ, v_GCV, bias_GCC = (x.to(q_GCZ.dtype) for x in (k_GCZ, v_GCV, bias_GCC))
        return F.scaled_dot_product_attention(
            q_GCZ, k_GCZ, v_GCV, attn_mask=bias_GCC, dropout_p=dropout, scale=1.0
        )
    score_GCC = torch.baddbmm(bias_GCC, q_GCZ, k_GCZ.mT)
    weight_GCC = F.dropout(weights(score_GCC.to(dtype), function), dropout)
    return weight_GCC.to(v_GCV.dtype) @ v_GCV


@dataclass(frozen=True)
class _Plan:
    """What the forward and the backward pass of attention form in the same blocks."""

    function: AttentionFunction
    p: float
    seed: int
    hidden_GC: Tensor

    def blocks(
        self, q_GCZ: Tensor, k_GCZ: Tensor, bias_CC: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
        """Chunks, rows, their scores [g, r, C], and what dropout keeps of the weights."""
        num_chunks, length, _ = q_GCZ.shape
        num_rows = max(1, min(length, BLOCK_SIZE // length))
        chunks_at_once = max(1, BLOCK_SIZE // (num_rows * length))
        generator = torch.Generator().manual_seed(self.seed)
        is_hidden = self.hidden_GC.any(dim=1).tolist()
        for g in range(0, num_chunks, chunks_at_once):
            chunks = slice(g, g + chunks_at_once)
            for r in range(0, length, num_rows):
                rows = slice(r, r + num_rows)
                score = torch.baddbmm(bias_CC[rows], q_GCZ[chunks, rows], k_GCZ[chunks].mT)
                if any(is_hidden[chunks]):
                    score.masked_fill_(self.hidden_GC[chunks, None], -torch.inf)
                kept = draw_kept(score.shape, self.p, generator) if self.p > 0 else None
                yield chunks, rows, score, kept


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_GCZ: Tensor,
        k_GCZ: Tensor,
        v_GCV: Tensor,
        bias_CC: Tensor,
        hidden_GC: Tensor,
        function: AttentionFunction,
        p: float,
    ) -> Tensor:
        seed = int(torch.randint(2**32, ())) if p > 0 else 0
        ctx.plan = plan = _Plan(function, p, seed, hidden_GC)
        y_GCV = torch.empty_like(v_GCV)
        for chunks, rows, score, kept in plan.blocks(q_GCZ, k_GCZ, bias_CC):
            weight = weights(score, function)
            if kept is not None:
                weight.mul_(kept.to(weight.dtype))
            torch.bmm(weight, v_GCV[chunks], out=y_GCV[chunks, rows])
        if p > 0:
            y_GCV.mul_(1 / keep_probability(p))
        ctx.save_for_backward(q_GCZ, k_GCZ, v_GCV, bias_CC, y_GCV)
        return y_GCV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_GCV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_GCZ, k_GCZ, v_GCV, bias_CC, y_GCV = ctx.saved_tensors
        plan: _Plan = ctx.plan
        keep_scale = 1 / keep_probability(plan.p) if plan.p > 0 else 1.0
        dq_GCZ = torch.empty_like(q_GCZ)
        dk_GCZ, dv_GCV, dbias_CC = (torch.zeros_like(x) for x in (k_GCZ, v_GCV, bias_CC))
        with torch.autocast("cpu", enabled=False):
            for chunks, rows, score, kept in plan.blocks(q_GCZ, k_GCZ, bias_CC):
                weight, slope = weights_and_slope(score, plan.function)
                dy, v = dy_GCV[chunks, rows], v_GCV[chunks]
                dweight, dropped = torch.bmm(dy, v.mT), weight
                if kept is not None:
                    kept = kept.to(weight.dtype).mul_(keep_scale)
                    dweight.mul_(kept)
                    dropped = kept.mul_(weight)
                dv_GCV[chunks].baddbmm_(dropped.mT, dy)
                if plan.function == "softmax":
                    # It takes from each weight's gradient the mean of them under the weights.
                    dweight.sub_((dy * y_GCV[chunks, rows]).sum(dim=2, keepdim=True))
                dscore = dweight.mul_(slope)
                torch.bmm(dscore, k_GCZ[chunks], out=dq_GCZ[chunks, rows])
                dk_GCZ[chunks].baddbmm_(dscore.mT, q_GCZ[chunks, rows])
                dbias_CC[rows] += dscore.sum(dim=0)
        return dq_GCZ, dk_GCZ, dv_GCV, dbias_CC, None, None, None


def weights_and_slope(score: Tensor, function: AttentionFunction) -> tuple[Tensor, Tensor]:
    """Weights and what a change of the score is worth in them; of softmax the weights again."""
    if function == "softmax":
        weight = score.softmax(dim=-1)
        return weight, weight
    if function == "relu2":
        root = score.relu_()
        return root.square(), 2 * root
    z = score.sub_(LAPLACE_MU).mul_(1 / (LAPLACE_SIGMA * math.sqrt(2)))
    slope = z.square().neg_().exp_().mul_(1 / (LAPLACE_SIGMA * math.sqrt(2 * math.pi)))
    return z.erf_().add_(1).mul_(0.5), slope


@dataclass(frozen=True)
class MegaState:
    """What the step form carries: the averages, and keys and values of the chunk so far.

    Bounded by the chunk; without chunks keys and values grow with the sequence.
    """

    average: AverageState
    k_BCZ: Tensor
    v_BCV: Tensor


class MegaAttention(nn.Module):
    """Moving average equipped gated attention, one head (section 3.3).

    With V = silu(x W_v), X' the moving average of x, and [u | z | r | H] maps of X':
    q = gamma_0 z + beta_0, k = gamma_1 z + beta_1, O = attention(q, k, V) and
    h = silu(H + (r * O) W_h), the layer's output is u * h + (1 - u) * x = x + u * (h - x).
    `forward` gives u * (h - x), so that the residual connection around it completes the gate; where
    that block has its norm in front, this x is the normed one. `MegaBlock` gates the stream itself.

    Args:
        shape: `d_model`, `max_length`, `attention_bias` and dropout rates are read here; there are
            no heads.
        ema_size: N, averages of each feature.
        bidirectional: average over later positions too.
        truncation: taps of the average in each direction; None: whole sequence.
        attention_function: softmax, or one of two that act on each score alone.
        chunk_size: C, positions that attend to each other; None: all of a sequence.
        z_size: Z; None: half of d_model.
        v_size: V; None: d_model, half of what the paper takes.
        position_bias: added to the scores, a table or a product of two rotated vectors.
        causal: position t sees positions 0 .. t only.

    Raises:
        ValueError: a value is out of range, or two options cannot hold together.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        ema_size: int = 4,
        bidirectional: bool = True,
        truncation: int | None = None,
        attention_function: AttentionFunction = "softmax",
        chunk_size: int | None = 128,
        z_size: int | None = None,
        v_size: int | None = None,
        position_bias: PositionBias = "simple",
        causal: bool = False,
    ) -> None:
        super().__init__()
        z_size = shape.d_model // 2 if z_size is None else z_size
        v_size = shape.d_model if v_size is None else v_size
        for name, value in (
            ("ema_size", ema_size),
            ("truncation", truncation),
            ("chunk_size", chunk_size),
            ("z_size", z_size),
            ("v_size", v_size),
        ):
            if value is not None and value < 1:
                raise ValueError(f"model.{name}={value}: expected at least 1")
        for name, choice, choices in (
            ("attention_function", attention_function, get_args(AttentionFunction)),
            ("position_bias", position_bias, get_args(PositionBias)),
        ):
            if choice not in choices:
                raise ValueError(f"model.{name}={choice}: expected one of {', '.join(choices)}")
        if position_bias == "rotary" and z_size % 2:
            raise ValueError(
                f"model.z_size={z_size} with model.position_bias=rotary: expected an even number, "
                "since halves of the vectors are rotated"
            )
        if causal and bidirectional:
            raise ValueError(
                "model.causal=true with model.bidirectional=true: the moving average would see "
                "later tokens; set model.bidirectional=false"
            )
        check_causal(shape, causal)
        if not bidirectional and chunk_size is not None and shape.pooling in ("cls", "first"):
            raise ValueError(
                f"model.bidirectional=false with shape.pooling={shape.pooling}: the first position "
                "would see its own chunk only; use shape.pooling=mean, max or attention"
            )
        self.attention_function: AttentionFunction = attention_function
        self.chunk_size = chunk_size
        self.causal = causal
        num_rows = shape.max_length + (shape.pooling == "cls")
        self.ema = MovingAverage(
            shape.d_model,
            ema_size=ema_size,
            bidirectional=bidirectional,
            truncation=None if truncation is None else min(truncation, num_rows),
        )
        width, bias = shape.d_model, shape.attention_bias
        self.value = nn.Linear(width, v_size, bias=bias)
        self.maps = nn.Linear(width, width + z_size + v_size + width, bias=bias)
        self.hidden = nn.Linear(v_size, width, bias=bias)
        self.gamma = nn.Parameter(0.02 * torch.randn(2, z_size))
        self.beta = nn.Parameter(torch.zeros(2, z_size))
        self.position_bias: SimpleBias | RotaryBias
        if position_bias == "rotary":
            self.position_bias = RotaryBias(z_size)
        else:
            self.position_bias = SimpleBias(num_rows if chunk_size is None else chunk_size)
        inner_dropout = shape.activation_dropout
        self.value_dropout = Dropout(shape.dropout if inner_dropout is None else inner_dropout)
        self.ema_dropout = Dropout(shape.dropout)
        self.attention_dropout = Dropout(shape.attention_dropout)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """What the residual connection adds; [B, L, D]."""
        gate_BLD, h_BLD = self.gate_and_candidate(x_BLD, mask_BL)
        return gate_BLD * (h_BLD - x_BLD)

    def gate_and_candidate(self, x_BLD: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
        """u and h, which make the output u * h + (1 - u) * x; [B, L, D] both."""
        v_BLV = self.values(x_BLD)
        gate_BLD, q_BLZ, k_BLZ, r_BLV, h_BLD = self.project(self.ema(x_BLD, mask_BL))
        o_BLV = self.attend(q_BLZ, k_BLZ, v_BLV, mask_BL)
        return gate_BLD, self.candidate(h_BLD, r_BLV, o_BLV)

    def values(self, x_BLD: Tensor) -> Tensor:
        """V, which reads the input, not its average; [B, L, V]."""
        return self.value_dropout(F.silu(self.value(x_BLD)))

    def project(self, ema_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gate u, queries (scaled for softmax), keys, gate r of the result, and H."""
        _, z_size = self.gamma.shape
        width, v_size = self.hidden.out_features, self.hidden.in_features
        base = self.maps(self.ema_dropout(ema_BLD))
        gate_BLD, shared_BLS, h_BLD = base.split((width, z_size + v_size, width), dim=-1)
        z_BLZ, r_BLV = F.silu(shared_BLS).split((z_size, v_size), dim=-1)
        scale = z_size**-0.5 if self.attention_function == "softmax" else 1.0
        q_BLZ = torch.addcmul(scale * self.beta[0], z_BLZ, scale * self.gamma[0])
        k_BLZ = torch.addcmul(self.beta[1], z_BLZ, self.gamma[1])
        return gate_BLD.sigmoid(), q_BLZ, k_BLZ, r_BLV, h_BLD

    def candidate(self, h_BLD: Tensor, r_BLV: Tensor, o_BLV: Tensor) -> Tensor:
        """h of H and of what attention has read; [B, L, D]."""
        return F.silu(h_BLD + self.hidden(r_BLV * o_BLV))

    def attend(self, q_BLZ: Tensor, k_BLZ: Tensor, v_BLV: Tensor, mask_BL: Tensor) -> Tensor:
        """Read values within each chunk; [B, L, V]."""
        batch_size, length = mask_BL.shape
        chunk = length if self.chunk_size is None else min(length, self.chunk_size)
        padding = -length % chunk
        if padding:
            q_BLZ, k_BLZ, v_BLV = (F.pad(x, (0, 0, 0, padding)) for x in (q_BLZ, k_BLZ, v_BLV))
            mask_BL = F.pad(mask_BL, (0, padding))
        q, k, v = (x.unflatten(1, (-1, chunk)).flatten(0, 1) for x in (q_BLZ, k_BLZ, v_BLV))
        mask_GC = mask_BL.unflatten(1, (-1, chunk)).flatten(0, 1)
        bias_CC = self.position_bias(chunk)
        hidden_GC = ~mask_GC
        if self.causal:
            later_CC = torch.ones_like(bias_CC, dtype=torch.bool).triu(1)
            bias_CC = bias_CC.masked_fill(later_CC, -torch.inf)
        if self.attention_function == "softmax":
            # A chunk of padding reads itself, so that it stays finite.
            hidden_GC = hidden_GC & mask_GC.any(dim=1, keepdim=True)
        elif self.causal:
            q = q / torch.arange(1, chunk + 1, device=q.device, dtype=q.dtype)[:, None]
        else:
            q = q / mask_GC.sum(dim=1).clamp(min=1).to(q.dtype)[:, None, None]
        y_GCV = attend_in_chunks(
            q,
            k,
            v,
            bias_CC,
            hidden_GC,
            function=self.attention_function,
            dropout=self.attention_dropout.p if self.training else 0.0,
        )
        return y_GCV.unflatten(0, (batch_size, -1)).flatten(1, 2)[:, :length]

    def start(self, batch_size: int) -> MegaState:
        """State before the first position, for `step`.

        Raises:
            ValueError: the model is not causal.
        """
        check_stepwise(self.causal)
        empty_B0 = self.gamma.new_zeros(batch_size, 0)
        return MegaState(
            average=self.ema.start(batch_size),
            k_BCZ=empty_B0[..., None].expand(-1, -1, self.gamma.shape[1]),
            v_BCV=empty_B0[..., None].expand(-1, -1, self.hidden.in_features),
        )

    def step(self, x_B1D: Tensor, state: MegaState) -> tuple[Tensor, MegaState]:
        """The next position alone: what the residual connection adds [B, 1, D], and the next state.

        Raises:
            ValueError: without chunks, a position behind `shape.max_length`.
        """
        gate_B1D, h_B1D, state = self.step_gate_and_candidate(x_B1D, state)
        return gate_B1D * (h_B1D - x_B1D), state

    def step_gate_and_candidate(
        self, x_B1D: Tensor, state: MegaState
    ) -> tuple[Tensor, Tensor, MegaState]:
        """u and h of the next position alone, and the next state."""
        ema_BD, average = self.ema.step(x_B1D[:, 0], state.average)
        gate_B1D, q_B1Z, k_B1Z, r_B1V, h_B1D = self.project(ema_BD[:, None])
        v_B1V = self.values(x_B1D)
        k_BCZ, v_BCV = state.k_BCZ, state.v_BCV
        if k_BCZ.shape[1] == self.chunk_size:  # full: a new chunk begins
            k_BCZ, v_BCV = k_BCZ[:, :0], v_BCV[:, :0]
        k_BCZ, v_BCV = torch.cat([k_BCZ, k_B1Z], dim=1), torch.cat([v_BCV, v_B1V], dim=1)
        count = k_BCZ.shape[1]
        if self.attention_function != "softmax":
            q_B1Z = q_B1Z / count
        score_B1C = q_B1Z @ k_BCZ.mT + self.position_bias.distances(count)[:count]
        weight_B1C = self.attention_dropout(weights(score_B1C, self.attention_function))
        h_B1D = self.candidate(h_B1D, r_B1V, weight_B1C.to(v_BCV.dtype) @ v_BCV)
        return gate_B1D, h_B1D, MegaState(average, k_BCZ, v_BCV)


class MegaGates(MegaAttention):
    """The mixer in Mega's own block, which applies the gate itself: called, it gives u and h."""

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """As `gate_and_candidate`."""
        return self.gate_and_candidate(x_BLD, mask_BL)


class MegaBlock(Block):
    """Mega's own layer: gated attention and a feed-forward with silu, each with its norm.

    Unlike a plain block around the mixer, the gate acts on the stream itself, not on its norm, and
    dropout on the candidate before the gate.
    """

    def __init__(self, shape: Shape, mixer: nn.Module) -> None:
        super().__init__(shape, mixer)
        self.ffn.activation = nn.SiLU()  # type: ignore[assignment]

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix over positions, then transform each position; [B, L, D]."""
        return self.transform(self.attend(x_BLD, mask_BL), mask_BL)

    def attend(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Gated attention and its norm; [B, L, D]."""
        gate_BLD, h_BLD = self.mixer(self._mixer_input(x_BLD, mask_BL), mask_BL)
        y_BLD = x_BLD + gate_BLD * (self.dropout(h_BLD) - x_BLD)
        return y_BLD if self.pre_norm else self.norm1(y_BLD, mask_BL)

    def transform(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Feed-forward and its norm; [B, L, D]."""
        if self.pre_norm:
            return x_BLD + self.ffn(self.norm2(x_BLD, mask_BL))
        return self.norm2(x_BLD + self.ffn(x_BLD), mask_BL)

    def step(self, x_B1D: Tensor, mask_B1: Tensor, state: MegaState) -> tuple[Tensor, MegaState]:
        """The next position alone; [B, 1, D] and the state after it."""
        assert isinstance(self.mixer, MegaAttention)
        inner_B1D = self._mixer_input(x_B1D, mask_B1)
        gate_B1D, h_B1D, state = self.mixer.step_gate_and_candidate(inner_B1D, state)
        return self._finish(x_B1D + gate_B1D * (self.dropout(h_B1D) - x_B1D), mask_B1), state


class MegaEncoder(Encoder):
    """Encoder with Mega's gated attention, in the shared block or in Mega's own.

    The authors' models have `block="own"` and `shape.positions="none"`; for their options see
    `MegaAttention`.

    Args:
        shape: sizes and layout.
        block: shared: mixer and feed-forward as in every model; own: `MegaBlock`.

    Raises:
        ValueError: an option of `MegaAttention` is out of range, or block is unknown.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        ema_size: int = 4,
        bidirectional: bool = True,
        truncation: int | None = None,
        attention_function: AttentionFunction = "softmax",
        chunk_size: int | None = 128,
        z_size: int | None = None,
        v_size: int | None = None,
        position_bias: PositionBias = "simple",
        block: Literal["shared", "own"] = "shared",
        causal: bool = False,
    ) -> None:
        if block not in ("shared", "own"):
            raise ValueError(f"model.block={block}: expected shared or own")

        def mixer() -> nn.Module:
            return (MegaAttention if block == "shared" else MegaGates)(
                shape,
                ema_size=ema_size,
                bidirectional=bidirectional,
                truncation=truncation,
                attention_function=attention_function,
                chunk_size=chunk_size,
                z_size=z_size,
                v_size=v_size,
                position_bias=position_bias,
                causal=causal,
            )

        make_block: Callable[[Shape, nn.Module], nn.Module] = (
            Block if block == "shared" else MegaBlock
        )
        super().__init__(shape, mixer, make_block)
