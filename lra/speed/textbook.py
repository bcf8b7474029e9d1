"""What our models are measured against in floors: attention as its formulas stand, and none.

Each is a mixer inside the same encoder (embedding, norms, feed-forward, pooling, head and sizes),
so only the attention differs; not models of the arena. Benchmarks have no padding, so only softmax
and Mega heed the mask.
Shapes: B batch, L length, D d_model, H heads, K head dim, M landmarks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from models.layers import StackedLinear
from models.shape import Shape


class TextbookAttention(nn.Module):
    """Softmax attention as textbooks write it: the [L, L] weights are formed, dropped and kept.

    Padding is hidden in the [L, L] scores, whether there is any or not.
    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.dropout = nn.Dropout(shape.attention_dropout)
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        q_BHLK, k_BHLK, v_BHLK = rearrange(
            self.qkv(x_BLD), "b l (t h k) -> t b h l k", t=3, h=self.num_heads
        )
        score_BHLL = q_BHLK @ k_BHLK.mT / math.sqrt(q_BHLK.shape[-1])
        score_BHLL = score_BHLL.masked_fill(~mask_BL[:, None, None], -torch.inf)
        weight_BHLL = self.dropout(score_BHLL.softmax(dim=-1))
        return self.out(rearrange(weight_BHLL @ v_BHLK, "b h l k -> b l (h k)"))


