"""S4D: one diagonal linear state-space system for each feature, run as a long convolution.

Source: Gu et al. 2022, https://arxiv.org/abs/2206.11893; where paper and code differ the defaults
follow the authors' code, https://github.com/state-spaces/s4: B is trained, step sizes pass through
softplus, the kernel that looks ahead starts one position later than the one that looks back.

Shapes: B batch, L length, D d_model, N states of a feature that are kept, half of `state_size`, S
copies of A and B, C channels, M kernels of a feature, C or 2 C of them, K taps, E = C * D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.convolution import long_convolution, sum_of_powers
from models.dropout import Dropout, TiedDropout
from models.encoder import Block, Encoder, MixerBlock
from models.layers import StackedLinear, check_directions
from models.shape import Shape, check_positive

Init = Literal["legs", "lin", "inv"]
Discretization = Literal["zoh", "bilinear"]
RealPart = Literal["exp", "relu"]
StepTransform = Literal["softplus", "exp"]


@dataclass(frozen=True)
class S4DOptions:
    """The options of `S4DEncoder` that its layers read.

    Raises:
        ValueError: a value is out of range, or two cannot hold together.
    """

    state_size: int
    init: Init
    discretization: Discretization
    real_part: RealPart
    dt_transform: StepTransform
    dt_min: float
    dt_max: float
    tie_dt: bool
    num_copies: int | None
    channels: int
    kernel_length: int | None
    bidirectional: bool
    tie_dropout: bool

    def __post_init__(self) -> None:
        if self.state_size < 2 or self.state_size % 2:
            raise ValueError(f"model.state_size={self.state_size}: expected an even number above 0")
        literals: dict[str, Any] = {
            "init": Init, "discretization": Discretization, "real_part": RealPart,
            "dt_transform": StepTransform,
        }  # fmt: skip
        for name, literal in literals.items():
            if getattr(self, name) not in get_args(literal):
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r}: expected one of "
                    f"{', '.join(get_args(literal))}"
                )
        if not 0 < self.dt_min < self.dt_max < math.inf:
            raise ValueError(
                f"model.dt_min={self.dt_min} with model.dt_max={self.dt_max}: expected "
                "0 < dt_min < dt_max"
            )
        check_positive("model.dt_min", self.dt_min)
        for name in ("num_copies", "channels", "kernel_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.{name}={value}: expected at least 1")


def initial_states(init: Init, state_size: int) -> tuple[Tensor, Tensor]:
    """Frequencies w of A = -1/2 - i w, all at least 0, and B, in float64; [N] and complex [N].

    lin is S4D-Lin, w = pi n; inv S4D-Inv; legs S4D-LegS: the normal part of the HiPPO-LegS matrix,
    largest frequency first, and B in the basis of its eigenvectors, turned so that their first
    entries are positive, with imaginary parts cut to [-2, 2] as in the authors' code.
    """
    n_N = torch.arange(state_size // 2, dtype=torch.float64)
    ones_N = torch.ones(state_size // 2, dtype=torch.complex128)
    if init == "lin":
        return math.pi * n_N, ones_N
    if init == "inv":
        return state_size / math.pi * (state_size / (2 * n_N + 1) - 1), ones_N
    k_I = torch.arange(state_size, dtype=torch.float64)
    root_I = (2 * k_I + 1).sqrt()
    # M + p p^T = -1/2 I + Q with Q skew-symmetric, so -i Q has real eigenvalues, in pairs +-w.
    skew_II = 0.5 * root_I[:, None] * root_I * (k_I - k_I[:, None]).sign()
    frequency_I, vector_II = torch.linalg.eigh(-1j * skew_II)
    vector_IN = vector_II[:, : state_size // 2]
    b_N = vector_IN.mH @ root_I.to(vector_IN.dtype)
    b_N = b_N * torch.sgn(vector_IN[0])
    return -frequency_I[: state_size // 2], torch.complex(b_N.real, b_N.imag.clamp(-2.0, 2.0))


def initial_dt(share: Tensor, options: S4DOptions) -> Tensor:
    """Step sizes at that share of the way from dt_min to dt_max in the logarithm."""
    low, high = math.log(options.dt_min), math.log(options.dt_max)
    return (low + share * (high - low)).exp()


class S4DKernel(nn.Module):
    """Kernels of x' = A x + B u, y = 2 Re(C x), discretised with a step size for each feature.

    Feature d uses copy d mod S of A and B. Both directions share A, B and the step sizes.

    Args:
        width: D.
        num_kernels: M.
        options: the rest.
    """

    GROUPS: ClassVar[dict[str, str]] = {
        "raw_dt": "step", "A_real": "state", "A_imag": "state", "B": "input", "C": "output",
    }  # fmt: skip

    def __init__(self, width: int, num_kernels: int, options: S4DOptions) -> None:
        super().__init__()
        num_copies = width if options.num_copies is None else options.num_copies
        if width % num_copies:
            raise ValueError(
                f"model.num_copies={num_copies} does not divide shape.d_model={width}; choose a "
                "divisor or null"
            )
        self.options = options
        num_states = options.state_size // 2
        dt = initial_dt(torch.rand(width, 1 if options.tie_dt else num_states), options)
        # What exp or softplus turns into dt.
        raw_dt = dt.log() if options.dt_transform == "exp" else dt + (-(-dt).expm1()).log()
        self.raw_dt = nn.Parameter(raw_dt)
        frequency_N, b_N = initial_states(options.init, options.state_size)
        a_real = math.log(0.5) if options.real_part == "exp" else 0.5
        self.A_real = nn.Parameter(torch.full((num_copies, num_states), a_real))
        dtype = self.A_real.dtype
        self.A_imag = nn.Parameter(frequency_N.clamp(min=1e-4).to(dtype).repeat(num_copies, 1))
        self.B = nn.Parameter(torch.view_as_real(b_N).to(dtype).repeat(num_copies, 1, 1))
        self.C = nn.Parameter(torch.randn(num_kernels, width, num_states, 2) * 0.5**0.5)

    def forward(self, length: int) -> Tensor:
        """The first `length` taps; [M, D, length] in float32 or wider.

        A decay in float32 is rounded, and a tap is off by that times its age: beside float64 those
        of a feature by less than 1e-4 of their norm, with dt_min=1e-4 and 16,384 taps by 3e-4, and
        what a layer gives by 1e-5 to 5e-5.
        """
        decay_DN, input_DN, output_MDN = self.discretise()
        return sum_of_powers(2 * output_MDN * input_DN, decay_DN, length)

    def discretise(self) -> tuple[Tensor, Tensor, Tensor]:
        """Complex l, b and C of x_t = l x_(t-1) + b u_t, y_t = 2 Re(C x_t); [D, N] and [M, D, N].

        zoh: l = e^(dt A), b = B (l - 1) / A; bilinear: l = (1 + dt A / 2) / (1 - dt A / 2),
        b = B dt / (1 - dt A / 2).
        """
        raw_dt, a_real_SN, a_imag_SN, b_SN2, c_MDN2 = (
            parameter.to(torch.promote_types(parameter.dtype, torch.float32))
            for parameter in (self.raw_dt, self.A_real, self.A_imag, self.B, self.C)
        )
        dt = raw_dt.exp() if self.options.dt_transform == "exp" else F.softplus(raw_dt)
        exp = self.options.real_part == "exp"
        decay_SN = a_real_SN.exp() if exp else a_real_SN.relu() + 1e-4
        repeats = len(dt) // len(decay_SN)
        a_DN = torch.complex(-decay_SN, -a_imag_SN).repeat(repeats, 1)
        b_DN = torch.view_as_complex(b_SN2).repeat(repeats, 1)
        dt_a_DN, c_MDN = dt * a_DN, torch.view_as_complex(c_MDN2)
        if self.options.discretization == "zoh":
            return dt_a_DN.exp(), b_DN * dt_a_DN.expm1() / a_DN, c_MDN
        half_DN = 1 - dt_a_DN / 2
        return (1 + dt_a_DN / 2) / half_DN, b_DN * dt / half_DN, c_MDN


@dataclass(frozen=True)
class S4DState:
    """What the step form carries: the discretised system, and one number for each state."""

    decay_DN: Tensor
    input_DN: Tensor
    output_CDN: Tensor
    x_BDN: Tensor


class S4DMixer(nn.Module):
    """Convolve each feature with its kernels, then gelu and a gated linear map of all of them.

    Dropout acts before the gelu, and after it, there with one mask for all positions if
    `tie_dropout`.
    """

    def __init__(self, shape: Shape, options: S4DOptions) -> None:
        super().__init__()
        self.options = options
        self.max_length = shape.max_length
        num_kernels = options.channels * (2 if options.bidirectional else 1)
        self.kernel = S4DKernel(shape.d_model, num_kernels, options)
        self.skip = nn.Parameter(torch.randn(options.channels, shape.d_model))  # the paper's D
        self.inner_dropout = Dropout(shape.dropout)
        self.dropout = TiedDropout(shape.dropout) if options.tie_dropout else Dropout(shape.dropout)
        self.out = StackedLinear(
            options.channels * shape.d_model, shape.d_model, parts=2, bias=shape.attention_bias
        )

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Mix tokens; padding counts as zero. [B, L, D]."""
        length, channels = x_BLD.shape[1], self.options.channels
        x_BLD = torch.where(mask_BL[..., None], x_BLD, 0.0)
        kernel_MDK = self.kernel(min(length, self.options.kernel_length or length))
        kernel_CDK, *ahead = kernel_MDK.split(channels)
        # The kernel ahead starts at the next position; in the place before stands the skip.
        ahead_CDK = torch.cat([self.skip.to(kernel_MDK.dtype)[..., None], *ahead], dim=2)
        x_BLE = x_BLD.repeat(1, 1, channels) if channels > 1 else x_BLD
        y_BLE = long_convolution(x_BLE, kernel_CDK.flatten(0, 1), ahead_CDK.flatten(0, 1))
        return self.finish(y_BLE)

    def finish(self, y_BLE: Tensor) -> Tensor:
        """What happens at each position alone; [B, L, D]."""
        return F.glu(self.out(self.dropout(F.gelu(self.inner_dropout(y_BLE)))))

    def start(self, batch_size: int) -> S4DState:
        """State before the first position, for `step`.

        Raises:
            ValueError: the layer looks ahead, or its kernels end before `shape.max_length`.
        """
        if self.options.bidirectional:
            raise ValueError(
                "model.bidirectional=true: a layer that looks ahead cannot go by steps"
            )
        if (self.options.kernel_length or self.max_length) < self.max_length:
            raise ValueError(
                f"model.kernel_length={self.options.kernel_length} is below shape.max_length="
                f"{self.max_length}: a state forgets no input at a given age; use null"
            )
        decay_DN, input_DN, output_CDN = self.kernel.discretise()
        x_BDN = decay_DN.new_zeros(batch_size, *decay_DN.shape)
        return S4DState(decay_DN, input_DN, output_CDN, x_BDN)

    def step(self, x_B1D: Tensor, state: S4DState) -> tuple[Tensor, S4DState]:
        """The next position alone; [B, 1, D] and the state after it. Equal to `forward`."""
        u_B1D = x_B1D.to(torch.promote_types(x_B1D.dtype, torch.float32))
        x_BDN = state.decay_DN * state.x_BDN + state.input_DN * u_B1D.mT
        y_BCD = 2 * torch.einsum("cdn,bdn->bcd", state.output_CDN, x_BDN).real
        y_BCD = y_BCD + self.skip * u_B1D
        state = S4DState(state.decay_DN, state.input_DN, state.output_CDN, x_BDN)
        return self.finish(y_BCD.flatten(1)[:, None].to(x_B1D.dtype)), state


