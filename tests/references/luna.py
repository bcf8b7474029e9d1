"""Luna one example and head at a time, cut to its real tokens and slots; causal rows one by one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.luna import LunaAttention, LunaCausalAttention, LunaEncoder


def softmax_heads(q_LD: Tensor, k_ND: Tensor, v_ND: Tensor, num_heads: int) -> Tensor:
    """Plain softmax attention of one example, heads side by side."""
    out = []
    for q_LK, k_NK, v_NK in zip(
        *(x.chunk(num_heads, dim=1) for x in (q_LD, k_ND, v_ND)), strict=True
    ):
        weight_LN = (q_LK @ k_NK.T / math.sqrt(q_LK.shape[1])).exp()
        out.append(weight_LN / weight_LN.sum(dim=1, keepdim=True) @ v_NK)
    return torch.cat(out, dim=1)


def attention(
    mixer: LunaAttention, x_LD: Tensor, memory_MD: Tensor, context_ND: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and packed memory of one example without padding."""
    maps = mixer.pack_kv(context_ND).chunk(mixer.pack_kv.parts, dim=1)
    query_MD = mixer.pack_query(memory_MD)
    packed_MD = softmax_heads(query_MD, maps[0], maps[-1], mixer.num_packed_heads)
    maps = mixer.kv(packed_MD).chunk(mixer.kv.parts, dim=1)
    y_LD = softmax_heads(mixer.query(x_LD), maps[0], maps[-1], mixer.num_heads)
    return mixer.out(y_LD), packed_MD


def causal_attention(mixer: LunaCausalAttention, x_LD: Tensor, memory_MD: Tensor) -> Tensor:
    """Every row from sums over all rows up to it, nothing carried."""
    maps = mixer.tokens(x_LD).chunk(mixer.tokens.parts, dim=1)
    q, pack_k, k, v = (
        x.chunk(mixer.num_heads, dim=1) for x in (maps[0], maps[1], maps[2], maps[-1])
    )
    p = mixer.pack_query(memory_MD).chunk(mixer.num_heads, dim=1)
    width = q[0].shape[1]
    rows = []
    for t in range(1, len(x_LD) + 1):
        heads = []
        for h in range(mixer.num_heads):
            z_LM = pack_k[h][:t] @ p[h].T / math.sqrt(width)
            if mixer.activation == "softplus":
                weight_LM = torch.log2(1 + 2**z_LM)
            else:
                weight_LM = torch.where(z_LM > 0, z_LM + 1, z_LM.exp())
            keys_KM = k[h][:t].T @ weight_LM / t
            score_M = q[h][t - 1] @ keys_KM / math.sqrt(width)
            read_M = score_M.exp() / score_M.exp().sum()
            heads.append(read_M @ (weight_LM.T @ v[h][:t] / t))
        rows.append(mixer.out(torch.cat(heads)))
    return torch.stack(rows)


def sinusoids(first_row: int, num_rows: int, width: int) -> Tensor:
    half = width // 2
    rows = []
    for r in range(first_row, first_row + num_rows):
        angles = [r * 10000 ** (-i / (half - 1)) for i in range(half)]
        rows.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    return torch.tensor(rows, dtype=torch.float64)


def luna_encoder(encoder: LunaEncoder, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """What `encoder(tokens_BL, mask_BL)` must give in its real rows; the other rows are zeros."""
    shape, embedding = encoder.shape, encoder.embedding
    scale = math.sqrt(shape.d_model) if shape.embedding_scale else 1.0
    examples = []
    for tokens_L, mask_L in zip(tokens_BL, mask_BL, strict=True):
        x_LD = embedding.tokens.weight[tokens_L[mask_L]]
        if shape.pooling == "cls":
            x_LD = torch.cat([embedding.class_token[None], x_LD])
        num_slots = len(encoder.memory)
        if encoder.dynamic_projection:
            num_slots = min(num_slots, len(x_LD))
        x_LD = scale * x_LD
        memory_MD = scale * encoder.memory[:num_slots]
        if shape.positions == "learned":
            x_LD = x_LD + embedding.positions[: len(x_LD)]
        elif shape.positions == "sinusoidal":
            x_LD = x_LD + sinusoids(2, len(x_LD), shape.d_model)
            memory_MD = memory_MD + sinusoids(0, num_slots, shape.d_model)
        if shape.embedding_norm:
            x_LD = embedding.norm(x_LD)
            memory_MD = encoder.memory_embedding_norm(memory_MD)
        first_MD = memory_MD
        for i in range(shape.num_layers):
            block = encoder.blocks[0 if shape.tie_layers else i]
            pre = shape.norm == "pre"
            inner_LD = block.norm1(x_LD) if pre else x_LD
            inner_MD = block.memory_norm(memory_MD) if pre else memory_MD
            if isinstance(block.mixer, LunaCausalAttention):
                y_LD = causal_attention(block.mixer, inner_LD, inner_MD)
                packed_MD = None
            else:
                y_LD, packed_MD = attention(block.mixer, inner_LD, inner_MD, inner_LD)
            x_LD = x_LD + y_LD
            if not pre:
                x_LD = block.norm1(x_LD)
                x_LD = block.norm2(x_LD + block.ffn(x_LD))
            else:
                x_LD = x_LD + block.ffn(block.norm2(x_LD))
            is_last = i == shape.num_layers - 1
            if not block.updates_memory or packed_MD is None:
                memory_MD = first_MD
            elif not is_last or encoder.pool_memory:
                memory_MD = memory_MD + packed_MD
                if not pre:
                    memory_MD = block.memory_norm(memory_MD)
        rows = memory_MD if encoder.pool_memory else x_LD
        if shape.norm == "pre":
            rows = encoder.memory_norm(rows) if encoder.pool_memory else encoder.norm(rows)
        examples.append(rows)
    out = x_LD.new_zeros(*encoder.output_mask(mask_BL).shape, shape.d_model)
    for b, rows in enumerate(examples):
        out[b, : len(rows)] = rows
    return out
