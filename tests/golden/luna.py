"""Adapters of the Luna family: attention, causal attention, layers, encoders and classifiers.

Differences that are bridged here: the files are time-major and their masks say True = padding; the
norms' gains start from 1 (`norm`); padding is told by a token id and may stand anywhere, so rows
are first sorted into tokens, then padding, which changes no number since positions count tokens;
the number of packed slots follows the longest row of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from models.classifier import Classifier, pool_tokens
from models.layers import sinusoidal_table
from models.luna import LunaAttention, LunaBlock, LunaCausalAttention, LunaEncoder
from models.shape import Shape
from tests.golden.case import Case, Result, call, linear, norm


def batch_first(x: Tensor) -> Tensor:
    return rearrange(x, "l b d -> b l d")


def time_first(x: Tensor) -> Tensor:
    return rearrange(x, "b l d -> l b d")


def real(case: Case, name: str, rows_BLD: Tensor) -> Tensor:
    """Our mask of these rows from a file's padding mask, which may be absent."""
    padding = case.inputs.get(name)
    return rows_BLD.new_ones(rows_BLD.shape[:2], dtype=torch.bool) if padding is None else ~padding


def attention_shape(config: dict[str, Any], **sizes: Any) -> Shape:
    return Shape(
        vocab_size=1,
        max_length=1,
        d_model=config["embed_dim"],
        num_heads=config["num_heads"],
        attention_bias=config.get("bias", True),
        **sizes,
    )


def attention_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    """Luna attention, tied or untied, `ours` and `theirs` with their trailing dots."""
    tied = case.config["tie_kv"]
    pack = ["pc_proj"] if tied else ["pk_proj", "pv_proj"]
    read = ["c_proj"] if tied else ["k_proj", "v_proj"]
    return (
        linear(case, f"{ours}pack_query", f"{theirs}pq_proj")
        | linear(case, f"{ours}pack_kv", *(theirs + name for name in pack))
        | linear(case, f"{ours}query", f"{theirs}q_proj")
        | linear(case, f"{ours}kv", *(theirs + name for name in read))
        | linear(case, f"{ours}out", f"{theirs}out_proj")
    )


def block_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    return (
        attention_params(case, f"{ours}mixer.", f"{theirs}self_attn.")
        | norm(case, f"{ours}norm1", f"{theirs}self_attn_layer_norm")
        | norm(case, f"{ours}memory_norm", f"{theirs}self_atten_proj_layer_norm")
        | linear(case, f"{ours}ffn.up", f"{theirs}fc1")
        | linear(case, f"{ours}ffn.down", f"{theirs}fc2")
        | norm(case, f"{ours}norm2", f"{theirs}final_layer_norm")
    )


def luna_attention(case: Case) -> Result:
    config = case.config
    model = case.build(
        lambda: LunaAttention(
            attention_shape(config),
            num_packed_heads=config["num_pheads"],
            tie_kv=config["tie_kv"],
        )
    )
    x_BLD, memory_BMD = batch_first(case.inputs["query"]), batch_first(case.inputs["pquery"])
    context_BND = batch_first(case.inputs["context"]) if "context" in case.inputs else None
    y_BLD, packed_BMD = call(
        model,
        attention_params(case, "", ""),
        x_BLD,
        memory_BMD,
        real(case, "context_padding_mask", x_BLD if context_BND is None else context_BND),
        real(case, "pcontext_padding_mask", memory_BMD),
        context_BND,
    )
    return Result({"attn": time_first(y_BLD), "pcontext": time_first(packed_BMD)})


