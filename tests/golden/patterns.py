"""Adapters of the sparse patterns: local, Longformer, BigBird and Sparse Transformer attention.

Units of `lra:` come with a map of every head, [D, H, K]; those of `hf:` have no output map, and an
identity stands for it; those of `lucidrains:` take heads. Rows at padding mean nothing here: the
file's own numbers stand in for them, whose cotangents are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.bigbird import BigBirdAttention
from models.local import LocalAttention
from models.longformer import LongformerAttention
from models.shape import Shape
from models.sparse import SparseAttention
from tests.golden.case import Case, Result, call, linear

LEFT_OUT = {
    "local_lra_floatmask": "a float mask of zeros and ones, which the arena's encoder never passes",
}


def shape_of(case: Case, **changes: Any) -> Shape:
    """Widths and heads of a file."""
    config = case.config
    settings: dict[str, Any] = {"vocab_size": 1, "max_length": config["seq_len"]}
    if case.unit.startswith("lra:"):
        settings |= {
            "d_model": config["width"],
            "num_heads": config["num_heads"],
            "head_dim": config["qkv_features"] // config["num_heads"],
            "attention_bias": config["bias"],
        }
    elif case.unit.startswith("hf:"):
        settings |= {"d_model": config["hidden_size"], "num_heads": config["num_attention_heads"]}
    else:
        heads = config["heads"]
        settings |= {"d_model": heads * config["dim_head"], "num_heads": heads}
    return Shape(**settings | changes)


def lra_linear(case: Case, ours: str, *theirs: str) -> dict[str, Tensor]:
    """Linear maps from kernels [D, H, K], or [H, K, D] for the output, stacked."""
    kernels = [case.params[f"{name}.kernel"] for name in theirs]
    weights = [w.flatten(0, 1) if "out" in theirs else w.flatten(1) for w in kernels]
    mapped = {f"{ours}.weight": torch.cat([weight.T for weight in weights])}
    if case.config["bias"]:
        mapped[f"{ours}.bias"] = torch.cat([case.params[f"{t}.bias"].flatten() for t in theirs])
    return mapped


def params_of(case: Case, suffix: str = "") -> dict[str, Tensor]:
    """Of queries, keys and values, and of the output."""
    names = [f"{name}{suffix}" for name in ("query", "key", "value")]
    if case.unit.startswith("lra:"):
        return lra_linear(case, "qkv", *names) | lra_linear(case, "out", "out")
    width = case.config["hidden_size"]
    identity = {"out.weight": torch.eye(width, dtype=case.dtype)}
    identity["out.bias"] = torch.zeros(width, dtype=case.dtype)
    return linear(case, "qkv", *names) | identity


def inputs_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens [B, L, D] and mask [B, L]; Hugging Face's Longformer marks padding by -10000."""
    x_BLD = case.inputs["hidden_states" if case.unit.startswith("hf:") else "inputs"]
    mask_BL = torch.ones(x_BLD.shape[:2], dtype=torch.bool)
    if "padding_mask" in case.inputs:
        mask_BL = case.inputs["padding_mask"][..., 0] > 0
    if case.unit == "hf:LongformerSelfAttention":
        mask_BL = case.inputs["attention_mask"] >= 0
    elif case.unit == "hf:BigBirdSelfAttention":
        mask_BL = case.inputs["attention_mask"][:, 0, 0] == 0
    elif case.unit == "hf:BigBirdBlockSparseAttention":
        mask_BL = case.inputs["attention_mask"] > 0
    return x_BLD, mask_BL


def real_rows(case: Case, y: Tensor, mask: Tensor) -> Result:
    """Our rows where they are real, else the file's."""
    theirs = torch.from_numpy(case.arrays["out/output"]).to(case.dtype)
    return Result({"output": torch.where(mask, y, theirs)})


def mixed(case: Case, model: nn.Module, params: dict[str, Tensor]) -> Result:
    """The mixer as it is called in a model."""
    x_BLD, mask_BL = inputs_of(case)
    return real_rows(case, call(model, params, x_BLD, mask_BL), mask_BL[..., None])


