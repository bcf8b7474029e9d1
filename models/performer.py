"""Performer: softmax attention through random features (FAVOR+), linear in length.

Source: Choromanski et al. 2021, https://arxiv.org/abs/2009.14794: positive features section 3.2,
orthogonal ones 3.3, generalised kernels 3.1. As in the code of the Long Range Arena and in
performer-pytorch, a small number is added to every feature. Deviations from both: random features
are drawn once, from the run's seed, and orthogonal ones point everywhere with the same probability;
the largest exponent of the keys, by which they are scaled, is taken over real tokens and, in causal
attention, not over later ones.

Shapes: B batch, L length, D d_model, H heads, K head dim, M features, J = K + 1, T = 3 for query,
key, value. `mask` is bool, True = real token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.kernels import all_sums, causal_sums, widened, with_count
from models.layers import StackedLinear, check_causal, check_stepwise
from models.positions import Rotary
from models.shape import Shape, check_positive

Kernel = Literal["softmax", "relu"]
Features = Literal["positive", "trigonometric"]

EPSILON = {"softmax": 1e-6, "relu": 1e-3}  # added to every feature
LEAST_WEIGHT = 1e-6  # sums of weights of either sign that are nearer to 0 are moved away
# Keys of causal attention are exp(u - g - offset), at most exp of the first number; queries get a
# factor of at most exp of the second. float32 ends at exp(88), float64 at exp(709).
LARGEST_EXPONENTS = {torch.float32: (60.0, 80.0), torch.float64: (600.0, 700.0)}
# The offset, |w|^2 / 2 less the first number, grows with the width K of a head. As it nears the
# second, all keys but the longest underflow, and epsilon is all that is left of their features.
WIDEST_HEAD = {torch.float32: 160, torch.float64: 2048}


@dataclass(frozen=True)
class PerformerState:
    """What step-by-step causal attention carries; nothing in it grows with the number of steps."""

    sum_BHMJ: Tensor  # of outer products of key features and values
    largest_BH11: Tensor  # exponent of the keys
    num_steps: int = 0


class PerformerAttention(nn.Module):
    """The mixer: sum_j w_ij v_j / sum_j w_ij with w_ij = phi(q_i) . phi(k_j).

    With M random rows w and x scaled by K^(-1/4):

    - softmax, positive: phi(x) = exp(w x - |x|^2 / 2) + epsilon, after division by its largest
      exp(w x): a query's own, or that of all keys of its row and head. w_ij estimates
      exp(q_i . k_j / sqrt(K)).
    - softmax, trigonometric: phi(x) = exp(|x|^2 / 2) (cos(w x), sin(w x)): the same in the mean,
      but with weights of either sign and large variance.
    - relu: phi(x) = relu(w x) + epsilon, x not scaled; without rows, relu(x) + epsilon.

    Sums run over real tokens, in float32 or wider also under autocast; a row of padding only mixes
    to zero. Causal softmax features of heads wider than 160 leave the range of float32 and are
    worked out in float64. There are no weights to drop, so attention dropout does not act. The
    largest exponents are constants to the gradient.

    Args:
        shape: heads, widths and `attention_bias` are read here.
        kernel: softmax or relu.
        features: of kernel=softmax, positive or trigonometric.
        num_features: M; None, with kernel=relu: no random rows, each column is a feature.
        orthogonal: rows are orthogonal in blocks of K; False: independent.
        ortho_scaling: norms of orthogonal rows: 0 as of independent Gaussian rows, 1 all sqrt(K).
        epsilon: added to every feature; None: 1e-6 for softmax, 1e-3 for relu.
        scale_twice: softmax of q . k / K, as Nystromformer's LRA code, which scales once more than
            the library that it calls.
        padded_keys: a padded position counts as a token with key and value zero, as there; then
            results depend on how far a batch is padded.
        causal: position t sees positions 0 .. t only: the result at t is what the attention over
            positions 0 .. t alone gives its last one.

    Raises:
        ValueError: an option is out of range or does not act together with the others, causal goes
            with a pooling that reads the first position, or causal softmax features with heads
            wider than 2048, which leave float64's range too.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        kernel: Kernel = "softmax",
        features: Features = "positive",
        num_features: int | None = 64,
        orthogonal: bool = True,
        ortho_scaling: int = 0,
        epsilon: float | None = None,
        scale_twice: bool = False,
        padded_keys: bool = False,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_causal(shape, causal)
        if kernel not in get_args(Kernel):
            raise ValueError(f"model.kernel={kernel}: expected {' or '.join(get_args(Kernel))}")
        if features not in get_args(Features):
            raise ValueError(
                f"model.features={features}: expected {' or '.join(get_args(Features))}"
            )
        trigonometric = features == "trigonometric"
        if num_features is not None and num_features < 1:
            raise ValueError(f"model.num_features={num_features}: expected at least 1, or null")
        if num_features is None and kernel == "softmax":
            raise ValueError(
                "model.num_features=null: only with model.kernel=relu, since the softmax kernel "
                "needs random features"
            )
        if ortho_scaling not in (0, 1):
            raise ValueError(f"model.ortho_scaling={ortho_scaling}: expected 0 or 1")
        if ortho_scaling == 1 and (not orthogonal or num_features is None):
            raise ValueError(
                "model.ortho_scaling=1: acts only with model.orthogonal=true and random features"
            )
        if not orthogonal and num_features is None:
            raise ValueError("model.orthogonal=false: acts only with random features")
        if epsilon is not None:
            check_positive("model.epsilon", epsilon)
        if kernel == "relu" and (trigonometric or scale_twice):
            raise ValueError(
                "model.kernel=relu: model.features=trigonometric and model.scale_twice=true act "
                "only with model.kernel=softmax; set model.features=positive and "
                "model.scale_twice=false"
            )
        if shape.is_rotary and num_features is None:
            raise ValueError(
                f"shape.positions={shape.positions} with model.num_features=null: products of such "
                "features do not depend on the distance of positions alone; use "
                "model.num_features=64, or shape.positions=learned, sinusoidal or none"
            )
        if trigonometric and epsilon is not None:
            raise ValueError(
                f"model.epsilon={epsilon}: acts only with model.features=positive or "
                "model.kernel=relu; set model.epsilon=null"
            )
        if trigonometric and causal:
            raise ValueError(
                "model.features=trigonometric with model.causal=true: the features of a key grow "
                "without bound, so they can be scaled only when all keys are known; use "
                "model.features=positive"
            )
        self.num_heads = shape.num_heads
        self.head_dim = shape.attention_head_dim
        needs_range = causal and kernel == "softmax"
        if needs_range and self.head_dim > WIDEST_HEAD[torch.float64]:
            key = "d_model / shape.num_heads" if shape.head_dim is None else "head_dim"
            raise ValueError(
                f"shape.{key}={self.head_dim}: expected at most {WIDEST_HEAD[torch.float64]} with "
                "model.causal=true, since wider softmax features of keys leave the range of "
                "float64; use narrower heads or model.kernel=relu"
            )
        self.in_float64 = needs_range and self.head_dim > WIDEST_HEAD[torch.float32]
        self.kernel: Kernel = kernel
        self.features: Features = features
        self.epsilon = EPSILON[kernel] if epsilon is None else epsilon
        self.scale = self.head_dim ** (-0.5 if scale_twice else -0.25)
        self.padded_keys = padded_keys
        self.causal = causal
        width = shape.num_heads * self.head_dim
        self.qkv = StackedLinear(shape.d_model, width, parts=3, bias=shape.attention_bias)
        self.out = nn.Linear(width, shape.d_model, bias=shape.attention_bias)
        self.rotary = Rotary(shape)
        self.projection_MK: Tensor | None
        projection_MK = None
        if num_features is not None and orthogonal:
            projection_MK = orthogonal_rows(num_features, self.head_dim, scaling=ortho_scaling)
        elif num_features is not None:
            projection_MK = torch.randn(num_features, self.head_dim)
        self.register_buffer("projection_MK", projection_MK)

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding is read by nobody. [B, L, D]."""
        y_BHLK = self.attend(self._project(x_BLD), mask_BL)
        return self.out(rearrange(y_BHLK, "b h l k -> b l (h k)"))

    def attend(self, qkv_TBHLK: Tensor, mask_BL: Tensor) -> Tensor:
        """Attention between the linear maps; [B, H, L, K]."""
        with torch.autocast(qkv_TBHLK.device.type, enabled=False):
            q_BHLK, k_BHLK, v_BHLK = self._widened(qkv_TBHLK)
            q_BHLK, k_BHLK = self.rotary(q_BHLK, k_BHLK)
            if self.padded_keys:
                padding_B1L1 = ~mask_BL[:, None, :, None]
                k_BHLK, v_BHLK = (x.masked_fill(padding_B1L1, 0.0) for x in (k_BHLK, v_BHLK))
                mask_BL = torch.ones_like(mask_BL)
            v_BHLJ = with_count(v_BHLK, mask_BL)
            if self.causal:
                none_yet = q_BHLK.new_full((), -torch.inf)
                q_BHLM, k_BHLM, _ = self._causal_features(q_BHLK, k_BHLK, mask_BL, none_yet)
                sum_BHLJ = causal_sums(q_BHLM, k_BHLM, v_BHLJ)
            elif self.features == "trigonometric":
                sum_BHLJ = self._trigonometric_sums(q_BHLK, k_BHLK, v_BHLJ, mask_BL)
            else:
                q_BHLM, k_BHLM = self._features(q_BHLK, k_BHLK, mask_BL)
                sum_BHLJ = all_sums(q_BHLM, k_BHLM, v_BHLJ, floor=self.epsilon)
            signed = self.features == "trigonometric"
            return weighted_mean(sum_BHLJ, signed=signed).to(qkv_TBHLK.dtype)

    def start(self, batch_size: int) -> PerformerState:
        """State of causal attention before the first position.

        Raises:
            ValueError: the model is not causal.
        """
        check_stepwise(self.causal)
        num_features = self.head_dim
        if self.projection_MK is not None:
            num_features = len(self.projection_MK) + (self.kernel == "softmax")
        zero = self._widened(self.qkv.weight.new_zeros(()))
        return PerformerState(
            sum_BHMJ=zero.repeat(batch_size, self.num_heads, num_features, self.head_dim + 1),
            largest_BH11=zero.repeat(batch_size, self.num_heads, 1, 1) - torch.inf,
        )

    def step(self, x_B1D: Tensor, state: PerformerState) -> tuple[Tensor, PerformerState]:
        """The next position alone, of causal attention; [B, 1, D] and the state after it."""
        qkv_TBH1K = self._project(x_B1D)
        with torch.autocast(x_B1D.device.type, enabled=False):
            mask_B1 = torch.ones(x_B1D.shape[:2], dtype=torch.bool, device=x_B1D.device)
            q_BH1K, k_BH1K, v_BH1K = self._widened(qkv_TBH1K)
            q_BH1K, k_BH1K = self.rotary(q_BH1K, k_BH1K, first=state.num_steps)
            q_BH1M, k_BH1M, largest_BH11 = self._causal_features(
                q_BH1K, k_BH1K, mask_B1, state.largest_BH11
            )
            sum_BHMJ = state.sum_BHMJ + k_BH1M.mT @ with_count(v_BH1K, mask_B1)
            y_BH1K = weighted_mean(q_BH1M @ sum_BHMJ, signed=False).to(qkv_TBH1K.dtype)
        y_B1D = self.out(rearrange(y_BH1K, "b h l k -> b l (h k)"))
        return y_B1D, PerformerState(sum_BHMJ, largest_BH11, state.num_steps + 1)

    def _project(self, x_BLD: Tensor) -> Tensor:
        parts = rearrange(self.qkv(x_BLD), "b l (t h k) -> t b h l k", t=3, h=self.num_heads)
        return parts.contiguous()

    def _widened(self, x: Tensor) -> Tensor:
        """In the precision of the features and their sums."""
        return x.double() if self.in_float64 else widened(x)

    def _features(self, q_BHLK: Tensor, k_BHLK: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Of queries and keys, without epsilon; [B, H, L, M] each. Padding holds finite numbers."""
        if self.kernel == "relu":
            return self._rectified(q_BHLK), self._rectified(k_BHLK)
        u_BHLM, half_BHL1, largest_BHL1 = self._exponents(k_BHLK, mask_BL)
        largest_BH11 = finite(largest_BHL1.amax(dim=2, keepdim=True))
        k_BHLM = u_BHLM.add_(-half_BHL1 - largest_BH11).exp_()
        return self._query_features(q_BHLK), k_BHLM

    def _causal_features(
        self, q_BHLK: Tensor, k_BHLK: Tensor, mask_BL: Tensor, before_BH11: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features whose products are the weights of all pairs j <= i; [B, H, L, M] each.

        Given and returned besides is the largest exponent of the keys before these and up to each.
        The largest exponent s_i of keys 0 .. i belongs to row i, so it cannot scale the keys:
        phi(q_i) . (exp(u_j - g_j - s_i) + epsilon) is the product of (phi(q_i) exp(-s_i), epsilon
        times the sum of phi(q_i)) and (exp(u_j - g_j), 1), one feature more. What may overflow in
        exp(u_j - g_j), at most exp(|w|^2 / 2), a constant shifts back.
        """
        if self.kernel == "relu":
            q_BHLM, k_BHLM = self._features(q_BHLK, k_BHLK, mask_BL)
            return q_BHLM + self.epsilon, k_BHLM + self.epsilon, before_BH11
        assert self.projection_MK is not None
        largest_key, largest_factor = LARGEST_EXPONENTS[k_BHLK.dtype]
        offset = self._widened(self.projection_MK).square().sum(dim=1).amax() / 2 - largest_key
        offset = offset.clamp(min=0.0)
        u_BHLM, half_BHL1, largest_BHL1 = self._exponents(k_BHLK, mask_BL)
        largest_BHL1 = torch.maximum(largest_so_far(largest_BHL1), before_BH11)
        k_BHLM = F.pad(u_BHLM.add_(-half_BHL1 - offset).exp_(), (0, 1), value=1.0)
        q_BHLM = self._query_features(q_BHLK) + self.epsilon
        # Far below 0 the keys are so long that epsilon is all that is left of their features.
        scale_BHL1 = (offset - finite(largest_BHL1)).clamp(max=largest_factor).exp()
        floor_BHL1 = self.epsilon * q_BHLM.sum(dim=-1, keepdim=True)
        return torch.cat([q_BHLM * scale_BHL1, floor_BHL1], dim=-1), k_BHLM, largest_BHL1

    def _trigonometric_sums(
        self, q_BHLK: Tensor, k_BHLK: Tensor, v_BHLJ: Tensor, mask_BL: Tensor
    ) -> Tensor:
        """Weighted sums of values; [B, H, L, J]. A query's own factor would cancel: left out."""
        u_BHLM, _, _ = self._exponents(q_BHLK)
        q_BHLM = torch.cat([u_BHLM.cos(), u_BHLM.sin()], dim=-1)
        u_BHLM, half_BHL1, _ = self._exponents(k_BHLK)
        k_BHLM = torch.cat([u_BHLM.cos(), u_BHLM.sin()], dim=-1)
        half_BHL1 = half_BHL1.masked_fill(~mask_BL[:, None, :, None], -torch.inf)
        factor_BHL1 = (half_BHL1 - finite(half_BHL1.detach().amax(dim=2, keepdim=True))).exp()
        return all_sums(q_BHLM, k_BHLM, v_BHLJ * (factor_BHL1 / u_BHLM.shape[-1]))

    def _query_features(self, q_BHLK: Tensor) -> Tensor:
        """Positive ones without epsilon; [B, H, L, M]."""
        u_BHLM, half_BHL1, largest_BHL1 = self._exponents(q_BHLK)
        return u_BHLM.add_(-half_BHL1 - largest_BHL1).exp_()

    def _exponents(
        self, x_BHLK: Tensor, mask_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of scaled x: w x for all rows w, |x|^2 / 2, and the largest w x; [B, H, L, M], then 1.

        At padding |x|^2 / 2 is infinite, the largest w x minus infinity.
        """
        assert self.projection_MK is not None
        u_BHLM = x_BHLK @ (self._widened(self.projection_MK) * self.scale).T
        half_BHL1 = x_BHLK.square().sum(dim=-1, keepdim=True) * (self.scale**2 / 2)
        largest_BHL1 = largest(u_BHLM)
        if mask_BL is not None:
            padding_B1L1 = ~mask_BL[:, None, :, None]
            half_BHL1 = half_BHL1.masked_fill(padding_B1L1, torch.inf)
            largest_BHL1 = largest_BHL1.masked_fill(padding_B1L1, -torch.inf)
        return u_BHLM, half_BHL1, largest_BHL1

    def _rectified(self, x_BHLK: Tensor) -> Tensor:
        """Features of the relu kernel without epsilon; [B, H, L, M]."""
        if self.projection_MK is None:
            return x_BHLK.relu()
        return (x_BHLK @ widened(self.projection_MK).T).relu_()


def weighted_mean(sum_BHLJ: Tensor, *, signed: bool) -> Tensor:
    """Weighted sums of values by the sum of weights, which is the last column; [B, H, L, K]."""
    sum_BHLK, weight_BHL1 = sum_BHLJ.split((sum_BHLJ.shape[-1] - 1, 1), dim=-1)
    if signed:
        near_zero_BHL1 = weight_BHL1.abs() <= LEAST_WEIGHT
        weight_BHL1 = weight_BHL1 + 2 * LEAST_WEIGHT * near_zero_BHL1
    else:  # the sum is 0 only where there was no token
        weight_BHL1 = weight_BHL1.masked_fill(weight_BHL1 == 0, 1.0)
    return sum_BHLK * weight_BHL1.reciprocal()


def finite(x: Tensor) -> Tensor:
    """0 where there was nothing to take the largest of."""
    return x.masked_fill(x == -torch.inf, 0.0)


def largest(x_BHLM: Tensor) -> Tensor:
    """Over features, a constant to the gradient; [B, H, L, 1]."""
    return x_BHLM.detach().amax(dim=-1, keepdim=True)


def largest_so_far(x_BHL1: Tensor) -> Tensor:
    """Of positions 0 .. t; [B, H, L, 1]."""
    return x_BHL1.cummax(dim=2).values


def orthogonal_rows(num_rows: int, width: int, *, scaling: int) -> Tensor:
    """Random rows [num_rows, width], orthogonal in blocks of `width`.

    Their norms are those of independent Gaussian rows (scaling 0) or all sqrt(width) (1).
    """
    q_NKK, r_NKK = torch.linalg.qr(torch.randn(-(-num_rows // width), width, width))
    # Signs that the factorisation chooses are not random: uncorrected, rows point into one half of
    # space more often, and no number of them comes to the softmax kernel.
    q_NKK = q_NKK * r_NKK.diagonal(dim1=1, dim2=2).sign()[:, None]
    rows_MK = q_NKK.mT.flatten(0, 1)[:num_rows]
    if scaling == 1:
        return rows_MK * width**0.5
    return rows_MK * torch.randn(num_rows, width).norm(dim=1, keepdim=True)
