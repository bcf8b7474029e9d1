"""Adapters of the Linformer family: the arena's layer, lucidrains' and mlpen/Nystromformer's.

The arena's ignores its mask, so all positions count as real there. mlpen's takes heads already
projected: here one wide token holds query, key and value, and the maps pick them out.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from models.linformer import LinformerAttention
from models.shape import Shape
from tests.golden.case import Case, Result, call, linear
from tests.golden.softmax import model_for_sc

LEFT_OUT: dict[str, str] = {}


def arena_shape(case: Case, max_length: int) -> Shape:
    """The shape of one of the arena's own layers."""
    config = case.config
    return Shape(
        vocab_size=1,
        max_length=max_length,
        d_model=case.inputs["inputs"].shape[-1],
        num_heads=config["num_heads"],
        head_dim=config["qkv_features"] // config["num_heads"],
        attention_bias=config["bias"],
    )


def arena_linear(case: Case, ours: str, *theirs: str) -> dict[str, Tensor]:
    """{ours.weight, ours.bias} from stacked maps of Flax: [D, H, K], or [H, K, D] for `out`."""
    kernels, biases = [], []
    for name in theirs:
        kernel = case.params[f"{name}.kernel"]
        kernels.append(kernel.flatten(0, 1) if name == "out" else kernel.flatten(1))
        if f"{name}.bias" in case.params:
            biases.append(case.params[f"{name}.bias"].flatten())
    mapped = {f"{ours}.weight": torch.cat([kernel.T for kernel in kernels])}
    return mapped | ({f"{ours}.bias": torch.cat(biases)} if biases else {})


def ones_mask(x_BLD: Tensor) -> Tensor:
    """Every position is real."""
    return torch.ones(x_BLD.shape[:2], dtype=torch.bool)


def arena_attention(case: Case) -> Result:
    """The arena's layer; a mask in the file is ignored, as by the reference."""
    x_BLD = case.inputs["inputs"]
    shape = arena_shape(case, case.config["max_len"])
    model = case.build(lambda: LinformerAttention(shape, rank=case.config["low_rank_features"]))
    params = (
        arena_linear(case, "query", "query")
        | arena_linear(case, "kv", "key", "value")
        | arena_linear(case, "out", "out")
        | {"table_SGRM": case.params["lr_kernel"].T[None, None]}
    )
    return Result({"output": call(model, params, x_BLD, ones_mask(x_BLD))})


def lucidrains_attention(case: Case) -> Result:
    """Tables of its own for keys and for values; biases only behind the attention."""
    x_BLD, config = case.inputs["x"], case.config
    num_rows, rank = case.params["proj_k"].shape
    width, d_model = case.params["to_q.weight"].shape
    shape = Shape(
        vocab_size=1,
        max_length=num_rows,
        d_model=d_model,
        num_heads=config["heads"],
        head_dim=width // config["heads"],
    )
    model = case.build(lambda: LinformerAttention(shape, rank=rank, share_kv=config["share_kv"]))
    params = (
        linear(case, "query", "to_q")
        | linear(case, "kv", "to_k", "to_v")
        | linear(case, "out", "to_out")
        | {"query.bias": torch.zeros(width, dtype=case.dtype)}
        | {"kv.bias": torch.zeros(2 * width, dtype=case.dtype)}
    )
    tables = [case.params[name].T[None] for name in ("proj_k", "proj_v")]
    params["table_SGRM"] = torch.stack(tables)
    return Result({"output": call(model, params, x_BLD, ones_mask(x_BLD))})


def mlpen_attention(case: Case) -> Result:
    """Heads in, heads out; a table for each head."""
    table_HRM = case.params["E"]
    num_heads, rank, num_rows = table_HRM.shape
    x_BLD = torch.cat(
        [rearrange(case.inputs[name], "b h l k -> b l (h k)") for name in "QKV"], dim=-1
    )
    width = x_BLD.shape[-1] // 3
    shape = Shape(
        vocab_size=1,
        max_length=num_rows,
        d_model=3 * width,
        num_heads=num_heads,
        head_dim=width // num_heads,
        attention_bias=False,
    )
    model = case.build(lambda: LinformerAttention(shape, rank=rank, share_heads=False))
    eye = torch.eye(3 * width, dtype=case.dtype)
    params = {
        "query.weight": eye[:width],
        "kv.weight": eye[width:],
        "out.weight": eye[:, :width],
        "table_SGRM": table_HRM[None],
    }
    y_BLE = call(model, params, x_BLD, case.inputs["mask"] != 0)[..., :width]
    return Result({"X": rearrange(y_BLE, "b l (h k) -> b h l k", h=num_heads)})


def mixer_params(case: Case, theirs: str) -> dict[str, Tensor]:
    """The mixer's parameters from those of the multi-head block called `theirs`."""
    mapped = (
        linear(case, "query", f"{theirs}.W_q")
        | linear(case, "kv", f"{theirs}.W_k", f"{theirs}.W_v")
        | linear(case, "out", f"{theirs}.ff")
    )
    name = f"{theirs}.attn.E"
    return mapped | ({"table_SGRM": case.params[name][None]} if name in case.params else {})


def model_with_linformer(case: Case) -> Result:
    """A whole classifier, whose layers share the first one's table."""
    mixers: list[Any] = []

    def mixer(shape: Shape) -> nn.Module:
        rank = case.config["linformer_k"]
        mixers.append(LinformerAttention(shape, rank=rank, share_heads=False))
        mixers[-1].table_SGRM = mixers[0].table_SGRM
        return mixers[-1]

    return model_for_sc(case, mixer, mixer_params)


UNITS = {
    "lra:LinformerSelfAttention": arena_attention,
    "lucidrains:LinformerSelfAttention": lucidrains_attention,
    "mlpen:LinformerAttention": mlpen_attention,
    "ModelForSC": model_with_linformer,
}
