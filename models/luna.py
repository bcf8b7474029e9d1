"""Luna: tokens attend to a short packed memory, and the memory to the tokens; linear in length.

Source: Ma et al. 2021, https://arxiv.org/abs/2106.01540, and the authors' code, where it differs
from the paper: scores are divided by the square root of a head's width, keys and values are untied
unless `tie_kv`, and the packed result has no output projection. One deviation from both: the number
of slots an example may use depends on its own length alone, never on the batch.

Shapes: B batch, L length, N length of the context, M memory slots, D d_model, H heads, K head dim,
S = H * M, G chunks of C positions. `mask` is bool, True = real token or slot in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.dropout import Dropout
from models.encoder import Encoder
from models.kernels import causal_sums
from models.layers import FeedForward, StackedLinear, attend, check_causal, sinusoidal_table
from models.norm import NoNorm, make_norm
from models.shape import Shape


def split_heads(x_BLD: Tensor, num_heads: int) -> Tensor:
    """[B, L, H * K] to [B, H, L, K]."""
    return rearrange(x_BLD, "b l (h k) -> b h l k", h=num_heads)


def join_heads(x_BHLK: Tensor) -> Tensor:
    """[B, H, L, K] to [B, L, H * K]."""
    return rearrange(x_BHLK, "b h l k -> b l (h k)")


class LunaAttention(nn.Module):
    """Pack a context into the memory, then let every query position read the packed result.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here. The packed
            result is added to the memory as it is, so packing splits `d_model` whatever
            `shape.head_dim` says; that holds for reading.
        num_packed_heads: heads of the packing attention.
        tie_kv: one map gives both keys and values, in packing and in reading.
    """

    def __init__(self, shape: Shape, *, num_packed_heads: int, tie_kv: bool) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_packed_heads = num_packed_heads
        self.dropout = Dropout(shape.attention_dropout)
        width, bias = shape.num_heads * shape.attention_head_dim, shape.attention_bias
        parts = 1 if tie_kv else 2
        self.pack_query = nn.Linear(shape.d_model, shape.d_model, bias=bias)
        self.pack_kv = StackedLinear(shape.d_model, shape.d_model, parts=parts, bias=bias)
        self.query = nn.Linear(shape.d_model, width, bias=bias)
        self.kv = StackedLinear(shape.d_model, width, parts=parts, bias=bias)
        self.out = nn.Linear(width, shape.d_model, bias=bias)

    def forward(
        self,
        x_BLD: Tensor,
        memory_BMD: Tensor,
        mask_BN: Tensor,
        memory_mask_BM: Tensor,
        context_BND: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention output [B, L, D] and packed memory [B, M, D].

        The context is x itself, or another sequence (a decoder's queries over an encoder's output);
        `mask_BN` belongs to the context. For a context that stays the same, call `pack` once and
        `unpack` for each query.
        """
        packed_BMD = self.pack(memory_BMD, x_BLD if context_BND is None else context_BND, mask_BN)
        return self.unpack(x_BLD, packed_BMD, memory_mask_BM), packed_BMD

    def pack(self, memory_BMD: Tensor, context_BND: Tensor, mask_BN: Tensor) -> Tensor:
        """Let each memory slot attend to the context; [B, M, D]."""
        q_BHMK = split_heads(self.pack_query(memory_BMD), self.num_packed_heads)
        if self.num_packed_heads * memory_BMD.shape[1] <= context_BND.shape[2]:
            return self._pack_few(q_BHMK, context_BND, mask_BN)
        parts = self.pack_kv(context_BND).chunk(self.pack_kv.parts, dim=-1)
        k_BHNK, v_BHNK = (split_heads(x, self.num_packed_heads) for x in (parts[0], parts[-1]))
        return join_heads(attend(q_BHMK, k_BHNK, v_BHNK, mask_BN, dropout=self._rate()))

    def unpack(self, x_BLD: Tensor, packed_BMD: Tensor, memory_mask_BM: Tensor) -> Tensor:
        """Let each position attend to the packed slots in use; [B, L, D]."""
        parts = self.kv(packed_BMD).chunk(self.kv.parts, dim=-1)
        k_BHMK, v_BHMK = (split_heads(x, self.num_heads) for x in (parts[0], parts[-1]))
        if self.num_heads * packed_BMD.shape[1] <= x_BLD.shape[2]:
            return self._unpack_few(x_BLD, k_BHMK, v_BHMK, memory_mask_BM)
        q_BHLK = split_heads(self.query(x_BLD), self.num_heads)
        y_BHLK = attend(q_BHLK, k_BHMK, v_BHMK, memory_mask_BM, dropout=self._rate())
        return self.out(join_heads(y_BHLK))

    def _rate(self) -> float:
        return self.dropout.p if self.training else 0.0

    # With few slots it is less work to apply the linear maps of the long side to the slots instead:
    # q . (W x) = (W^T q) . x, and the weighted sum of W x is W times the weighted sum of x.

    def _pack_few(self, q_BHMK: Tensor, context_BND: Tensor, mask_BN: Tensor) -> Tensor:
        num_heads, width = q_BHMK.shape[1], q_BHMK.shape[3]
        maps = self.pack_kv.weight.unflatten(0, (self.pack_kv.parts, num_heads, width))
        # A bias of the keys adds the same to all scores of a slot, so the softmax cancels it.
        slots_BHMD = torch.einsum("bhmk,hkd->bhmd", q_BHMK * width**-0.5, maps[0])
        score_BSN = torch.baddbmm(
            score_bias(mask_BN, slots_BHMD.dtype)[:, None], slots_BHMD.flatten(1, 2), context_BND.mT
        )
        weight_BSN = self.dropout(score_BSN.softmax(dim=-1))
        sum_BHMD = (weight_BSN @ context_BND).unflatten(1, (num_heads, -1))
        packed_BHMK = torch.einsum("bhmd,hkd->bhmk", sum_BHMD, maps[-1])
        if self.pack_kv.bias is not None:
            bias_HK = self.pack_kv.bias.unflatten(0, (self.pack_kv.parts, num_heads, width))[-1]
            total_BHM1 = weight_BSN.sum(dim=-1).unflatten(1, (num_heads, -1))[..., None]
            packed_BHMK = packed_BHMK + total_BHM1 * bias_HK[:, None]
        return join_heads(packed_BHMK)

    def _unpack_few(
        self, x_BLD: Tensor, k_BHMK: Tensor, v_BHMK: Tensor, memory_mask_BM: Tensor
    ) -> Tensor:
        _, num_heads, num_slots, width = k_BHMK.shape
        k_BHMK = k_BHMK * width**-0.5
        query_HKD = self.query.weight.unflatten(0, (num_heads, width))
        slots_BHMD = torch.einsum("bhmk,hkd->bhmd", k_BHMK, query_HKD)
        bias_BHM = score_bias(memory_mask_BM, x_BLD.dtype)[:, None].expand(-1, num_heads, -1)
        if self.query.bias is not None:
            bias_HK = self.query.bias.unflatten(0, (num_heads, width))
            bias_BHM = bias_BHM + torch.einsum("bhmk,hk->bhm", k_BHMK, bias_HK)
        score_BLS = torch.baddbmm(bias_BHM.flatten(1)[:, None], x_BLD, slots_BHMD.flatten(1, 2).mT)
        weight_BLHM = self.dropout(score_BLS.unflatten(2, (num_heads, num_slots)).softmax(dim=-1))
        values_BHMD = torch.einsum(
            "bhmk,dhk->bhmd", v_BHMK, self.out.weight.unflatten(1, (num_heads, width))
        )
        weight_BLS, values_BSD = weight_BLHM.flatten(2), values_BHMD.flatten(1, 2)
        if self.out.bias is None:
            return torch.bmm(weight_BLS, values_BSD)
        return torch.baddbmm(self.out.bias, weight_BLS, values_BSD)


