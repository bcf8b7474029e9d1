"""Attention by features: weights are products of query and key features, so that sums over keys are
formed once for all queries, linear in length.

Source: Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, sections 3.2 and 3.3.
Shapes: B batch, L length, H heads, K head dim, M features of a head, J = K + 1, I columns of any
kind, G chunks of C positions. `mask` is bool, True = real token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

CHUNK_LENGTH = 64  # of causal sums: balances work inside a chunk against that on its sums


def widened(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_count(v_BHLK: Tensor, mask_BL: Tensor) -> Tensor:
    """Values and a column of ones, both zero at padding; [B, H, L, J].

    Sums of these with any weights hold the sum of the weights in their last column.
    """
    return F.pad(v_BHLK, (0, 1), value=1.0).masked_fill_(~mask_BL[:, None, :, None], 0.0)


def all_sums(q_BHLM: Tensor, k_BHLM: Tensor, v_BHLJ: Tensor, *, floor: float = 0.0) -> Tensor:
    """Row i is the sum over all j of (q_i + floor) . (k_j + floor) times v_j; [B, H, L, J]."""
    # In this order of factors the gradient of the many features is laid out as they are.
    sum_BHJM = v_BHLJ.mT @ k_BHLM
    if floor == 0.0:
        return q_BHLM @ sum_BHJM.mT
    # What is added to every feature is added to sums, which are fewer.
    sum_BHJM = sum_BHJM + floor * v_BHLJ.sum(dim=2)[..., None]
    return q_BHLM @ sum_BHJM.mT + floor * sum_BHJM.sum(dim=3)[:, :, None]


def causal_sums(x_BHLI: Tensor, y_BHLI: Tensor, z_BHLJ: Tensor) -> Tensor:
    """Row t is x_t times the sum over s <= t of the outer products y_s z_s; [B, H, L, J].

    Linear in time and memory: inside a chunk the products x_t . y_s are formed, and each chunk
    starts from the sum of the outer products of those before it. Low precision adds up in float32.
    """
    dtype, length = x_BHLI.dtype, x_BHLI.shape[2]
    work_dtype = torch.promote_types(dtype, torch.float32)
    with torch.autocast(x_BHLI.device.type, enabled=False):
        x_BHGCI, y_BHGCI, z_BHGCJ = (
            rearrange(
                F.pad(part.to(work_dtype), (0, 0, 0, -length % CHUNK_LENGTH)),
                "b h (g c) i -> b h g c i",
                c=CHUNK_LENGTH,
            )
            for part in (x_BHLI, y_BHLI, z_BHLJ)
        )
        sum_BHGIJ = (y_BHGCI.mT @ z_BHGCJ).cumsum(dim=2)
        before_BHGIJ = F.pad(sum_BHGIJ[:, :, :-1], (0, 0, 0, 0, 1, 0))
        out_BHGCJ = (x_BHGCI @ y_BHGCI.mT).tril() @ z_BHGCJ + x_BHGCI @ before_BHGIJ
    return rearrange(out_BHGCJ, "b h g c j -> b h (g c) j")[:, :, :length].to(dtype)
