"""Mega one example, chunk and query at a time, its average as a recurrence; for float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.mega import MegaAttention, MegaBlock, MegaEncoder, RotaryBias


def mega_attention(mixer: MegaAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` should be at real tokens; zeros at padding."""
    rows = []
    for x_LD, mask_L in zip(x_BLD, mask_BL, strict=True):
        y_LD = torch.zeros_like(x_LD)
        if mask_L.any():
            u_ND, h_ND = gate_and_candidate(mixer, x_LD[mask_L])
            y_ND = u_ND * h_ND + (1 - u_ND) * x_LD[mask_L]
            y_LD = y_LD.index_put((mask_L.nonzero()[:, 0],), y_ND - x_LD[mask_L])
        rows.append(y_LD)
    return torch.stack(rows)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def gate_and_candidate(mixer: MegaAttention, x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """u and h of an example without padding."""
    width, (_, z_size) = x_ND.shape[1], mixer.gamma.shape
    v_NV = silu(mixer.value(x_ND))
    mapped = mixer.maps(moving_average(mixer, x_ND))
    u_ND = 1 / (1 + (-mapped[:, :width]).exp())
    z_NZ = silu(mapped[:, width : width + z_size])
    r_NV = silu(mapped[:, width + z_size : -width])
    q_NZ, k_NZ = (mixer.gamma[i] * z_NZ + mixer.beta[i] for i in (0, 1))
    chunk_size = mixer.chunk_size or len(x_ND)
    o_NV = torch.cat(
        [
            attention(mixer, q_CZ, k_CZ, v_CV)
            for q_CZ, k_CZ, v_CV in zip(
                *(x.split(chunk_size) for x in (q_NZ, k_NZ, v_NV)), strict=True
            )
        ]
    )
    return u_ND, silu(mapped[:, -width:] + mixer.hidden(r_NV * o_NV))


def moving_average(mixer: MegaAttention, x_ND: Tensor) -> Tensor:
    """One step at a time, then the other way; each input leaves after `truncation` steps."""
    ema = mixer.ema
    p_EM, d_EM = (1 / (1 + (-x).exp()) for x in (ema.delta, ema.alpha))
    total_ND = torch.zeros_like(x_ND)
    for direction in range(2 if ema.bidirectional else 1):
        rows = slice(direction * x_ND.shape[1], (direction + 1) * x_ND.shape[1])
        p, d = p_EM[rows], d_EM[rows]
        eta = ema.gamma[rows] / math.sqrt(ema.gamma.shape[1])
        inputs = list(x_ND.flip(0) if direction else x_ND)
        state_DM, averages = torch.zeros_like(p), []
        for t, x_D in enumerate(inputs):
            state_DM = p * ema.beta[rows] * x_D[:, None] + (1 - p * d) * state_DM
            if ema.truncation is not None and t >= ema.truncation:
                left_D = inputs[t - ema.truncation]
                state_DM = state_DM - p * ema.beta[rows] * left_D[:, None] * (
                    (1 - p * d) ** ema.truncation
                )
            averages.append((eta * state_DM).sum(dim=1))
        average_ND = torch.stack(averages)
        total_ND = total_ND + (average_ND.flip(0) if direction else average_ND)
    return silu(total_ND + ema.omega * x_ND)


def attention(mixer: MegaAttention, q_CZ: Tensor, k_CZ: Tensor, v_CV: Tensor) -> Tensor:
    """Of one chunk without padding."""
    rows = []
    for i, q_Z in enumerate(q_CZ):
        num_keys = i + 1 if mixer.causal else len(k_CZ)
        score_J = k_CZ[:num_keys] @ q_Z
        bias_J = torch.stack([bias(mixer, i, j) for j in range(num_keys)])
        if mixer.attention_function == "softmax":
            weight_J = (score_J / math.sqrt(len(q_Z)) + bias_J).exp()
            weight_J = weight_J / weight_J.sum()
        elif mixer.attention_function == "laplace":
            z_J = (score_J / num_keys + bias_J - 0.707107) / (0.282095 * math.sqrt(2))
            weight_J = (1 + torch.erf(z_J)) / 2
        else:
            weight_J = (score_J / num_keys + bias_J).clamp(min=0) ** 2
        rows.append(weight_J @ v_CV[:num_keys])
    return torch.stack(rows)


def bias(mixer: MegaAttention, i: int, j: int) -> Tensor:
    """What is added to the score of query i and key j."""
    table = mixer.position_bias
    if not isinstance(table, RotaryBias):
        return table.table[(len(table.table) - 1) // 2 + j - i]
    alpha, beta = table.alpha, table.beta
    half = len(alpha) // 2
    turned = []
    for place, vector in ((i, alpha), (j, beta)):
        angle = place * 10000.0 ** (-2 * torch.arange(half, dtype=alpha.dtype) / len(alpha))
        turned.append(torch.complex(vector[:half], vector[half:]) * torch.exp(1j * angle))
    return (turned[0] * turned[1].conj()).real.sum()


def own_layers(encoder: MegaEncoder, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """What an encoder with `block="own"` gives at real tokens, without dropout."""
    mask_BL = encoder.output_mask(mask_BL)
    x_BLD = encoder.embedding(tokens_BL, mask_BL)
    for block in encoder.layers():
        assert isinstance(block, MegaBlock)
        rows = []
        for x_LD, mask_L in zip(x_BLD, mask_BL, strict=True):
            normed_ND = block.norm1(x_LD, mask_L) if block.pre_norm else x_LD
            u_ND, h_ND = gate_and_candidate(block.mixer, normed_ND[mask_L])
            y_ND = u_ND * h_ND + (1 - u_ND) * x_LD[mask_L]
            if not block.pre_norm:
                y_ND = block.norm1(y_ND, mask_L[mask_L])
            inner_ND = block.norm2(y_ND, mask_L[mask_L]) if block.pre_norm else y_ND
            y_ND = y_ND + block.ffn.down(silu(block.ffn.up(inner_ND)))
            if not block.pre_norm:
                y_ND = block.norm2(y_ND, mask_L[mask_L])
            rows.append(torch.zeros_like(x_LD).index_put((mask_L.nonzero()[:, 0],), y_ND))
        x_BLD = torch.stack(rows)
    return encoder.norm(x_BLD, mask_BL)