def score_bias(mask_BN: Tensor, dtype: torch.dtype) -> Tensor:
    """To be added to scores: 0 where a key may be read, else -inf; 0 in a row without any key."""
    hidden_BN = ~mask_BN & mask_BN.any(dim=1, keepdim=True)
    return torch.zeros(mask_BN.shape, dtype=dtype, device=mask_BN.device).masked_fill(
        hidden_BN, -torch.inf
    )


@dataclass(frozen=True)
class CausalState:
    """What step-by-step causal attention carries: the projected memory, two running sums, a count.

    Nothing in it grows with the number of steps.
    """

    pack_query_BHMK: Tensor
    key_sum_BHKM: Tensor
    value_sum_BHMK: Tensor
    num_steps: int


def causal_mean(x_BHLI: Tensor, y_BHLI: Tensor, z_BHLJ: Tensor) -> Tensor:
    """Row t (from 1) is x_t times the mean over s <= t of the outer products y_s z_s; [B, H, L, J].

    Low precision divides and adds up in float32.
    """
    work_dtype = torch.promote_types(x_BHLI.dtype, torch.float32)
    length, device = x_BHLI.shape[2], x_BHLI.device
    count_L1 = torch.arange(1, length + 1, dtype=work_dtype, device=device)[:, None]
    return causal_sums(x_BHLI / count_L1, y_BHLI, z_BHLJ).to(x_BHLI.dtype)