def local_of_heads(case: Case) -> Result:
    """Heads in, heads out."""
    config, (q, k, v) = case.config, (case.inputs[name] for name in "qkv")
    size = config["window_size"]
    if config["exact_windowsize"]:
        assert config["look_forward"] == (not config["causal"]) and config["look_backward"] == 1
        knobs: dict[str, Any] = {"pattern": "window", "window": 2 * size + 1}
    else:
        assert config["look_forward"] == config["look_backward"] == 0
        knobs = {"pattern": "blocks", "block_size": size}
    shape = shape_of(case)
    model = case.build(lambda: LocalAttention(shape, causal=config["causal"], **knobs))
    mask_BL = case.inputs.get("mask", torch.ones(q.shape[0], q.shape[2], dtype=torch.bool))
    y_BHLK = call(model, dict(model.named_parameters()), q, k, v, mask_BL, method="attend")
    return real_rows(case, y_BHLK, mask_BL[:, None, :, None])


def local_arena(case: Case) -> Result:
    """The arena's, with all its faults."""
    shape, size = shape_of(case), case.config["block_size"]
    model = case.build(lambda: LocalAttention(shape, pattern="strided", block_size=size))
    return mixed(case, model, params_of(case))


def window_of(case: Case) -> int:
    """Hugging Face counts half of it before and half behind a position."""
    if case.unit.startswith("hf:"):
        return case.config["attention_window"] + 1
    return case.config["sliding_window_size"]


def local_window(case: Case) -> Result:
    """Longformer's without global tokens is the sliding window."""
    shape, window = shape_of(case), window_of(case)
    model = case.build(lambda: LocalAttention(shape, window=window))
    suffix = "_sliding_window" if case.unit.startswith("lra:") else ""
    return mixed(case, model, params_of(case, suffix))


def longformer(case: Case) -> Result:
    """Global positions as the file has them, which need not be the first."""
    shape, window = shape_of(case), window_of(case)
    causal = case.config.get("causal_mask", False)
    model = case.build(lambda: LongformerAttention(shape, window=window, causal=causal))
    names = [f"{name}_global" for name in ("query", "key", "value")]
    if case.unit.startswith("lra:"):
        params = params_of(case, "_sliding_window") | lra_linear(case, "global_qkv", *names)
        global_BL = case.inputs["global_mask"]
    else:
        params = params_of(case) | linear(case, "global_qkv", *names)
        global_BL = case.inputs["attention_mask"] > 0
    x_BLD, mask_BL = inputs_of(case)
    index_M = global_BL.any(dim=0).nonzero()[:, 0]
    y_BLD = call(model, params, x_BLD, mask_BL, index_M, global_BL[:, index_M], method="attend")
    return real_rows(case, y_BLD, mask_BL[..., None])


def bigbird(case: Case) -> Result:
    """With the file's random blocks. A bool mask makes rows that fill the last block real keys."""
    config, shape = case.config, shape_of(case)
    table_HGr = case.buffers["rand_attn"]
    model = case.build(
        lambda: BigBirdAttention(
            shape,
            block_size=config["block_size"],
            num_random=table_HGr.shape[2],
            filled_keys=config.get("mask_dtype") == "bool",
        )
    )
    return mixed(case, model, params_of(case) | {"random_HGr": table_HGr})


def bigbird_full(case: Case) -> Result:
    """Few blocks: full attention."""
    shape = shape_of(case)
    model = case.build(lambda: BigBirdAttention(shape, block_size=3, num_random=1))
    return mixed(case, model, params_of(case))


def sparse(case: Case) -> Result:
    """Both schemes of the arena's code."""
    config = case.config
    (first, size, *_), (second, *sizes) = config["attention_patterns"]
    assert sizes[0] == size
    if (first, second) == ("fixed1", "fixed2"):
        knobs: dict[str, Any] = {"pattern": "fixed", "num_summary": sizes[1]}
    else:
        assert (first, second) == ("local", "strided")
        knobs = {"pattern": "strided", "num_summary": 1}
    shape = shape_of(case)
    if config["use_cls_token"]:
        shape = shape_of(case, max_length=config["seq_len"] - 1, pooling="cls")
    model = case.build(lambda: SparseAttention(shape, block_size=size, **knobs))
    return mixed(case, model, params_of(case))


LOCAL_UNITS = {
    "lucidrains:LocalAttention": local_of_heads,
    "lra:LocalSelfAttention": local_arena,
    "lra:LongformerSelfAttention": local_window,
    "hf:LongformerSelfAttention": local_window,
}
LONGFORMER_UNITS = {
    "lra:LongformerSelfAttention": longformer,
    "hf:LongformerSelfAttention": longformer,
}
BIGBIRD_UNITS = {
    "lra:BigBirdSelfAttention": bigbird,
    "hf:BigBirdBlockSparseAttention": bigbird,
    "hf:BigBirdSelfAttention": bigbird_full,
}
SPARSE_UNITS = {"lra:SparseSelfAttention": sparse}
