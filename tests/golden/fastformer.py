"""Adapters of the Fastformer family: attention, pooling and the BERT-style encoder of the authors.

Their score vectors have biases, which the softmax over positions cancels; the models here have none
and the gradients of those biases are zero.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor, nn

from models.classifier import AttentionPooling
from models.fastformer import FastformerAttention, FastformerEncoder
from models.shape import Shape
from tests.golden.case import Case, Result, call, linear, norm


def attention_params(case: Case, theirs: str = "") -> dict[str, Tensor]:
    """The mixer's parameters but for its output projection; `theirs` is a prefix, dot included."""
    mapped: dict[str, Tensor] = {}
    for name in ("query", "key", "transform"):
        mapped |= linear(case, name, f"{theirs}{name}")
    for ours, name in {"query_score": "query_att", "key_score": "key_att"}.items():
        mapped[f"{ours}.weight"] = case.params[f"{theirs}{name}.weight"]
    return mapped


def attention(case: Case) -> Result:
    """The mixer without its output projection."""
    x_BLD = case.inputs["hidden_states"]
    shape = Shape(
        vocab_size=1, max_length=1, d_model=x_BLD.shape[-1], num_heads=case.config["heads"]
    )
    model = case.build(lambda: FastformerAttention(shape, output_projection=False))
    mask_BL = case.inputs["attention_mask"][:, 0] == 0
    weights: list[Tensor] = []
    unpatched = FastformerAttention.weights

    def note(self: FastformerAttention, *args: Tensor) -> Tensor:
        weights.append(unpatched(self, *args))
        return weights[-1]

    with mock.patch.object(FastformerAttention, "weights", note):
        y_BLD = call(model, attention_params(case), x_BLD, mask_BL)
    return Result({"output": y_BLD}, dict(zip(("alpha", "beta"), weights, strict=True)))


def pooling_params(case: Case, theirs: str = "") -> dict[str, Tensor]:
    """Those of the attention pooling."""
    return linear(case, "hidden", f"{theirs}att_fc1") | linear(case, "score", f"{theirs}att_fc2")


def pooling(case: Case) -> Result:
    """Attention pooling alone, with or without a mask."""
    x_BLD = case.inputs["x"]
    model = case.build(lambda: AttentionPooling(x_BLD.shape[-1]))
    mask_BL = torch.ones(x_BLD.shape[:2], dtype=torch.bool)
    if "attn_mask" in case.inputs:
        mask_BL = case.inputs["attn_mask"] != 0
    return Result({"pooled": call(model, pooling_params(case), x_BLD, mask_BL)})


def encoder(case: Case) -> Result:
    """Embeddings in, pooled vector out. The table of the embedding holds the input's own rows."""
    config, x_BLD = case.config, case.inputs["input_embs"]
    batch_size, length, width = x_BLD.shape
    shape = Shape(
        vocab_size=batch_size * length,
        max_length=config["max_position_embeddings"],
        d_model=width,
        d_ff=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["heads"],
        activation=config["hidden_act"],
        norm="post",
        embedding_norm=True,
        pooling="attention",
    )
    model = case.build(lambda: FastformerEncoder(shape, norm_eps=config["layer_norm_eps"]))
    mapped = {
        "embedding.tokens.weight": x_BLD.flatten(0, 1),
        "embedding.positions": case.params["position_embeddings.weight"],
    }
    mapped |= norm(case, "embedding.norm", "LayerNorm")
    noted: dict[str, Tensor] = {}

    def note(module: nn.Module, name: str, *, of_input: bool = False) -> None:
        module.register_forward_hook(
            lambda _, args, output: noted.update({name: args[0] if of_input else output})
        )

    note(model.embedding, "embeddings")
    for i, block in enumerate(model.blocks):
        ours, theirs = f"blocks.{i}", f"encoders.{i}"
        for name, value in attention_params(case, f"{theirs}.attention.self.").items():
            mapped[f"{ours}.mixer.{name}"] = value
        mapped |= linear(case, f"{ours}.mixer.out", f"{theirs}.attention.output.dense")
        mapped |= norm(case, f"{ours}.norm1", f"{theirs}.attention.output.LayerNorm")
        mapped |= linear(case, f"{ours}.ffn.up", f"{theirs}.intermediate.dense")
        mapped |= linear(case, f"{ours}.ffn.down", f"{theirs}.output.dense")
        mapped |= norm(case, f"{ours}.norm2", f"{theirs}.output.LayerNorm")
        note(model.get_submodule(f"{ours}.mixer.out"), f"attn{i}", of_input=True)
        note(model.get_submodule(f"{ours}.norm1"), f"attn_output{i}")
        note(block, f"layer{i}")

    mask_BL = case.inputs["attention_mask"] != 0
    tokens_BL = torch.arange(batch_size * length).view(batch_size, length)
    y_BLD = call(model, mapped, tokens_BL, mask_BL)
    pool = case.build(lambda: AttentionPooling(width))
    pooled_BD = call(pool, pooling_params(case, "poolers.0."), y_BLD, mask_BL)
    return Result({"pooled": pooled_BD}, noted)


UNITS = {
    "FastSelfAttention": attention,
    "AttentionPooling": pooling,
    "FastformerEncoder": encoder,
}
