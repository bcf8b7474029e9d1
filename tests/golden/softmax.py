"""Adapters of the softmax family: mlpen/Nystromformer's attention and whole classifiers.

Differences that are bridged here: the class token there is the embedding of the last id and pushes
out the last token; masks come from token ids, so they may have holes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.classifier import Classifier
from models.encoder import Encoder
from models.layers import attend
from models.shape import Shape
from models.softmax import SoftmaxAttention
from tests.golden.case import Case, Result, call, linear, norm

POOLING = {"MEAN": "padded_mean", "CLS": "cls"}


def softmax_attention(case: Case) -> Result:
    """Heads in, heads out."""
    q_BHLK, k_BHLK, v_BHLK = (case.inputs[name] for name in "QKV")
    return Result({"X": attend(q_BHLK, k_BHLK, v_BHLK, case.inputs["mask"] != 0)})


def softmax_params(case: Case, theirs: str) -> dict[str, Tensor]:
    """The mixer's parameters from those of the multi-head block called `theirs`."""
    parts = [f"{theirs}.{name}" for name in ("W_q", "W_k", "W_v")]
    return linear(case, "qkv", *parts) | linear(case, "out", f"{theirs}.ff")


def model_for_sc(
    case: Case,
    mixer: Callable[[Shape], nn.Module] = SoftmaxAttention,
    mixer_params: Callable[[Case, str], dict[str, Tensor]] = softmax_params,
    *,
    separate_calls: bool = False,
) -> Result:
    """A whole classifier of one sequence, or of two with `config["dual"]`.

    Args:
        case: the file.
        mixer: makes the mixer from a shape.
        mixer_params: (case, name of the multi-head block) to the mixer's parameters.
        separate_calls: encode the two sequences in a call each, for a mixer whose rows depend on
            the others of their batch.
    """
    config, params = case.config, case.params
    embeddings = "model.embeddings"
    tokens = params[f"{embeddings}.word_embeddings.weight"]
    positions = params[f"{embeddings}.position_embeddings.weight"]
    pooling = POOLING[config["pooling_mode"]]
    num_sequences = 2 if config.get("dual") else 1
    shape = Shape(
        vocab_size=config["vocab_size"],
        max_length=len(positions) - (pooling == "cls"),
        d_model=config["transformer_dim"],
        d_ff=config["transformer_hidden_dim"],
        num_layers=config["num_layers"],
        num_heads=config["num_head"],
        head_dim=config["head_dim"],
        tie_layers=config["tied_weights"],
        pooling=pooling,
        head_hidden=(config["transformer_hidden_dim"],),
    )
    model = case.build(
        lambda: Classifier(
            Encoder(shape, lambda: mixer(shape)), shape, config["num_classes"], num_sequences
        )
    )

    mapped = {"encoder.embedding.tokens.weight": tokens, "encoder.embedding.positions": positions}
    if pooling == "cls":
        mapped["encoder.embedding.class_token"] = tokens[-1]
    for i in range(1 if shape.tie_layers else shape.num_layers):
        theirs = "model.transformer" if shape.tie_layers else f"model.transformer_{i}"
        ours = f"encoder.blocks.{i}"
        mapped |= norm(case, f"{ours}.norm1", f"{theirs}.norm1")
        for name, value in mixer_params(case, f"{theirs}.mha").items():
            mapped[f"{ours}.mixer.{name}"] = value
        mapped |= norm(case, f"{ours}.norm2", f"{theirs}.norm2")
        mapped |= linear(case, f"{ours}.ffn.up", f"{theirs}.mlpblock.0")
        mapped |= linear(case, f"{ours}.ffn.down", f"{theirs}.mlpblock.3")
    mapped |= norm(case, "encoder.norm", "model.norm")
    mapped |= linear(case, "head.0", "seq_classifer.mlpblock.0")
    mapped |= linear(case, "head.2", "seq_classifer.mlpblock.2")

    sequences = [
        (case.inputs[f"input_ids_{s}"], case.inputs[f"mask_{s}"] != 0) for s in range(num_sequences)
    ]
    if pooling == "cls":
        sequences = [(ids_BL[:, :-1], mask_BL[:, :-1]) for ids_BL, mask_BL in sequences]
    whole = all(
        (mask_BL.sort(dim=1, descending=True).values == mask_BL).all() for _, mask_BL in sequences
    )
    same_length = len({ids_BL.shape for ids_BL, _ in sequences}) == 1
    if whole and same_length and not separate_calls:
        tokens_BSL = torch.stack([ids_BL for ids_BL, _ in sequences], dim=1)
        lengths_BS = torch.stack([mask_BL.sum(dim=1) for _, mask_BL in sequences], dim=1)
        logits_BC = call(model, mapped, tokens_BSL, lengths_BS)
    else:
        pooled = [call(model, mapped, *sequence, method="represent") for sequence in sequences]
        logits_BC = call(model, mapped, torch.stack(pooled, dim=1), method="score")
    labels_B = case.inputs["label"]
    return Result(
        {
            "logits": logits_BC,
            "loss": F.cross_entropy(logits_BC, labels_B, reduction="none"),
            "accu": (logits_BC.argmax(dim=-1) == labels_B).to(case.dtype),
        }
    )


UNITS = {
    "SoftmaxAttention": softmax_attention,
    "ModelForSC": model_for_sc,
    "ModelForSCDual": model_for_sc,
}
