"""S5 and its gates one row and one position at a time, from the formulas; for float64.

States with conjugates left out are run with them, so that the output is real by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.recurrence import GatedRecurrence
from models.s5 import S5SSM
from tests.references.lru import gelu, states


def s5(mixer: GatedRecurrence, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` should be at real tokens; padding is no part of a row."""
    rows = []
    for x_LD, mask_L in zip(x_BLD, mask_BL, strict=True):
        y_LD = torch.zeros_like(x_LD)
        length = int(mask_L.sum())
        if length:
            v_LD = one_row(mixer.system, x_LD[:length])
            y_LD = torch.cat([gated(mixer, v_LD), y_LD[length:]])
        rows.append(y_LD)
    return torch.stack(rows)


def one_row(system: S5SSM, x_LD: Tensor) -> Tensor:
    """Discretise, run over a sequence without padding, and back if there is a way back."""
    real_N = system.Lambda_re
    if system.clip_eigs:
        real_N = torch.where(real_N < -1e-4, real_N, -1e-4)
    lambda_N = real_N + 1j * system.Lambda_im
    step_N = system.step_rescale * system.log_step.exp()
    if system.discretization == "zoh":
        decay_N = torch.exp(lambda_N * step_N)
        input_N = (decay_N - 1) / lambda_N
    else:
        decay_N = (1 + lambda_N * step_N / 2) / (1 - lambda_N * step_N / 2)
        input_N = step_N / (1 - lambda_N * step_N / 2)
    B_ND = input_N[:, None] * (system.B[0] + 1j * system.B[1])
    maps = [C[0] + 1j * C[1] for C in (system.C, system.backward_C) if C is not None]
    if system.output_scale == 2:
        decay_N = torch.cat([decay_N, decay_N.conj()])
        B_ND = torch.cat([B_ND, B_ND.conj()])
        maps = [torch.cat([C_DN, C_DN.conj()], dim=1) for C_DN in maps]
    inputs = [B_ND @ x_D.to(B_ND.dtype) for x_D in x_LD]
    y_LD = system.D * x_LD
    for C_DN, step in zip(maps, (1, -1), strict=False):
        found = states(inputs[::step], decay_N)[::step]
        y_LD = y_LD + torch.stack([(C_DN @ h_N).real for h_N in found])
    return y_LD


def gated(mixer: GatedRecurrence, v_LD: Tensor) -> Tensor:
    """The gelu and one of four gates."""
    z_LD = gelu(v_LD)
    if mixer.gate == "gelu":
        return z_LD
    mapped = [
        z_LD @ W.T + b
        for W, b in zip(
            mixer.out.weight.split(z_LD.shape[1]), mixer.out.bias.split(z_LD.shape[1]), strict=True
        )
    ]
    passed = {"full_glu": mapped[0], "half_glu1": z_LD, "half_glu2": v_LD}[mixer.gate]
    return passed / (1 + torch.exp(-mapped[-1]))
