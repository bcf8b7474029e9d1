"""S5: one state-space system with many inputs and outputs in place of attention, O(L).

Source: Smith et al. 2023, https://arxiv.org/abs/2208.04933, section 3, and the authors' code,
github.com/lindermanlab/S5, where it differs: the default gate is half_glu1 and gelu is the tanh
form. One deviation from the code: padding counts as zeros, so that no row depends on it.

Shapes: B batch, L length, D d_model, N states that are kept, M states with the conjugates that are
left out, K states of one block.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from models.layers import lecun_normal_
from models.recurrence import DiagonalSystem, Gate, GatedRecurrence, RecurrentEncoder
from models.shape import Shape, check_positive

Discretization = Literal["zoh", "bilinear"]
CInit = Literal["lecun_normal", "trunc_standard_normal", "complex_normal"]


def hippo_eigenvalues(block_size: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues [K] and unit eigenvectors [K, K] of the normal part of HiPPO-LegS.

    Imaginary parts ascend, real parts are -1/2. With p_n = sqrt(n + 1/2) the matrix M + p p^T is
    -I / 2 plus a skew-symmetric matrix, which times -i is Hermitian.
    """
    root_K = (2 * torch.arange(block_size, dtype=torch.float64) + 1).sqrt()
    skew_KK = -0.5 * torch.outer(root_K, root_K)
    skew_KK = skew_KK.tril(-1) - skew_KK.tril(-1).mT
    imag_K, vectors_KK = torch.linalg.eigh(-1j * skew_KK)
    return torch.complex(torch.full_like(imag_K, -0.5), imag_K), vectors_KK


def kept_eigenvalues(state_size: int, num_blocks: int, *, conj_sym: bool) -> tuple[Tensor, Tensor]:
    """Initial Lambda [N] and eigenvectors [M, N]: the same block `num_blocks` times.

    With `conj_sym` the half of each block with negative imaginary parts stays.
    """
    block_size = state_size // num_blocks
    lambda_K, vectors_KK = hippo_eigenvalues(block_size)
    kept = block_size // 2 if conj_sym else block_size
    return lambda_K[:kept].repeat(num_blocks), torch.block_diag(
        *[vectors_KK[:, :kept]] * num_blocks
    )


def log_steps(share_N: Tensor, *, dt_min: float, dt_max: float) -> Tensor:
    """Logarithms of step sizes from dt_min (share 0) to dt_max (share 1); [N]."""
    low, high = torch.tensor([dt_min, dt_max], dtype=torch.float64).log()
    return low + share_N * (high - low)


class S5SSM(DiagonalSystem):
    """Lambda and B of a continuous system, discretised with a step size for each state.

    Args:
        shape: `d_model` is read here.
        state_size: M, `ssm_size` in the code.
        num_blocks: blocks of the initial state matrix.
        discretization: zoh: the input is held over a step; bilinear.
        conj_sym: keep one of each conjugate pair, N = M / 2, and double the output.
        clip_eigs: real parts of Lambda are at most -1e-4.
        step_rescale: factor of all step sizes.
        c_init: how C is drawn.
        dt_min: smallest initial step size.
        dt_max: largest.
        bidirectional: a second run from the end to the start.

    Raises:
        ValueError: an option is out of range.
    """

    GROUPS: ClassVar[dict[str, str]] = {
        **DiagonalSystem.GROUPS,
        "Lambda_re": "state",
        "Lambda_im": "state",
        "log_step": "step",
    }

    def __init__(
        self,
        shape: Shape,
        *,
        state_size: int,
        num_blocks: int,
        discretization: Discretization,
        conj_sym: bool,
        clip_eigs: bool,
        step_rescale: float,
        c_init: CInit,
        dt_min: float,
        dt_max: float,
        bidirectional: bool,
    ) -> None:
        if state_size < 1:
            raise ValueError(f"model.state_size={state_size}: expected at least 1")
        if conj_sym and state_size % 2:
            raise ValueError(
                f"model.state_size={state_size} with model.conj_sym=true: expected an even number, "
                "of which half is kept"
            )
        if num_blocks < 1 or state_size % num_blocks:
            raise ValueError(
                f"model.num_blocks={num_blocks}: expected a divisor of model.state_size="
                f"{state_size}"
            )
        if conj_sym and state_size // num_blocks % 2:
            raise ValueError(
                f"model.num_blocks={num_blocks} with model.conj_sym=true: expected an even number "
                f"of states in each block, not {state_size} / {num_blocks}"
            )
        for key, value, allowed in (
            ("discretization", discretization, get_args(Discretization)),
            ("c_init", c_init, get_args(CInit)),
        ):
            if value not in allowed:
                raise ValueError(f"model.{key}={value!r}: expected one of {', '.join(allowed)}")
        check_positive("model.step_rescale", step_rescale)
        if not 0 < dt_min < dt_max < math.inf:
            raise ValueError(
                f"model.dt_min={dt_min}, model.dt_max={dt_max}: expected 0 < dt_min < dt_max"
            )
        lambda_N, vectors_MN = kept_eigenvalues(state_size, num_blocks, conj_sym=conj_sym)
        super().__init__(
            shape,
            len(lambda_N),
            bidirectional=bidirectional,
            output_scale=2.0 if conj_sym else 1.0,
        )
        self.discretization, self.clip_eigs = discretization, clip_eigs
        self.step_rescale = step_rescale
        share_N = torch.rand(self.num_states, dtype=torch.float64)
        self.Lambda_re, self.Lambda_im, self.log_step = (
            nn.Parameter(x.to(self.D))
            for x in (
                lambda_N.real,
                lambda_N.imag,
                log_steps(share_N, dt_min=dt_min, dt_max=dt_max),
            )
        )
        with torch.no_grad():
            B_MD = torch.empty(state_size, shape.d_model, dtype=torch.float64)
            lecun_normal_(B_MD, state_size)
            B_ND = vectors_MN.mH @ B_MD.to(vectors_MN.dtype)
            self.B.copy_(torch.stack([B_ND.real, B_ND.imag]))
            for C in (self.C, self.backward_C):
                if C is not None:
                    C.copy_(draw_C(c_init, shape.d_model, vectors_MN))

    def decay_and_input(self) -> tuple[Tensor, Tensor]:
        """Complex decay [N] and input map [N, D] of the recurrence, in double precision."""
        real_N = self.Lambda_re.double()
        if self.clip_eigs:
            real_N = real_N.clamp(max=-1e-4)
        lambda_N = torch.complex(real_N, self.Lambda_im.double())
        step_N = self.step_rescale * self.log_step.double().exp()
        if self.discretization == "zoh":
            decay_N = (lambda_N * step_N).exp()
            gain_N = (decay_N - 1) / lambda_N
        else:
            half_N = lambda_N * step_N / 2
            decay_N = (1 + half_N) / (1 - half_N)
            gain_N = step_N / (1 - half_N)
        return decay_N, gain_N[:, None] * torch.complex(*self.B.double())


