"""S4D as sums over all powers of the discretised state matrix, from the formulas; for float64."""

from __future__ import annotations

import torch
from torch import Tensor

from models.s4d import S4DMixer


def s4d_kernels(mixer: S4DMixer, num_taps: int) -> Tensor:
    """All kernels [M, D, K], each the real part of a sum over [N, K] powers."""
    options, kernel = mixer.options, mixer.kernel
    kernels_DMK = []
    for d in range(kernel.C.shape[1]):
        copy = d % len(kernel.A_real)
        z_N = kernel.A_real[copy]
        rho_N = z_N.exp() if options.real_part == "exp" else z_N.clamp(min=0) + 1e-4
        a_N = -rho_N - 1j * kernel.A_imag[copy]
        dt_N = kernel.raw_dt[d]
        dt_N = dt_N.exp() if options.dt_transform == "exp" else (1 + dt_N.exp()).log()
        b_N = kernel.B[copy, :, 0] + 1j * kernel.B[copy, :, 1]
        if options.discretization == "zoh":
            decay_N = (dt_N * a_N).exp()
            b_N = b_N * (decay_N - 1) / a_N
        else:
            decay_N = (1 + dt_N * a_N / 2) / (1 - dt_N * a_N / 2)
            b_N = b_N * dt_N / (1 - dt_N * a_N / 2)
        power_NK = decay_N[:, None] ** torch.arange(num_taps)
        c_MN = kernel.C[:, d, :, 0] + 1j * kernel.C[:, d, :, 1]
        kernels_DMK.append(2 * ((c_MN * b_N) @ power_NK).real)
    return torch.stack(kernels_DMK, dim=1)


def s4d_mixer(mixer: S4DMixer, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` should be, without dropout, one lag at a time."""
    options, length = mixer.options, x_BLD.shape[1]
    u_BLD = torch.where(mask_BL[..., None], x_BLD, 0.0)
    kernel_MDK = s4d_kernels(mixer, min(length, options.kernel_length or length))
    joined = []
    for c in range(options.channels):
        y_BLD = mixer.skip[c] * u_BLD
        for j in range(kernel_MDK.shape[2]):
            before_BLD = torch.zeros_like(u_BLD)
            before_BLD[:, j:] = u_BLD[:, : length - j]
            y_BLD = y_BLD + kernel_MDK[c, :, j] * before_BLD
            if options.bidirectional:
                behind_BLD = torch.zeros_like(u_BLD)
                behind_BLD[:, : length - 1 - j] = u_BLD[:, j + 1 :]
                y_BLD = y_BLD + kernel_MDK[options.channels + c, :, j] * behind_BLD
        joined.append(y_BLD)
    v_BLE = torch.cat(joined, dim=2)
    v_BLE = v_BLE * 0.5 * (1 + torch.erf(v_BLE / 2**0.5))
    z_BLD, gate_BLD = mixer.out(v_BLE).chunk(2, dim=-1)
    return z_BLD * gate_BLD.sigmoid()
