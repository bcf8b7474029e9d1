"""Adapters of the Performer family: kernel attention and layers of the Long Range Arena's code,
performer-pytorch, and the attention and classifiers of mlpen/Nystromformer.

Differences that are bridged here:

- In causal attention the sources scale all keys by the largest exponent of the whole row, which
  looks ahead (`largest_of_all`).
- The arena's code differentiates the largest exponents, which are constants here and in
  performer-pytorch, and raises small sums of weights, which shrinks the result: one row of
  `performer_lra_layer_softmax` to a thirtieth (`arenas_ways`). Its layer ignores the mask, so all
  tokens of its files are real.
- performer-pytorch's relu kernel scales by c = K^(-1/4) inside: relu(c w x) + epsilon is c times
  relu(w x) + epsilon / c.
- performer-pytorch adds 1e-6 to the sums of key features of causal attention, as a token in front
  would whose features are all 1e-6 and whose value is zero (`token_in_front`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from models import performer
from models.kernels import causal_sums
from models.performer import PerformerAttention
from models.shape import Shape
from tests.golden.case import Case, Result, call
from tests.golden.linear import flax_params, flax_shape, heads_shape
from tests.golden.softmax import model_for_sc, softmax_params


@contextmanager
def largest_of_all(*, constant: bool) -> Iterator[None]:
    """Keys are scaled by the largest exponent of the whole row; a constant to the gradient?"""

    def largest(x_BHLM: Tensor) -> Tensor:
        return x_BHLM.clone().amax(dim=-1, keepdim=True)

    def so_far(x_BHL1: Tensor) -> Tensor:
        return x_BHL1.amax(dim=2, keepdim=True).expand_as(x_BHL1)

    kept = performer.largest if constant else largest
    with mock.patch.multiple(performer, largest_so_far=so_far, largest=kept):
        yield


@contextmanager
def arenas_ways(case: Case) -> Iterator[None]:
    """The largest exponents are differentiated, small sums of weights raised.

    A sum up to 1e-6 is raised by 2e-6; the weights here are the source's times the number of rows.
    """
    num_rows = next((len(rows_MK) for rows_MK in case.buffers.values()), 1)
    least = num_rows * case.config.get("numerical_stabilizer", 0.0)
    unpatched = performer.weighted_mean

    def raised(sum_BHLJ: Tensor, *, signed: bool) -> Tensor:
        if signed:
            return unpatched(sum_BHLJ, signed=True)
        weight_BHL1 = sum_BHLJ[..., -1:]
        return sum_BHLJ[..., :-1] / (weight_BHL1 + 2 * least * (weight_BHL1 <= least))

    with largest_of_all(constant=False), mock.patch.object(performer, "weighted_mean", raised):
        yield


def sizes(case: Case) -> dict[str, Any]:
    """Options of the mixer that a file's rows and switches give."""
    config = case.config
    return {
        "num_features": next((len(rows_MK) for rows_MK in case.buffers.values()), None),
        "causal": config.get("unidirectional", config.get("causal", False)),
    }


def run(
    case: Case, shape: Shape, qkv_TBHLK: Tensor, mask_BL: Tensor | None = None, **knobs: Any
) -> Tensor:
    """The attention between the linear maps; [B, H, L, K]."""
    model = case.build(lambda: PerformerAttention(shape, **sizes(case) | knobs))
    for rows_MK in case.buffers.values():
        model.projection_MK = rows_MK
    if mask_BL is None:
        mask_BL = torch.ones(qkv_TBHLK.shape[1:4:2], dtype=torch.bool)
    return model.attend(qkv_TBHLK, mask_BL)


def arena_heads(case: Case) -> Tensor:
    return torch.stack([case.inputs[name].transpose(1, 2) for name in ("query", "key", "value")])


def arena_softmax(case: Case) -> Result:
    """Heads in, heads out, [B, L, H, K]."""
    config, qkv_TBHLK = case.config, arena_heads(case)
    knobs: dict[str, Any] = {"epsilon": config["numerical_stabilizer"]}
    if not config["nonnegative_features"]:
        knobs = {"features": "trigonometric"}
    with arenas_ways(case):
        y_BHLK = run(case, heads_shape(qkv_TBHLK[0]), qkv_TBHLK, **knobs)
    return Result({"output": y_BHLK.transpose(1, 2)})