class S4DEncoder(Encoder):
    """Encoder with S4D layers.

    Args:
        shape: sizes and layout. `d_ff` acts with `block="shared"` only; there are no heads.
        block: shared, the mixer in the block of all models; own, the authors' without feed-forward.
        state_size: states of each feature; conjugates are not kept, so half of them are computed.
        init: initial A and B: S4D-LegS, S4D-Lin or S4D-Inv.
        discretization: zero-order hold or bilinear.
        real_part: what keeps real parts of A negative: -exp(.), or -(relu(.) + 1e-4).
        dt_transform: what keeps step sizes positive.
        dt_min, dt_max: initial step sizes are drawn between them, uniform in the logarithm.
        tie_dt: one step size for each feature; False, one for each of its states.
        num_copies: copies of A and B that the features share; None: one for each feature.
        channels: kernels of each feature and direction, joined by the output map.
        kernel_length: taps of each kernel; None: as many as the input has.
        bidirectional: a second kernel looks ahead.
        tie_dropout: dropout behind the gelu, and on what an own block adds, has one mask for all
            positions.
        causal: a token sees none that come later: what bidirectional=False gives, checked.

    Raises:
        ValueError: a value is out of range, or two options cannot hold together.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Literal["shared", "own"] = "shared",
        state_size: int = 64,
        init: Init = "legs",
        discretization: Discretization = "zoh",
        real_part: RealPart = "exp",
        dt_transform: StepTransform = "softplus",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        tie_dt: bool = True,
        num_copies: int | None = None,
        channels: int = 1,
        kernel_length: int | None = None,
        bidirectional: bool = True,
        tie_dropout: bool = True,
        causal: bool = False,
    ) -> None:
        if block not in ("shared", "own"):
            raise ValueError(f"model.block={block!r}: expected shared or own")
        check_directions(shape, bidirectional=bidirectional, causal=causal)
        options = S4DOptions(
            state_size=state_size,
            init=init,
            discretization=discretization,
            real_part=real_part,
            dt_transform=dt_transform,
            dt_min=dt_min,
            dt_max=dt_max,
            tie_dt=tie_dt,
            num_copies=num_copies,
            channels=channels,
            kernel_length=kernel_length,
            bidirectional=bidirectional,
            tie_dropout=tie_dropout,
        )
        own = partial(MixerBlock, tie_dropout=tie_dropout)
        make_block = Block if block == "shared" else own
        super().__init__(shape, lambda: S4DMixer(shape, options), make_block)