def draw_C(c_init: CInit, d_model: int, vectors_MN: Tensor) -> Tensor:
    """Initial C, planes [2, D, N]; but for complex_normal it meets the eigenvectors."""
    num_full, num_states = vectors_MN.shape
    if c_init == "complex_normal":
        return torch.randn(2, d_model, num_states) * 0.5**0.5
    C_2DM = torch.empty(2, d_model, num_full, dtype=torch.float64)
    # Of an array [D, M, 2] Flax takes all axes but the last for inputs.
    lecun_normal_(C_2DM, d_model * num_full if c_init == "lecun_normal" else num_full)
    C_DN = torch.complex(C_2DM[0], C_2DM[1]) @ vectors_MN
    return torch.stack([C_DN.real, C_DN.imag])


class S5Encoder(RecurrentEncoder):
    """Encoder whose mixer is an S5 system with gelu and gate.

    The layers of the code are `block="own"` with `tie_dropout=True`.

    Args:
        shape: sizes and layout.
        state_size: states of each layer, conjugates included (`ssm_size` in the code).
        num_blocks: blocks of the initial state matrix; must divide `state_size`.
        discretization: zoh or bilinear.
        conj_sym: keep one of each conjugate pair of states.
        clip_eigs: real parts of the eigenvalues are at most -1e-4.
        step_rescale: factor of all step sizes.
        c_init: how the output map is drawn.
        dt_min: smallest initial step size.
        dt_max: largest initial step size.
        bidirectional: a second run from the end to the start, with an output map of its own.
        gate: what follows the gelu, see `GatedRecurrence`.
        causal: position t sees positions 0 .. t only, which needs `bidirectional=False`.
        block: shared: mixer and feed-forward, as every model; own: the mixer alone, and no norm
            behind the last layer.
        tie_dropout: one dropout mask for all positions of a sequence, inside the mixer and on what
            an own block adds.
        norm_eps: added to the variance in every norm.

    Raises:
        ValueError: a value is out of range, or two options cannot hold together.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        state_size: int = 64,
        num_blocks: int = 4,
        discretization: Discretization = "zoh",
        conj_sym: bool = True,
        clip_eigs: bool = False,
        step_rescale: float = 1.0,
        c_init: CInit = "lecun_normal",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        bidirectional: bool = True,
        gate: Gate = "half_glu1",
        causal: bool = False,
        block: Literal["shared", "own"] = "shared",
        tie_dropout: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        def mixer() -> nn.Module:
            system = S5SSM(
                shape,
                state_size=state_size,
                num_blocks=num_blocks,
                discretization=discretization,
                conj_sym=conj_sym,
                clip_eigs=clip_eigs,
                step_rescale=step_rescale,
                c_init=c_init,
                dt_min=dt_min,
                dt_max=dt_max,
                bidirectional=bidirectional,
            )
            return GatedRecurrence(shape, system, gate=gate, tie_dropout=tie_dropout)

        super().__init__(
            shape,
            mixer,
            bidirectional=bidirectional,
            causal=causal,
            block=block,
            tie_dropout=tie_dropout,
            norm_eps=norm_eps,
        )