class TextbookNystrom(nn.Module):
    """Nystrom attention as the paper writes it, left to right, with PyTorch's own convolution.

    Source: Xiong et al. 2021, https://arxiv.org/abs/2102.03902, section 3. Zeros behind the tokens
    make the length a multiple of M.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_landmarks: int = 128,
        pinv_iterations: int = 6,
        conv_kernel_size: int = 35,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_landmarks = shape.num_heads, num_landmarks
        self.pinv_iterations = pinv_iterations
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.conv = nn.Conv2d(
            shape.num_heads,
            shape.num_heads,
            (conv_kernel_size, 1),
            padding=(conv_kernel_size // 2, 0),
            groups=shape.num_heads,
            bias=False,
        )

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        length = x_BLD.shape[1]
        x_BLD = F.pad(x_BLD, (0, 0, 0, -length % self.num_landmarks))
        q_BHLK, k_BHLK, v_BHLK = rearrange(
            self.qkv(x_BLD), "b l (t h k) -> t b h l k", t=3, h=self.num_heads
        )
        q_BHLK = q_BHLK / math.sqrt(q_BHLK.shape[-1])
        ql_BHMK, kl_BHMK = (
            reduce(part, "b h (m s) k -> b h m k", "mean", m=self.num_landmarks)
            for part in (q_BHLK, k_BHLK)
        )
        left_BHLM = (q_BHLK @ kl_BHMK.mT).softmax(dim=-1)
        a_BHMM = (ql_BHMK @ kl_BHMK.mT).softmax(dim=-1)
        right_BHML = (ql_BHMK @ k_BHLK.mT).softmax(dim=-1)
        identity_MM = torch.eye(self.num_landmarks, device=x_BLD.device)
        z_BHMM = a_BHMM.mT / a_BHMM.sum(dim=-2).max()
        for _ in range(self.pinv_iterations):
            y_BHMM = a_BHMM @ z_BHMM
            inner_BHMM = 15 * identity_MM - y_BHMM @ (7 * identity_MM - y_BHMM)
            z_BHMM = 0.25 * z_BHMM @ (13 * identity_MM - y_BHMM @ inner_BHMM)
        y_BHLK = left_BHLM @ z_BHMM @ (right_BHML @ v_BHLK) + self.conv(v_BHLK)
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)")[:, :length])


class TextbookS4D(nn.Module):
    """S4D's stand-alone layer as its formulas stand: every power of every state, one long FFT.

    Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893, equations 3 and 8; zero-order hold,
    initialisation lin, one direction, features before positions.
    """

    def __init__(self, shape: Shape, *, state_size: int = 64) -> None:
        super().__init__()
        width, half = shape.d_model, state_size // 2
        self.log_dt = nn.Parameter(torch.empty(width).uniform_(math.log(0.001), math.log(0.1)))
        self.log_a_real = nn.Parameter(torch.full((width, half), math.log(0.5)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(half).repeat(width, 1))
        self.c = nn.Parameter(torch.randn(width, half, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(width))
        self.dropout = nn.Dropout(shape.dropout)
        self.out = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        length = x_BLD.shape[1]
        a_DN = torch.complex(-self.log_a_real.exp(), self.a_imag)
        step_DN = a_DN * self.log_dt.exp()[:, None]
        powers_DNL = (step_DN[..., None] * torch.arange(length, device=x_BLD.device)).exp()
        weight_DN = torch.view_as_complex(self.c) * (step_DN.exp() - 1) / a_DN
        kernel_DL = 2 * torch.einsum("dn,dnl->dl", weight_DN, powers_DNL).real
        u_BDL = x_BLD.mT
        spectrum = torch.fft.rfft(u_BDL, n=2 * length) * torch.fft.rfft(kernel_DL, n=2 * length)
        y_BDL = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
        y_BDL = self.dropout(F.gelu(y_BDL + u_BDL * self.skip[:, None]))
        return F.glu(self.out(y_BDL), dim=1).mT


class TextbookScan(nn.Module):
    """A diagonal recurrence as a parallel scan: log2 L passes over complex states, then a gate.

    What LRU and S5 are in JAX, in PyTorch's operations; one direction and N complex states.
    Source: Orvieto et al. 2023, https://arxiv.org/abs/2303.06349, appendix A; the scan is Hillis
    and Steele's.
    """

    def __init__(self, shape: Shape, *, state_size: int = 32) -> None:
        super().__init__()
        width, n = shape.d_model, state_size
        self.nu_log = nn.Parameter(torch.empty(n).uniform_(0.01, 0.99).log().mul(-0.5).log())
        self.theta_log = nn.Parameter(torch.empty(n).uniform_(0.01, 6.28).log())
        self.b = nn.Parameter(torch.randn(n, width, 2) * (2 * width) ** -0.5)
        self.c = nn.Parameter(torch.randn(width, n, 2) * n**-0.5)
        self.skip = nn.Parameter(torch.randn(width))
        self.dropout = nn.Dropout(shape.dropout)
        self.out = nn.Linear(width, 2 * width)

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]."""
        decay_N = torch.complex(-self.nu_log.exp(), self.theta_log.exp()).exp()
        h_BLN = x_BLD.to(decay_N.dtype) @ torch.view_as_complex(self.b).mT
        distance = 1
        while distance < x_BLD.shape[1]:
            earlier_BLN = F.pad(h_BLN[:, :-distance], (0, 0, distance, 0))
            h_BLN, decay_N, distance = h_BLN + decay_N * earlier_BLN, decay_N**2, 2 * distance
        y_BLD = (h_BLN @ torch.view_as_complex(self.c).mT).real + self.skip * x_BLD
        return F.glu(self.out(self.dropout(F.gelu(y_BLD, approximate="tanh"))))