def arena_generalized(case: Case) -> Result:
    """Heads in, heads out, [B, L, H, K]; the relu kernel, with random rows or without."""
    config, qkv_TBHLK = case.config, arena_heads(case)
    assert config["kernel_fn"] == "relu"
    assert (config["features_type"] == "deterministic") == (not case.buffers)
    knobs = {"kernel": "relu", "epsilon": config["kernel_epsilon"]}
    y_BHLK = run(case, heads_shape(qkv_TBHLK[0]), qkv_TBHLK, **knobs)
    return Result({"output": y_BHLK.transpose(1, 2)})


def arena_layer(case: Case) -> Result:
    """A layer with its linear maps; the mask has no effect."""
    config, x_BLD = case.config, case.inputs["inputs"]
    if config["attention_fn"] == "softmax":
        knobs = {"kernel": "softmax", "epsilon": config["numerical_stabilizer"]}
    else:
        knobs = {"kernel": "relu", "epsilon": config["kernel_epsilon"]}
    model = case.build(lambda: PerformerAttention(flax_shape(case), **sizes(case) | knobs))
    params = flax_params(case)
    for rows_MK in case.buffers.values():
        params["projection_MK"] = rows_MK
    mask_BL = torch.ones(x_BLD.shape[:2], dtype=torch.bool)
    with arenas_ways(case):
        return Result({"output": call(model, params, x_BLD, mask_BL)})


@contextmanager
def token_in_front(features_M: Tensor) -> Iterator[None]:
    """Causal sums start from a token with these key features, whose value is zero."""

    def sums(q_BHLM: Tensor, k_BHLM: Tensor, v_BHLJ: Tensor) -> Tensor:
        count_J = F.one_hot(torch.tensor(v_BHLJ.shape[3] - 1), v_BHLJ.shape[3])
        first_BH1M = features_M.to(k_BHLM).expand_as(k_BHLM[:, :, :1])
        first_BH1J = count_J.to(v_BHLJ).expand_as(v_BHLJ[:, :, :1])
        return causal_sums(
            F.pad(q_BHLM, (0, 0, 1, 0)),
            torch.cat([first_BH1M, k_BHLM], dim=2),
            torch.cat([first_BH1J, v_BHLJ], dim=2),
        )[:, :, 1:]

    with mock.patch.object(performer, "causal_sums", sums):
        yield


def performer_pytorch(case: Case) -> Result:
    """Heads in, heads out."""
    config = case.config
    qkv_TBHLK = torch.stack([case.inputs[name] for name in "qkv"])
    (rows_MK,) = case.buffers.values()
    num_rows, head_dim = rows_MK.shape
    if config["generalized_attention"]:
        scale = head_dim**-0.25
        knobs: dict[str, Any] = {"kernel": "relu", "epsilon": 1e-3 / scale}
        features_M = torch.full((num_rows,), 1e-6 / scale, dtype=torch.float64)
    else:
        knobs = {"epsilon": 1e-4}
        # The last feature of a query is epsilon times the sum of the others; the source divides
        # features by the root of their number.
        features_M = F.pad(
            torch.zeros(num_rows, dtype=torch.float64), (0, 1), value=1e-6 / 1e-4 * num_rows**0.5
        )
    with largest_of_all(constant=True), token_in_front(features_M):
        y_BHLK = run(case, heads_shape(qkv_TBHLK[0]), qkv_TBHLK, **knobs)
    return Result({"output": y_BHLK})


def mlpen_attention(case: Case) -> Result:
    """Heads in, heads out."""
    qkv_TBHLK = torch.stack([case.inputs[name] for name in "QKV"])
    y_BHLK = run(case, heads_shape(qkv_TBHLK[0]), qkv_TBHLK, case.inputs["mask"] != 0, **MLPEN)
    return Result({"X": y_BHLK})


def mlpen_params(case: Case, theirs: str) -> dict[str, Tensor]:
    """The mixer's parameters and rows from those of the multi-head block called `theirs`."""
    rows_MK = case.buffers[f"{theirs}.attn.attn_fn.projection_matrix"]
    return softmax_params(case, theirs) | {"projection_MK": rows_MK}


def mlpen_model(case: Case) -> Result:
    """A whole classifier."""
    return model_for_sc(
        case, lambda shape: PerformerAttention(shape, **sizes(case) | MLPEN), mlpen_params
    )


MLPEN: dict[str, Any] = {"epsilon": 1e-4, "scale_twice": True, "padded_keys": True}
UNITS = {
    "lra:fast_softmax_attention": arena_softmax,
    "lra:fast_generalized_attention": arena_generalized,
    "lra:PerformerSelfAttention": arena_layer,
    "lucidrains:FastAttention": performer_pytorch,
    "mlpen:PerformerAttention": mlpen_attention,
    "ModelForSC": mlpen_model,
}
