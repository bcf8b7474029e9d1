"""Adapters of the linear family: the attention of the Long Range Arena's code, its generalised
kernel with elu + 1, and the attention and classifiers of mlpen/Nystromformer.

Differences that are bridged here: Flax's kernels are [D, H, K] (`flax_params`). The arena's code
ignores its mask, so all tokens of its files are real. Its generalised kernel adds nothing to the
divisor, which is set to 0 here.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from models import linear
from models.linear import LinearAttention
from models.shape import Shape
from tests.golden.case import Case, Result, call
from tests.golden.softmax import model_for_sc, softmax_params


def flax_params(case: Case) -> dict[str, Tensor]:
    """A mixer's maps `qkv` and `out` from the kernels of a layer of the Long Range Arena."""
    params = case.params
    parts = ("query", "key", "value")
    mapped = {
        "qkv.weight": torch.cat([params[f"{name}.kernel"].flatten(1).T for name in parts]),
        "out.weight": params["out.kernel"].flatten(0, 1).T,
    }
    if case.config["bias"]:
        mapped["qkv.bias"] = torch.cat([params[f"{name}.bias"].flatten() for name in parts])
        mapped["out.bias"] = params["out.bias"]
    return mapped


def flax_shape(case: Case) -> Shape:
    """The shape of such a layer."""
    config = case.config
    return Shape(
        vocab_size=1,
        max_length=1,
        d_model=config["width"],
        num_heads=config["num_heads"],
        head_dim=config["qkv_features"] // config["num_heads"],
        attention_bias=config["bias"],
    )


def heads_shape(x_BHLK: Tensor) -> Shape:
    """The shape of a mixer whose attention takes such heads."""
    _, num_heads, length, head_dim = x_BHLK.shape
    return Shape(vocab_size=1, max_length=length, d_model=num_heads * head_dim, num_heads=num_heads)


def layer(case: Case) -> Result:
    """A layer with its linear maps; the mask has no effect."""
    x_BLD = case.inputs["inputs"]
    model = case.build(lambda: LinearAttention(flax_shape(case)))
    mask_BL = torch.ones(x_BLD.shape[:2], dtype=torch.bool)
    return Result({"output": call(model, flax_params(case), x_BLD, mask_BL)})


def generalized(case: Case) -> Result:
    """Heads in, heads out, [B, L, H, K]; the plain quotient of sums, causal or not."""
    config = case.config
    assert config["features_type"] == "deterministic" and config["kernel_fn"] == "shifted_elu"
    assert config["kernel_epsilon"] == config["numerical_stabilizer"] == 0.0
    qkv_TBHLK = torch.stack(
        [case.inputs[name].transpose(1, 2) for name in ("query", "key", "value")]
    )
    model = case.build(
        lambda: LinearAttention(heads_shape(qkv_TBHLK[0]), causal=config["unidirectional"])
    )
    mask_BL = torch.ones(qkv_TBHLK.shape[1:4:2], dtype=torch.bool)
    with mock.patch.object(linear, "EPSILON", 0.0):
        y_BHLK = model.attend(qkv_TBHLK, mask_BL)
    return Result({"output": y_BHLK.transpose(1, 2)})


def mlpen_attention(case: Case) -> Result:
    """Heads in, heads out; every row has the longest length."""
    qkv_TBHLK = torch.stack([case.inputs[name] for name in "QKV"])
    model = case.build(lambda: LinearAttention(heads_shape(qkv_TBHLK[0]), normalize=False))
    return Result({"X": model.attend(qkv_TBHLK, case.inputs["mask"] != 0)})


def mlpen_model(case: Case) -> Result:
    """A whole classifier."""
    return model_for_sc(case, lambda shape: LinearAttention(shape, normalize=False), softmax_params)


UNITS = {
    "lra:LinearSelfAttention": layer,
    "lra:fast_generalized_attention": generalized,
    "mlpen:LinearAttention": mlpen_attention,
    "ModelForSC": mlpen_model,
}
