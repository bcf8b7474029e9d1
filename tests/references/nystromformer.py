"""Nystrom attention one query at a time, from the formulas; for float64 and short inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from models.nystromformer import NystromAttention


def nystrom_attention(mixer: NystromAttention, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """What `mixer(x_BLD, mask_BL)` should be at real tokens; zeros at padding."""
    batch_size, length, _ = x_BLD.shape
    num_heads, num_landmarks = mixer.num_heads, mixer.num_landmarks
    weights = mixer.qkv.weight.chunk(3)
    biases = [None] * 3 if mixer.qkv.bias is None else mixer.qkv.bias.chunk(3)
    projected = []
    for weight, bias in zip(weights, biases, strict=True):
        y_BLE = x_BLD @ weight.T
        projected.append(y_BLE if bias is None else y_BLE + bias)
    head_dim = projected[0].shape[-1] // num_heads

    tokens: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    landmarks: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    for b in range(batch_size):
        for h in range(num_heads):
            columns = slice(h * head_dim, (h + 1) * head_dim)
            q_LK, k_LK, v_LK = (y_BLE[b, :, columns] for y_BLE in projected)
            if mixer.zero_padding:
                real_L1 = mask_BL[b, :, None].to(q_LK.dtype)
                q_LK, k_LK, v_LK = q_LK * real_L1, k_LK * real_L1, v_LK * real_L1
            tokens[b, h] = q_LK, k_LK, v_LK
            if mixer.padded_landmarks:
                pieces = padded_pieces(length, num_landmarks)
                divisors = [len(range(length)[pieces[0]])] * num_landmarks
                source_q, source_k = q_LK, k_LK
                exact = length <= num_landmarks
            else:
                n = int(mask_BL[b].sum())
                edges = [j * n // num_landmarks for j in range(num_landmarks + 1)]
                pieces = [slice(i, j) for i, j in zip(edges[:-1], edges[1:], strict=True)]
                divisors = [piece.stop - piece.start for piece in pieces]
                source_q, source_k = q_LK[mask_BL[b]], k_LK[mask_BL[b]]
                exact = n <= num_landmarks
            if exact:
                continue
            ql_MK, kl_MK = (
                torch.stack([source[pieces[j]].sum(0) / divisors[j] for j in range(num_landmarks)])
                for source in (source_q, source_k)
            )
            landmarks[b, h] = ql_MK, kl_MK, softmax(ql_MK @ kl_MK.T / head_dim**0.5)

    largest = max((a_MM.sum(0).max() for _, _, a_MM in landmarks.values()), default=torch.ones(()))
    rows = []
    for b in range(batch_size):
        real = mask_BL[b]
        heads = []
        for h in range(num_heads):
            q_LK, k_LK, v_LK = tokens[b, h]
            if (b, h) not in landmarks:
                y_LK = softmax(q_LK @ k_LK[real].T / head_dim**0.5) @ v_LK[real]
            else:
                ql_MK, kl_MK, a_MM = landmarks[b, h]
                scale = largest if mixer.pinv_init == "global" else a_MM.sum(0).max()
                z_MM = a_MM.T / scale
                eye = torch.eye(num_landmarks, dtype=x_BLD.dtype)
                for _ in range(mixer.pinv_iterations):
                    az = a_MM @ z_MM
                    z_MM = z_MM @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
                f_LM = softmax(q_LK @ kl_MK.T / head_dim**0.5)
                g_Mn = softmax(ql_MK @ k_LK[real].T / head_dim**0.5)
                y_LK = f_LM @ z_MM @ g_Mn @ v_LK[real]
            heads.append(y_LK + convolution(mixer, v_LK, h))
        y_LD = torch.cat(heads, dim=1) @ mixer.out.weight.T
        if mixer.out.bias is not None:
            y_LD = y_LD + mixer.out.bias
        rows.append(y_LD * real[:, None])
    return torch.stack(rows)


def padded_pieces(length: int, num_landmarks: int) -> list[slice]:
    """Equal segments of the padded length; the last may be cut short or empty."""
    size = 1
    while size * num_landmarks < length:
        size += 1
    return [slice(j * size, (j + 1) * size) for j in range(num_landmarks)]


def convolution(mixer: NystromAttention, v_LK: Tensor, head: int) -> Tensor:
    """A sum of shifted copies, one for each tap of the filter."""
    y_LK = torch.zeros_like(v_LK)
    if mixer.conv_HW is None:
        return y_LK
    filter_W = mixer.conv_HW[head]
    length, half = len(v_LK), len(filter_W) // 2
    zeros = v_LK.new_zeros(half, v_LK.shape[1])
    padded = torch.cat([zeros, v_LK, zeros])
    for j, tap in enumerate(filter_W):
        y_LK = y_LK + tap * padded[j : j + length]
    return y_LK


def softmax(logits: Tensor) -> Tensor:
    """Over the last axis, without a shift: for logits of moderate size."""
    weights = logits.exp()
    return weights / weights.sum(dim=-1, keepdim=True)