class LunaCausalAttention(nn.Module):
    """Causal Luna attention: position t reads a memory packed from positions 0 .. t.

    Packing weights come from an activation in place of softmax, so that running sums carry them
    from position to position. Keys at padding are not masked, as in the authors' code: padding
    stands behind the tokens, where a causal row does not look.

    Args:
        shape: heads, widths, `attention_bias` and `attention_dropout` are read here.
        tie_kv: one map gives both keys and values for reading.
        activation: softplus(z) = log2(1 + 2^z), or elu(z) + 1 as before August 2021.
    """

    def __init__(
        self, shape: Shape, *, tie_kv: bool, activation: Literal["softplus", "elu"]
    ) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.scale = shape.attention_head_dim**-0.5
        self.activation = activation
        self.dropout = Dropout(shape.attention_dropout)
        width, bias = shape.num_heads * shape.attention_head_dim, shape.attention_bias
        self.pack_query = nn.Linear(shape.d_model, width, bias=bias)
        # From the tokens: query, packing key, and key and value for reading, one or two maps.
        self.tokens = StackedLinear(shape.d_model, width, parts=3 if tie_kv else 4, bias=bias)
        self.out = nn.Linear(width, shape.d_model, bias=bias)

    def forward(
        self, x_BLD: Tensor, memory_BMD: Tensor, mask_BL: Tensor, memory_mask_BM: Tensor
    ) -> tuple[Tensor, None]:
        """All positions at once; [B, L, D]. There is no packed memory to hand on."""
        q_BHLK, pack_k_BHLK, k_BHLK, v_BHLK = self._project(x_BLD)
        weight_BHLM = self._pack_weight(pack_k_BHLK, self._pack_query(memory_BMD))
        score_BHLM = causal_mean(q_BHLK, k_BHLK, weight_BHLM)
        read_BHLM = self._read_weight(score_BHLM, memory_mask_BM)
        return self.out(join_heads(causal_mean(read_BHLM, weight_BHLM, v_BHLK))), None

    def start(self, memory_BMD: Tensor) -> CausalState:
        """State before the first position."""
        p_BHMK = self._pack_query(memory_BMD)
        return CausalState(
            pack_query_BHMK=p_BHMK,
            key_sum_BHKM=torch.zeros_like(p_BHMK.mT),
            value_sum_BHMK=torch.zeros_like(p_BHMK),
            num_steps=0,
        )

    def step(
        self, x_B1D: Tensor, state: CausalState, memory_mask_BM: Tensor
    ) -> tuple[Tensor, CausalState]:
        """The next position alone; [B, 1, D] and the state after it."""
        q_BH1K, pack_k_BH1K, k_BH1K, v_BH1K = self._project(x_B1D)
        weight_BH1M = self._pack_weight(pack_k_BH1K, state.pack_query_BHMK)
        state = CausalState(
            pack_query_BHMK=state.pack_query_BHMK,
            key_sum_BHKM=state.key_sum_BHKM + k_BH1K.mT @ weight_BH1M,
            value_sum_BHMK=state.value_sum_BHMK + weight_BH1M.mT @ v_BH1K,
            num_steps=state.num_steps + 1,
        )
        score_BH1M = q_BH1K @ state.key_sum_BHKM / state.num_steps
        read_BH1M = self._read_weight(score_BH1M, memory_mask_BM)
        y_BH1K = read_BH1M @ state.value_sum_BHMK / state.num_steps
        return self.out(join_heads(y_BH1K)), state

    def _pack_query(self, memory_BMD: Tensor) -> Tensor:
        return split_heads(self.pack_query(memory_BMD), self.num_heads) * self.scale

    def _project(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = self.tokens(x_BLD).chunk(self.tokens.parts, dim=-1)
        q, pack_k, k, v = (
            split_heads(part, self.num_heads) for part in (*parts[:2], parts[2], parts[-1])
        )
        return q * self.scale, pack_k, k, v

    def _pack_weight(self, pack_k_BHLK: Tensor, pack_query_BHMK: Tensor) -> Tensor:
        score_BHLM = pack_k_BHLK @ pack_query_BHMK.mT
        if self.activation == "softplus":
            return self.dropout(F.softplus(score_BHLM, beta=math.log(2.0)))
        return self.dropout(F.elu(score_BHLM) + 1)

    def _read_weight(self, score_BHLM: Tensor, memory_mask_BM: Tensor) -> Tensor:
        score_BHLM = score_BHLM.masked_fill(~memory_mask_BM[:, None, None, :], -torch.inf)
        return self.dropout(score_BHLM.softmax(dim=-1))


def of_memory(shape: Shape) -> Shape:
    """The shape for norms of the memory, whose slots are no tokens to take batch statistics of."""
    return replace(shape, norm_kind="layer") if shape.norm_kind == "batch" else shape


class LunaBlock(nn.Module):
    """One Luna layer: attention for tokens and memory, feed-forward for the tokens only.

    The memory has a residual connection and a norm of its own.
    """

    def __init__(self, shape: Shape, mixer: nn.Module) -> None:
        super().__init__()
        self.pre_norm = shape.norm == "pre"
        self.updates_memory = True
        self.norm1 = make_norm(shape)
        self.memory_norm: nn.Module | None = make_norm(of_memory(shape))
        self.mixer = mixer
        self.dropout = Dropout(shape.dropout)
        self.norm2 = make_norm(shape)
        self.ffn = FeedForward(shape)

    def forward(
        self, x_BLD: Tensor, memory_BMD: Tensor, mask_BL: Tensor, memory_mask_BM: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Next tokens [B, L, D] and memory [B, M, D]."""
        if self.pre_norm:
            assert self.memory_norm is not None
            normed_BMD = self.memory_norm(memory_BMD)
            normed_BLD = self.norm1(x_BLD, mask_BL)
            y_BLD, packed_BMD = self.mixer(normed_BLD, normed_BMD, mask_BL, memory_mask_BM)
            if self.updates_memory:
                memory_BMD = memory_BMD + self.dropout(packed_BMD)
            return self._finish(x_BLD + self.dropout(y_BLD), mask_BL), memory_BMD
        y_BLD, packed_BMD = self.mixer(x_BLD, memory_BMD, mask_BL, memory_mask_BM)
        if self.memory_norm is not None:
            memory_BMD = self.memory_norm(memory_BMD + self.dropout(packed_BMD))
        return self._finish(x_BLD + self.dropout(y_BLD), mask_BL), memory_BMD

    def start(self, memory_BMD: Tensor) -> CausalState:
        """State of a causal layer before the first position, for `step`."""
        assert isinstance(self.mixer, LunaCausalAttention)
        if self.pre_norm:
            assert self.memory_norm is not None
            memory_BMD = self.memory_norm(memory_BMD)
        return self.mixer.start(memory_BMD)

    def step(
        self, x_B1D: Tensor, mask_B1: Tensor, state: CausalState
    ) -> tuple[Tensor, CausalState]:
        """The next position of a causal layer alone; [B, 1, D] and the state after it."""
        assert isinstance(self.mixer, LunaCausalAttention)
        memory_mask_BM = mask_B1.expand(-1, state.pack_query_BHMK.shape[2])
        inner_B1D = self.norm1(x_B1D, mask_B1) if self.pre_norm else x_B1D
        y_B1D, state = self.mixer.step(inner_B1D, state, memory_mask_BM)
        return self._finish(x_B1D + self.dropout(y_B1D), mask_B1), state

    def _finish(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """What follows the residual connection around the attention."""
        if self.pre_norm:
            return x_BLD + self.ffn(self.norm2(x_BLD, mask_BL))
        x_BLD = self.norm1(x_BLD, mask_BL)
        return self.norm2(x_BLD + self.ffn(x_BLD), mask_BL)

    def keep_memory(self) -> None:
        """Hand the memory on as it came; drops what only its update needs."""
        self.updates_memory = False
        if not self.pre_norm:
            self.memory_norm = None


class LunaEncoder(Encoder):
    """Encoder whose layers hand on a packed memory besides the tokens.

    With `shape.positions="sinusoidal"` tokens count from row 2 of fairseq's table and the memory
    has rows of its own, from 0; `shape.embedding_scale` and `shape.embedding_norm` act on both.
    With learned positions the memory has none.

    Args:
        shape: sizes and layout.
        projection_length: M, slots of packed memory.
        tie_kv: one map gives both keys and values.
        num_packed_heads: heads of the packing attention; None: as `shape.num_heads`.
        contextual_memory: each layer hands its packed memory to the next; otherwise, and in any
            causal layer, all layers start from the learned memory.
        dynamic_projection: an example shorter than M uses only as many slots as it has tokens.
            Causal models always use all, since a length is not known before the end.
        pool_memory: classify from the packed memory in place of the tokens; the last layer's way
            back to the tokens is then not used.
        causal: position t sees positions 0 .. t only.
        activation: of causal packing.

    Raises:
        ValueError: a value is out of range, or two options cannot hold together.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        projection_length: int = 16,
        tie_kv: bool = False,
        num_packed_heads: int | None = None,
        contextual_memory: bool = True,
        dynamic_projection: bool = True,
        pool_memory: bool = False,
        causal: bool = False,
        activation: Literal["softplus", "elu"] = "softplus",
    ) -> None:
        packed_heads = shape.num_heads if num_packed_heads is None else num_packed_heads
        hands_on = contextual_memory and not causal
        if projection_length < 1:
            raise ValueError(f"model.projection_length={projection_length}: expected at least 1")
        if packed_heads < 1 or shape.d_model % packed_heads:
            raise ValueError(
                f"model.num_packed_heads={packed_heads} does not divide shape.d_model="
                f"{shape.d_model}; choose a divisor"
            )
        if activation not in ("softplus", "elu"):
            raise ValueError(f"model.activation={activation}: expected softplus or elu")
        if activation != "softplus" and not causal:
            raise ValueError(f"model.activation={activation} acts only with model.causal=true")
        if causal and num_packed_heads not in (None, shape.num_heads):
            raise ValueError(
                f"model.num_packed_heads={num_packed_heads} with model.causal=true: a causal layer "
                "packs and reads with the same heads; leave it null"
            )
        if pool_memory and not hands_on:
            raise ValueError(
                "model.pool_memory=true needs model.contextual_memory=true and model.causal=false: "
                "otherwise the memory holds nothing about the example"
            )
        if pool_memory and shape.pooling in ("cls", "first", "last"):
            raise ValueError(
                f"model.pool_memory=true with shape.pooling={shape.pooling}: memory slots are not "
                "in the order of tokens; use shape.pooling=mean, max or attention"
            )
        check_causal(shape, causal)

        def mixer() -> nn.Module:
            if causal:
                return LunaCausalAttention(shape, tie_kv=tie_kv, activation=activation)
            return LunaAttention(shape, num_packed_heads=packed_heads, tie_kv=tie_kv)

        super().__init__(shape, mixer, LunaBlock)
        self.dynamic_projection = dynamic_projection and not causal
        self.pool_memory = pool_memory
        self.uses_all = self.rows_are_tokens = not pool_memory
        self.memory = nn.Parameter(torch.empty(projection_length, shape.d_model))
        nn.init.normal_(self.memory, std=shape.d_model**-0.5)
        self.memory_positions: Tensor | None
        table = None
        if self.embedding.positions is not None and shape.positions == "sinusoidal":
            self.embedding.positions = sinusoidal_table(
                len(self.embedding.positions), shape.d_model, first_row=2, sines_first=True
            )
            table = sinusoidal_table(projection_length, shape.d_model, sines_first=True)
        self.register_buffer("memory_positions", table, persistent=False)
        has_norm = shape.embedding_norm
        self.memory_embedding_norm = make_norm(of_memory(shape)) if has_norm else NoNorm()
        has_norm = shape.norm == "pre" and pool_memory
        self.memory_norm = make_norm(of_memory(shape)) if has_norm else NoNorm()
        # A memory that nobody reads is not updated, so that no parameter goes without gradient.
        last_is_read = pool_memory or (shape.tie_layers and shape.num_layers > 1)
        for i, block in enumerate(self.blocks, start=1):
            assert isinstance(block, LunaBlock)
            if not hands_on or (i == len(self.blocks) and not last_is_read):
                block.keep_memory()

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Encode; [B, L, D] as every encoder, or the memory [B, M, D] with `pool_memory`.

        Raises:
            ValueError: the input is longer than `shape.max_length`.
        """
        x_BLD, memory_BMD = self.encode(tokens_BL, mask_BL)
        return memory_BMD if self.pool_memory else x_BLD

    def encode(self, tokens_BL: Tensor, mask_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, D] and packed memory [B, M, D] after the last layer.

        The memory lacks the last layer's update unless `pool_memory`.
        """
        mask_BL = super().output_mask(mask_BL)
        x_BLD = self.embedding(tokens_BL, mask_BL)
        x_BLD = x_BLD * mask_BL[..., None].to(x_BLD.dtype)
        memory_mask_BM = self.slots_in_use(mask_BL)
        memory_BMD = self._first_memory(memory_mask_BM)
        for block in self.layers():
            x_BLD, memory_BMD = self.apply_layer(block, x_BLD, memory_BMD, mask_BL, memory_mask_BM)
        return self.norm(x_BLD, mask_BL), self.memory_norm(memory_BMD)

    def start_layers(self, batch_size: int) -> list[CausalState]:
        """The states of all layers before the first token."""
        all_slots_BM = torch.ones(
            batch_size, len(self.memory), dtype=torch.bool, device=self.memory.device
        )
        memory_BMD = self._first_memory(all_slots_BM)
        return [block.start(memory_BMD) for block in self.layers()]

    def output_mask(self, mask_BL: Tensor) -> Tensor:
        """Mask of the rows that `forward` returns: tokens, or the slots in use."""
        mask_BL = super().output_mask(mask_BL)
        return self.slots_in_use(mask_BL) if self.pool_memory else mask_BL

    def slots_in_use(self, mask_BL: Tensor) -> Tensor:
        """Slots that each example may use, the first min(M, own length); [B, M].

        There are at most L slots, since no example of this batch can use more.
        """
        num_slots = len(self.memory)
        if not self.dynamic_projection:
            return mask_BL.new_ones(len(mask_BL), num_slots)
        slots_M = torch.arange(min(num_slots, mask_BL.shape[1]), device=mask_BL.device)
        return slots_M < mask_BL.sum(dim=1, keepdim=True)

    def _first_memory(self, memory_mask_BM: Tensor) -> Tensor:
        num_slots = memory_mask_BM.shape[1]
        memory_MD = self.memory[:num_slots] * self.embedding.scale
        if self.memory_positions is not None:
            memory_MD = memory_MD + self.memory_positions[:num_slots]
        memory_MD = self.memory_embedding_norm(memory_MD)
        memory_BMD = self.embedding.dropout(memory_MD.expand(len(memory_mask_BM), -1, -1))
        return memory_BMD.masked_fill(~memory_mask_BM[..., None], 0.0)
