"""Nystromformer: softmax attention through a few landmarks, O(L) in sequence length.

Source: Xiong et al. 2021, https://arxiv.org/abs/2102.03902, section 3 (attention, inverse by
iteration); the value convolution's kernel of 35 is from the authors' LRA code,
https://github.com/mlpen/Nystromformer.
Deviations from that code, each a matter of one row not depending on padding or on other rows, and
each with an option that brings the code's behaviour back: landmarks are means over a row's real
tokens (`padded_landmarks`), the inverse starts from each matrix's own scale (`pinv_init`).
Shapes: B batch, L length, D d_model, H heads, K head dim, M landmarks, T = 3 for query, key, value,
W width of the convolution.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from einops import rearrange
from torch import Tensor, nn

from models.convolution import short_convolution
from models.layers import StackedLinear, attend
from models.positions import Rotary
from models.shape import Shape

PinvInit = Literal["per_matrix", "global"]


class NystromAttention(nn.Module):
    """The mixer: softmax(Q K̂ᵀ) Z softmax(Q̂ Kᵀ) V + convolution(V), Z near softmax(Q̂ K̂ᵀ)⁻¹.

    Q̂ and K̂ are the landmarks: a row of n real tokens is cut into num_landmarks segments of equal
    length (to one token) and each segment gives its mean. A row with n <= num_landmarks gets exact
    softmax attention, whatever its neighbours. Any length from 1 works. A row of padding only
    mixes to zero.

    All attention maths runs in float32 or wider, also under autocast: the inverse has large entries
    and would amplify the rounding of half precision. There is no dropout on attention weights, as
    in the source.

    Args:
        num_landmarks: M. 128, for which the most complete published results exist; the authors'
            own runs use 32, 64, 128 and 256.
        pinv_iterations: steps of the inverse; 6 is far from converged, so the number matters.
        pinv_init: "per_matrix" scales each head's matrix by its own largest column sum;
            "global" by the largest of the whole batch, as the authors' code.
        conv_kernel_size: width of the depth-wise convolution over values; None turns it off.
        padded_landmarks: means over padded positions too, as the authors' code: padding counts as
            zeros and the segments follow the batch's padded length.
        zero_padding: with False, padded queries, keys and values enter the landmarks and the
            convolution as they are, as Hugging Face's version; needs padded_landmarks.
        causal: refused.

    Raises:
        ValueError: an option is out of range, or causal attention is asked for.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_landmarks: int = 128,
        pinv_iterations: int = 6,
        pinv_init: PinvInit = "per_matrix",
        conv_kernel_size: int | None = 35,
        padded_landmarks: bool = False,
        zero_padding: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        if causal:
            raise ValueError(
                "model.causal=true: Nystrom attention cannot be causal, since every landmark is a "
                "mean over later tokens too; use model=softmax or model=luna"
            )
        if num_landmarks < 1:
            raise ValueError(f"model.num_landmarks={num_landmarks}: expected at least 1")
        if pinv_iterations < 0:
            raise ValueError(f"model.pinv_iterations={pinv_iterations}: expected at least 0")
        if pinv_init not in get_args(PinvInit):
            raise ValueError(
                f"model.pinv_init={pinv_init!r}: expected one of {', '.join(get_args(PinvInit))}"
            )
        if conv_kernel_size is not None and (conv_kernel_size < 1 or conv_kernel_size % 2 == 0):
            raise ValueError(
                f"model.conv_kernel_size={conv_kernel_size}: expected an odd width, or null for off"
            )
        if not zero_padding and not padded_landmarks:
            raise ValueError(
                "model.zero_padding=false: only with model.padded_landmarks=true, since otherwise "
                "padding stays out of the landmarks"
            )
        self.num_heads = shape.num_heads
        self.num_landmarks = num_landmarks
        self.pinv_iterations = pinv_iterations
        self.pinv_init: PinvInit = pinv_init
        self.padded_landmarks = padded_landmarks
        self.zero_padding = zero_padding
        width = shape.num_heads * shape.attention_head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)
        self.conv_HW: nn.Parameter | None = None
        if conv_kernel_size is not None:
            # PyTorch's default for a convolution with this many inputs to one output.
            bound = 1 / math.sqrt(conv_kernel_size)
            self.conv_HW = nn.Parameter(
                torch.empty(shape.num_heads, conv_kernel_size).uniform_(-bound, bound)
            )

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; mask_BL is True at real tokens. Results at padding mean nothing."""
        qkv_BLTHK = rearrange(self.qkv(x_BLD), "b l (t h k) -> b l t h k", t=3, h=self.num_heads)
        y_BHLK = self.attend(self.rotary.stacked(qkv_BLTHK, 2), mask_BL)
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)"))

    def attend(self, qkv_BLTHK: Tensor, mask_BL: Tensor) -> Tensor:
        """Attention and convolution of projected tokens -> [B, H, L, K], before `out`."""
        dtype = qkv_BLTHK.dtype
        with torch.autocast(qkv_BLTHK.device.type, enabled=False):
            qkv_BLTHK = qkv_BLTHK.to(torch.promote_types(dtype, torch.float32))
            if self.zero_padding:
                # With heads and parts in one axis: five axes against one take five times as long.
                flat_BLE = qkv_BLTHK.flatten(2) * mask_BL[:, :, None].to(qkv_BLTHK.dtype)
                qkv_BLTHK = flat_BLE.view(qkv_BLTHK.shape)
            q_BHLK, k_BHLK, v_BHLK = rearrange(qkv_BLTHK, "b l t h k -> t b h l k")
            if mask_BL.shape[1] <= self.num_landmarks:
                y_BHLK = attend(q_BHLK, k_BHLK, v_BHLK, mask_BL)
            else:
                y_BHLK = self._through_landmarks(qkv_BLTHK, q_BHLK, k_BHLK, v_BHLK, mask_BL)
            if self.conv_HW is not None:
                y_BHLK = y_BHLK + short_convolution(v_BHLK, self.conv_HW.to(v_BHLK.dtype))
        return y_BHLK.to(dtype)

    def _through_landmarks(
        self, qkv_BLTHK: Tensor, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLK: Tensor, mask_BL: Tensor
    ) -> Tensor:
        segment_BL, count_BM = segments(
            mask_BL, num_landmarks=self.num_landmarks, padded=self.padded_landmarks
        )
        landmarks_BMTHK = segment_means(qkv_BLTHK, segment_BL, count_BM)
        ql_BHMK, kl_BHMK, vl_BHMK = rearrange(landmarks_BMTHK, "b m t h k -> t b h m k")

        # Right to left, so that nothing is ever [L, L]; the scale 1/sqrt(K) is in each product.
        w_BHMK = attend(ql_BHMK, k_BHLK, v_BHLK, mask_BL)
        logits_BHMM = ql_BHMK @ kl_BHMK.mT * q_BHLK.shape[-1] ** -0.5
        real_BM = short_B111 = None
        if not self.padded_landmarks:
            # A short row has one landmark per token, so softmax(Q K̂ᵀ) V̂ is exact attention. Its
            # inverse is computed with the others' (no branch on data) and then left out.
            num_tokens_B1 = mask_BL.sum(dim=1, keepdim=True)
            real_BM = torch.arange(self.num_landmarks, device=mask_BL.device) < num_tokens_B1
            short_B111 = (num_tokens_B1 <= self.num_landmarks)[..., None, None]
            # Uniform matrices have the smallest scale there is, so "global" does not see them.
            logits_BHMM = logits_BHMM.masked_fill(short_B111, 0.0)
        w_BHMK = inverse_times(
            logits_BHMM.softmax(dim=-1),
            w_BHMK,
            num_iterations=self.pinv_iterations,
            init=self.pinv_init,
        )
        if short_B111 is not None:
            w_BHMK = torch.where(short_B111, vl_BHMK, w_BHMK)
        return attend(q_BHLK, kl_BHMK, w_BHMK, real_BM)


def segments(mask_BL: Tensor, *, num_landmarks: int, padded: bool) -> tuple[Tensor, Tensor]:
    """Segment of every position [B, L], and the divisor of every segment's mean [B, M].

    Segment j of a row with n real tokens holds its tokens floor(j n / m) to floor((j + 1) n / m),
    the second not included, with m = min(M, n); padding gets any segment. With padded=True it holds
    the positions j s to (j + 1) s of the padded length, s = ceil(L / M), and the divisor is s.
    """
    batch_size, length = mask_BL.shape
    if padded:
        size = -(-length // num_landmarks)
        segment_L = torch.arange(length, device=mask_BL.device) // size
        count_BM = segment_L.new_full((batch_size, num_landmarks), size)
        return segment_L.expand(batch_size, -1), count_BM
    num_tokens_B1 = mask_BL.sum(dim=1, keepdim=True).clamp(min=1)
    num_segments_B1 = num_tokens_B1.clamp(max=num_landmarks)
    # Token r is in the largest j with floor(j n / m) <= r, which is ceil((r + 1) m / n) - 1.
    segment_BL = (mask_BL.cumsum(dim=1) * num_segments_B1 - 1).clamp(min=0) // num_tokens_B1
    edge = torch.arange(num_landmarks + 1, device=mask_BL.device)
    edge_BM = edge * num_tokens_B1 // num_segments_B1
    return segment_BL, edge_BM.diff(dim=1)


def segment_means(x_BLTHK: Tensor, segment_BL: Tensor, count_BM: Tensor) -> Tensor:
    """Sums of the positions of each segment, divided by its count -> [B, M, T, H, K]."""
    batch_size, num_segments = count_BM.shape
    row_B1 = torch.arange(batch_size, device=x_BLTHK.device)[:, None]
    index = (row_B1 * num_segments + segment_BL).flatten()
    sums = x_BLTHK.new_zeros(batch_size * num_segments, *x_BLTHK.shape[2:])
    sums = sums.index_add(0, index, x_BLTHK.flatten(0, 1))
    return sums.unflatten(0, (batch_size, num_segments)) / count_BM[:, :, None, None, None]


def inverse_times(a_BHMM: Tensor, w_BHMK: Tensor, *, num_iterations: int, init: PinvInit) -> Tensor:
    """Z W, where Z approximates the pseudo-inverse of A by the paper's iteration.

    Z₀ = Aᵀ / c, then Z ← ¼ Z (13 I - Y (15 I - Y (7 I - Y))) with Y = A Z. c is the largest column
    sum, of each matrix or ("global") of the whole batch; rows of A sum to one, so that is the
    product of its two norms.
    """
    sums_BHM = a_BHMM.sum(dim=-2)
    if init == "global":
        z_BHMM = a_BHMM.mT / sums_BHM.max()
    else:
        z_BHMM = a_BHMM.mT / sums_BHM.max(dim=-1).values[..., None, None]
    # From here on batch and heads are one dimension, as baddbmm wants it: each line is one product
    # with its additions folded in.
    a, z, w = a_BHMM.flatten(0, 1), z_BHMM.flatten(0, 1), w_BHMK.flatten(0, 1)
    for _ in range(num_iterations - 1):
        y = a @ z
        p = torch.baddbmm(y, y, y, beta=-7)  # Y² - 7 Y
        p = torch.baddbmm(y, y, p, beta=15)  # Y³ - 7 Y² + 15 Y
        z = torch.baddbmm(z, z, p, beta=13 / 4, alpha=-1 / 4)
    if num_iterations > 0:
        # The last step only needs Z W: products with W, which is narrower than Z.
        y, t = a @ z, w
        for coefficient in (7, 15, 13):
            t = torch.baddbmm(w, y, t, beta=coefficient, alpha=-1)
        w = t / 4
    return (z @ w).unflatten(0, a_BHMM.shape[:2])