def luna_causal_attention(case: Case) -> Result:
    """The parallel form gives the output, the step-by-step form the file's intermediate."""
    config = case.config
    activation = "softplus" if config["activation"].startswith("softplus") else "elu"
    model = case.build(
        lambda: LunaCausalAttention(
            attention_shape(config), tie_kv=config["tie_kv"], activation=activation
        )
    )
    read = ["c_proj"] if config["tie_kv"] else ["k_proj", "v_proj"]
    params = (
        linear(case, "pack_query", "pq_proj")
        | linear(case, "tokens", "q_proj", "pc_proj", *read)
        | linear(case, "out", "out_proj")
    )
    x_BLD, memory_BMD = batch_first(case.inputs["query"]), batch_first(case.inputs["pquery"])
    memory_mask_BM = real(case, "pkey_padding_mask", memory_BMD)
    y_BLD, _ = call(model, params, x_BLD, memory_BMD, real(case, "", x_BLD), memory_mask_BM)
    state = call(model, params, memory_BMD, method="start")
    steps = []
    for x_B1D in x_BLD.split(1, dim=1):
        y_B1D, state = call(model, params, x_B1D, state, memory_mask_BM, method="step")
        steps.append(y_B1D)
    return Result(
        {"attn": time_first(y_BLD)}, {"attn_incremental": time_first(torch.cat(steps, dim=1))}
    )


def luna_layer(case: Case) -> Result:
    config = case.config
    shape = attention_shape(
        config,
        d_ff=config["ffn_dim"],
        activation=config["activation_fn"],
        norm="pre" if config["normalize_before"] else "post",
    )
    model = case.build(
        lambda: LunaBlock(
            shape,
            LunaAttention(shape, num_packed_heads=config["num_pheads"], tie_kv=config["tie_kv"]),
        )
    )
    x_BLD, memory_BMD = batch_first(case.inputs["x"]), batch_first(case.inputs["px"])
    x_BLD, memory_BMD = call(
        model,
        block_params(case, "", ""),
        x_BLD,
        memory_BMD,
        real(case, "x_padding_mask", x_BLD),
        real(case, "px_padding_mask", memory_BMD),
    )
    return Result({"x": time_first(x_BLD), "px": time_first(memory_BMD)})


