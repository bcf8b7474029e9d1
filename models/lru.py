"""LRU: a linear recurrence of complex numbers on the unit disc, in place of attention; O(L).

Source: Orvieto et al. 2023, https://arxiv.org/abs/2303.06349, section 3 and appendix A; gate, gelu
and dropout as in github.com/NicolasZucchet/minimal-LRU. Beyond it, and as S5 has it,
`bidirectional` adds a run from the end.

Shapes: B batch, L length, D d_model, N complex states.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from models.recurrence import DiagonalSystem, GatedRecurrence, RecurrentEncoder
from models.shape import Shape, check_positive


def ring(
    radius_N: Tensor, phase_N: Tensor, *, r_min: float, r_max: float, max_phase: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Decays spread evenly over a ring, as nu_log, theta_log and gamma_log; [N] each.

    `radius_N` and `phase_N` are numbers in (0, 1), of squared radius and of phase. Gamma makes the
    variance of a state that of its input if the latter is white noise.
    """
    square_N = radius_N * (r_max**2 - r_min**2) + r_min**2
    nu_log_N = (-0.5 * square_N.log()).log()
    return nu_log_N, (max_phase * phase_N).log(), 0.5 * torch.log1p(-square_N)


class LRU(DiagonalSystem):
    """decay = exp(-exp(nu_log) + i exp(theta_log)), inside the unit disc whatever the parameters.

    The input map is exp(gamma_log) B.

    Args:
        shape: `d_model` is read here.
        state_size: N; these are complex numbers without conjugates.
        r_min: inner radius of the ring of initial decays.
        r_max: its outer radius.
        max_phase: initial phases are between 0 and this.
        bidirectional: a second run from the end to the start.

    Raises:
        ValueError: an option is out of range.
    """

    GROUPS: ClassVar[dict[str, str]] = {
        **DiagonalSystem.GROUPS,
        **dict.fromkeys(("nu_log", "theta_log", "gamma_log"), "state"),
    }

    def __init__(
        self,
        shape: Shape,
        *,
        state_size: int,
        r_min: float,
        r_max: float,
        max_phase: float,
        bidirectional: bool,
    ) -> None:
        if state_size < 1:
            raise ValueError(f"model.state_size={state_size}: expected at least 1")
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(
                f"model.r_min={r_min}, model.r_max={r_max}: expected 0 <= r_min < r_max <= 1"
            )
        check_positive("model.max_phase", max_phase)
        super().__init__(shape, state_size, bidirectional=bidirectional)
        # Open at both ends: 0 and 1 may be a decay of zero or of one, whose logarithms are endless.
        radius_N, phase_N = torch.empty(2, state_size, dtype=torch.float64).uniform_(1e-6, 1 - 1e-6)
        values = ring(radius_N, phase_N, r_min=r_min, r_max=r_max, max_phase=max_phase)
        self.nu_log, self.theta_log, self.gamma_log = (nn.Parameter(x.to(self.D)) for x in values)
        nn.init.normal_(self.B, std=(2 * shape.d_model) ** -0.5)
        for C in (self.C, self.backward_C):
            if C is not None:
                nn.init.normal_(C, std=state_size**-0.5)

    def decay_and_input(self) -> tuple[Tensor, Tensor]:
        """Complex decay [N] and input map [N, D] of the recurrence, in double precision."""
        nu_N, theta_N, gamma_N = (
            x.double().exp() for x in (self.nu_log, self.theta_log, self.gamma_log)
        )
        decay_N = torch.exp(torch.complex(-nu_N, theta_N))
        return decay_N, gamma_N[:, None] * torch.complex(*self.B.double())


class LRUEncoder(RecurrentEncoder):
    """Encoder whose mixer is an LRU with gelu and gate.

    The layers of the code are `block="own"` with `tie_dropout=True`.

    Args:
        shape: sizes and layout.
        state_size: complex states of each layer.
        r_min: inner radius of the ring of initial decays; near 1 for a long memory.
        r_max: its outer radius.
        max_phase: initial phases are between 0 and this; small for the longest tasks.
        bidirectional: a second run from the end to the start, with an output map of its own.
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
        state_size: int = 32,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 6.28,
        bidirectional: bool = False,
        causal: bool = False,
        block: Literal["shared", "own"] = "shared",
        tie_dropout: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        def mixer() -> nn.Module:
            system = LRU(
                shape,
                state_size=state_size,
                r_min=r_min,
                r_max=r_max,
                max_phase=max_phase,
                bidirectional=bidirectional,
            )
            return GatedRecurrence(shape, system, gate="full_glu", tie_dropout=tie_dropout)

        super().__init__(
            shape,
            mixer,
            bidirectional=bidirectional,
            causal=causal,
            block=block,
            tie_dropout=tie_dropout,
            norm_eps=norm_eps,
        )