class TextbookMega(nn.Module):
    """Mega's gated attention as its formulas stand: every power of the average, formed weights.

    Source: Ma et al. 2023, https://arxiv.org/abs/2209.10655, equations 3 to 16; softmax within
    chunks, two directions, simple position bias.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        z_size: int = 32,
        v_size: int = 64,
        ema_size: int = 4,
        chunk_size: int = 128,
    ) -> None:
        super().__init__()
        width = shape.d_model
        self.widths = [width, z_size, v_size, width]
        self.chunk_size = chunk_size
        self.delta, self.alpha, self.beta, self.gamma = (
            nn.Parameter(torch.randn(2 * width, ema_size) * std) for std in (0.2, 0.2, 1.0, 1.0)
        )
        self.omega = nn.Parameter(torch.randn(width))
        self.value = nn.Linear(width, v_size)
        self.base = nn.Linear(width, sum(self.widths))
        self.hidden = nn.Linear(v_size, width)
        self.scales = nn.Parameter(torch.randn(2, z_size) * 0.02)
        self.shifts = nn.Parameter(torch.zeros(2, z_size))
        self.distance_bias = nn.Parameter(torch.randn(2 * chunk_size - 1) * 0.02)
        self.dropout = nn.Dropout(shape.dropout)
        self.attention_dropout = nn.Dropout(shape.attention_dropout)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix all positions; [B, L, D]. Zeros make the length a multiple of the chunk."""
        length, filling = x_BLD.shape[1], -x_BLD.shape[1] % self.chunk_size
        x_BLD, mask_BL = F.pad(x_BLD, (0, 0, 0, filling)), F.pad(mask_BL, (0, filling))
        v_BLV = F.silu(self.value(x_BLD))
        u_BLD, z_BLZ, r_BLV, h_BLD = self.base(self.average(x_BLD)).split(self.widths, dim=-1)
        z_BLZ, gate_BLV = F.silu(z_BLZ), F.silu(r_BLV)
        q, k, v = (
            rearrange(part, "b (g c) k -> b g c k", c=self.chunk_size)
            for part in (
                z_BLZ * self.scales[0] + self.shifts[0],
                z_BLZ * self.scales[1] + self.shifts[1],
                v_BLV,
            )
        )
        place_C = torch.arange(self.chunk_size, device=x_BLD.device)
        bias_CC = self.distance_bias[self.chunk_size - 1 + place_C - place_C[:, None]]
        score_BGCC = q @ k.mT / math.sqrt(q.shape[-1]) + bias_CC
        mask_BGC = rearrange(mask_BL, "b (g c) -> b g c", c=self.chunk_size)
        weight_BGCC = score_BGCC.masked_fill(~mask_BGC[:, :, None], -1e9).softmax(dim=-1)
        read_BLV = rearrange(self.attention_dropout(weight_BGCC) @ v, "b g c k -> b (g c) k")
        update_BLD = self.dropout(F.silu(h_BLD + self.hidden(gate_BLV * read_BLV)))
        return (torch.sigmoid(u_BLD) * (update_BLD - x_BLD))[:, :length]

    def average(self, x_BLD: Tensor) -> Tensor:
        """The moving average in both directions, with its skip and activation; [B, L, D]."""
        length = x_BLD.shape[1]
        share_DN = torch.sigmoid(self.delta)
        stay_DN = 1 - share_DN * torch.sigmoid(self.alpha)
        powers_DNL = (stay_DN.log()[..., None] * torch.arange(length, device=x_BLD.device)).exp()
        weight_DN = share_DN * self.beta * self.gamma / math.sqrt(share_DN.shape[1])
        kernel_DL = torch.einsum("dn,dnl->dl", weight_DN, powers_DNL)
        back_DL, ahead_DL = kernel_DL.chunk(2)
        # What looks ahead lies reversed, from `length - 1` positions before the present on.
        both_DL = F.pad(back_DL, (length - 1, 0)) + F.pad(ahead_DL.flip(-1), (0, length - 1))
        x_BDL, n = x_BLD.mT, 3 * length
        spectrum = torch.fft.rfft(x_BDL, n=n) * torch.fft.rfft(both_DL, n=n)
        y_BDL = torch.fft.irfft(spectrum, n=n)[..., length - 1 : 2 * length - 1]
        return self.dropout(F.silu(y_BDL.mT + self.omega * x_BLD))


class NoMixer(nn.Module):
    """No attention at all: what the rest of the encoder costs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x_BLD: Tensor, _mask_BL: Tensor) -> Tensor:
        """The input."""
        return x_BLD