class PixelEmbedding(nn.Module):
    """Real-valued inputs to vectors, t * weight + bias, in place of a table."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))
        self.bias = nn.Parameter(torch.empty(d_model))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return tokens_BL[..., None] * self.weight + self.bias


class WholeMemoryEncoder(LunaEncoder):
    """For classifying from packed memory as the authors do: slots not in use count as well."""

    def output_mask(self, mask_BL: Tensor) -> Tensor:
        return torch.ones_like(longest_memory(self, super().output_mask(mask_BL), mask_BL))

    def forward(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        return longest_memory(self, super().forward(tokens_BL, mask_BL), mask_BL)


def longest_memory(encoder: LunaEncoder, rows_BM: Tensor, mask_BL: Tensor) -> Tensor:
    """Cut memory rows to what the longest example of the batch uses."""
    if not encoder.dynamic_projection:
        return rows_BM
    return rows_BM[:, : min(len(encoder.memory), int(mask_BL.sum(dim=1).max()))]


class EncoderCase:
    """What encoder and classifier files have in common: sizes, weights and token rows."""

    def __init__(self, case: Case, theirs: str, *, num_heads: str, num_layers: str) -> None:
        config = case.config
        self.case, self.theirs = case, theirs
        self.padding_id: int | None = config["padding_idx"]
        self.real_valued = f"{theirs}embed_tokens.bias" in case.params
        self.width = case.params[f"{theirs}projected_embeddings"].shape[1]
        self.has_positions = config.get("use_position_embeddings", True)
        learned = f"{theirs}embed_positions.weight" in case.params
        offset = config.get("offset_positions_by_padding", not self.real_valued)
        self.first_row = self.padding_id + 1 if offset and self.padding_id is not None else 0
        self.table = case.params.get(f"{theirs}embed_positions.weight")
        if self.table is not None:
            self.table = self.table[self.first_row :]
        scale = config["embed_scale"]
        if scale is not None and not math.isclose(scale, math.sqrt(self.width)):
            raise ValueError(f"{case.path.name}: embed_scale={scale} is not the root of the width")
        lengths = [x.shape[1] for name, x in case.inputs.items() if "tokens" in name]
        vocab = 1 if self.real_valued else len(case.params[f"{theirs}embed_tokens.weight"])
        self.sizes: dict[str, Any] = dict(
            vocab_size=vocab,
            max_length=max(lengths) if self.table is None else len(self.table),
            d_model=self.width,
            d_ff=len(case.params[f"{theirs}layers.0.fc1.bias"]),
            num_layers=config[num_layers],
            num_heads=config[num_heads],
            activation=config["activation_fn"],
            norm="pre" if config["normalize_before"] else "post",
            positions="learned" if learned else "sinusoidal" if self.has_positions else "none",
            embedding_norm=config["layernorm_embedding"],
            embedding_scale=scale is not None,
            tie_layers=config["tie_layer_weights"],
        )

    def build(
        self, shape: Shape, *, pool_memory: bool, kind: type[LunaEncoder] = LunaEncoder
    ) -> LunaEncoder:
        config = self.case.config
        encoder = kind(
            shape,
            projection_length=len(self.case.params[f"{self.theirs}projected_embeddings"]),
            tie_kv=config["tie_kv"],
            num_packed_heads=config["num_projected_attention_heads"],
            dynamic_projection=config["dynamic_projection"],
            pool_memory=pool_memory,
        )
        if self.real_valued:
            encoder.embedding.tokens = PixelEmbedding(self.width)
        return encoder

    def params(self, shape: Shape, *, pool_memory: bool) -> dict[str, Tensor]:
        case, theirs = self.case, self.theirs
        mapped = {
            "embedding.tokens.weight": case.params[f"{theirs}embed_tokens.weight"],
            "memory": case.params[f"{theirs}projected_embeddings"],
        }
        if self.real_valued:
            mapped["embedding.tokens.bias"] = case.params[f"{theirs}embed_tokens.bias"]
        if self.table is not None:
            mapped["embedding.positions"] = self.table
        elif self.has_positions and self.first_row != 2:
            with case.default_dtype():
                mapped["embedding.positions"] = sinusoidal_table(
                    shape.max_length, shape.d_model, first_row=self.first_row, sines_first=True
                )
        if shape.embedding_norm:
            mapped |= norm(case, "embedding.norm", f"{theirs}emb_layer_norm")
            mapped |= norm(case, "memory_embedding_norm", f"{theirs}proj_emb_layer_norm")
        num_blocks = 1 if shape.tie_layers else shape.num_layers
        for i in range(num_blocks):
            mapped |= block_params(case, f"blocks.{i}.", f"{theirs}layers.{i}.")
        if shape.norm == "pre":
            mapped |= norm(case, "norm", f"{theirs}layer_norm")
        if shape.norm == "pre" and pool_memory:
            mapped |= norm(case, "memory_norm", f"{theirs}proj_layer_norm")
        # The last update of a memory that nobody reads has no place in our model; the file must
        # say that its norm has no gradient.
        if shape.norm == "post" and not pool_memory and num_blocks == shape.num_layers:
            for part in ("weight", "bias"):
                del mapped[f"blocks.{num_blocks - 1}.memory_norm.{part}"]
                name = f"{theirs}layers.{num_blocks - 1}.self_atten_proj_layer_norm.{part}"
                assert f"param/{name}" in case.without_gradient, name
        return mapped

    def sorted_tokens(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of an input with the padding moved behind the tokens, their mask, the order."""
        tokens_BL = self.case.inputs[name]
        mask_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        if self.padding_id is not None and not self.real_valued:
            mask_BL = tokens_BL != self.padding_id
        order_BL = (~mask_BL).int().argsort(dim=1, stable=True)
        return tokens_BL.gather(1, order_BL), mask_BL.gather(1, order_BL), order_BL


