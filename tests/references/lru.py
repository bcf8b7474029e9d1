"""LRU and its gate one row and one position at a time, from the formulas; for float64."""

from __future__ import annotations

import torch
from torch import Tensor

from models.lru import LRU
from models.recurrence import GatedRecurrence


def lru(mixer: GatedRecurrence, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
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


def one_row(system: LRU, x_LD: Tensor) -> Tensor:
    """The recurrence over a sequence without padding, and back if it has a way back."""
    decay_N = torch.exp(-system.nu_log.exp()) * torch.polar(
        torch.ones_like(system.theta_log), system.theta_log.exp()
    )
    B_ND = torch.complex(system.B[0], system.B[1])
    inputs = [system.gamma_log.exp() * (B_ND @ x_D.to(B_ND.dtype)) for x_D in x_LD]
    y_LD = system.D * x_LD + read(states(inputs, decay_N), system.C)
    if system.backward_C is not None:
        y_LD = y_LD + read(states(inputs[::-1], decay_N)[::-1], system.backward_C)
    return y_LD


def states(inputs: list[Tensor], decay_N: Tensor) -> list[Tensor]:
    """Each state from the one before it."""
    found = [inputs[0]]
    for u_N in inputs[1:]:
        found.append(decay_N * found[-1] + u_N)
    return found


def read(states: list[Tensor], C_2DN: Tensor) -> Tensor:
    """Re(C h) of each position; [L, D]."""
    return torch.stack([(torch.complex(C_2DN[0], C_2DN[1]) @ h_N).real for h_N in states])


def gated(mixer: GatedRecurrence, v_LD: Tensor) -> Tensor:
    """The gelu in its tanh form and the gate of two maps."""
    z_LD = gelu(v_LD)
    value, gate = (
        z_LD @ W.T + b
        for W, b in zip(mixer.out.weight.chunk(2), mixer.out.bias.chunk(2), strict=True)
    )
    return value / (1 + torch.exp(-gate))


def gelu(x: Tensor) -> Tensor:
    """In its tanh form."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