def luna_encoder(case: Case, *, zero_padding: bool) -> Result:
    """Final tokens and memory, and the sentence vector made from the tokens."""
    setup = EncoderCase(case, "", num_heads="num_attention_heads", num_layers="num_encoder_layers")
    shape = Shape(**setup.sizes)
    encoder = case.build(lambda: setup.build(shape, pool_memory=True))
    tokens_BL, mask_BL, order_BL = setup.sorted_tokens("tokens")
    x_BLD, memory_BMD = call(
        encoder, setup.params(shape, pool_memory=True), tokens_BL, mask_BL, method="encode"
    )
    if zero_padding:
        x_BLD = x_BLD * mask_BL[..., None]
    x_BLD = x_BLD.gather(1, order_BL.argsort(dim=1)[..., None].expand_as(x_BLD))
    if case.config["sen_rep_type"] == "mp":
        sentence_BD = x_BLD.sum(dim=1) / case.inputs["src_lengths"][:, None]
    else:
        sentence_BD = pool_tokens(x_BLD, torch.ones_like(mask_BL), "first")
    memory_BMD = longest_memory(encoder, memory_BMD, mask_BL)
    return Result(
        {"sentence_rep": sentence_BD, "px": time_first(memory_BMD), "x": time_first(x_BLD)}
    )


def luna_classifier(case: Case) -> Result:
    """A whole classifier of one sequence or a pair, in one call where rows allow it."""
    config = case.config
    setup = EncoderCase(
        case, "encoder.encoder.", num_heads="encoder_attention_heads", num_layers="encoder_layers"
    )
    use_memory, mean = config["use_p"], config["sen_rep_type"] == "mp"
    shape = Shape(
        pooling="mean" if mean or use_memory else "first",
        head_hidden=(),
        head_bias=False,
        **setup.sizes,
    )
    kind = WholeMemoryEncoder if use_memory else LunaEncoder
    num_sequences = 2 if config["dual"] else 1
    model = case.build(
        lambda: Classifier(
            setup.build(shape, pool_memory=use_memory, kind=kind),
            shape,
            config["sentence_class_num"],
            num_sequences,
        )
    )
    params = {
        f"encoder.{name}": value
        for name, value in setup.params(shape, pool_memory=use_memory).items()
    }
    params["head.0.weight"] = case.params["sentence_projection_layer.weight"]

    names = ["src", "src1"][:num_sequences]
    rows = [setup.sorted_tokens(f"{name}_tokens") for name in names]
    lengths_BS = torch.stack([mask_BL.sum(dim=1) for _, mask_BL, _ in rows], dim=1)
    told_BS = torch.stack([case.inputs[f"{name}_lengths"] for name in names], dim=1)
    in_order = all(bool((order_BL[:, 0] == 0).all()) for _, _, order_BL in rows)
    if not use_memory and in_order and torch.equal(lengths_BS, told_BS):
        longest = max(tokens_BL.shape[1] for tokens_BL, _, _ in rows)
        tokens_BSL = torch.stack(
            [F.pad(tokens_BL, (0, longest - tokens_BL.shape[1])) for tokens_BL, _, _ in rows], dim=1
        )
        return Result({"logits": call(model, params, tokens_BSL, lengths_BS)})
    pooled = []
    for (tokens_BL, mask_BL, order_BL), told_B in zip(rows, told_BS.unbind(dim=1), strict=True):
        pooled_BD = call(model, params, tokens_BL, mask_BL, method="represent")
        if mean and not use_memory:
            pooled_BD = pooled_BD * (mask_BL.sum(dim=1) / told_B.to(case.dtype))[:, None]
        elif not use_memory:  # position 0 is zero if it is padding
            pooled_BD = pooled_BD * (order_BL[:, :1] == 0)
        pooled.append(pooled_BD)
    return Result({"logits": call(model, params, torch.stack(pooled, dim=1), method="score")})


UNITS: dict[str, Callable[[Case], Result]] = {
    "LunarMultiheadAttention": luna_attention,
    "LunarCausalAttention": luna_causal_attention,
    "LunaSentenceEncoderLayer": luna_layer,
    "LunaEncoderLayer": luna_layer,
    "LunaLRAEncoder": lambda case: luna_encoder(case, zero_padding=True),
    "LunaSentenceEncoder": lambda case: luna_encoder(case, zero_padding=False),
    "LRAModel(layer_type=luna)": luna_classifier,
}
