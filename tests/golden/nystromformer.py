"""Adapters of the Nystrom family: mlpen/Nystromformer's attention, its inverse and classifiers, and
Hugging Face's self-attention. All of them average over padded positions."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from models import nystromformer
from models.nystromformer import NystromAttention, PinvInit, inverse_times
from models.shape import Shape
from tests.golden.case import Case, Result, call, linear
from tests.golden.softmax import model_for_sc, softmax_params

PINV_INIT: dict[str, PinvInit] = {"original": "global", "exact": "per_matrix"}


def mixer(case: Case, shape: Shape, **knobs: Any) -> NystromAttention:
    """The mixer that a file's config describes."""
    return NystromAttention(
        shape,
        num_landmarks=case.config["num_landmarks"],
        pinv_iterations=case.config.get("pinv_iterations", 6),
        pinv_init=PINV_INIT[case.config.get("pinv_init", "original")],
        conv_kernel_size=case.config.get("conv_kernel_size"),
        padded_landmarks=True,
        **knobs,
    )


def conv_params(case: Case, theirs: str) -> dict[str, Tensor]:
    """The filters, [H, 1, W, 1] in the file; none where the convolution is off."""
    name = f"{theirs}.weight"
    return {"conv_HW": case.params[name][:, 0, :, 0]} if name in case.params else {}


def run_recorded(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Run `call`, noting the matrix that was inverted and its inverse, where there is one."""
    noted: dict[str, Tensor] = {}

    def note(a_BHMM: Tensor, w_BHMK: Tensor, **options: Any) -> Tensor:
        eye_BHMM = torch.eye(a_BHMM.shape[-1], dtype=a_BHMM.dtype).expand_as(a_BHMM)
        noted["kernel_2"] = a_BHMM
        noted["kernel_2_pinv"] = inverse_times(a_BHMM, eye_BHMM, **options)
        return inverse_times(a_BHMM, w_BHMK, **options)

    with mock.patch.object(nystromformer, "inverse_times", note):
        output = call(*args, **kwargs)
    return output, noted


def nystrom_attention(case: Case) -> Result:
    """Heads in, heads out: the mixer between its projections."""
    heads, head_dim = case.config["heads"], case.config["head_dim"]
    width = heads * head_dim
    shape = Shape(vocab_size=1, max_length=1, d_model=width, num_heads=heads)
    model = case.build(lambda: mixer(case, shape))
    unused = {name: value for name, value in model.named_parameters() if name != "conv_HW"}
    qkv_BLTHK = torch.stack([case.inputs[name].transpose(1, 2) for name in "QKV"], dim=2)
    x_BHLK, noted = run_recorded(
        model,
        unused | conv_params(case, "conv"),
        qkv_BLTHK,
        case.inputs["mask"] != 0,
        method="attend",
    )
    return Result({"X": x_BHLK}, noted)


def iterative_inv(case: Case) -> Result:
    """The inverse alone, after the numbers of steps that the file has."""
    a_BHMM = case.inputs["A"]
    eye_BHMM = torch.eye(a_BHMM.shape[-1], dtype=case.dtype).expand_as(a_BHMM)
    steps = [key.removeprefix("out/after_") for key in case.arrays if key.startswith("out/after_")]
    return Result(
        {
            f"after_{n}": inverse_times(
                a_BHMM, eye_BHMM, num_iterations=int(n), init=PINV_INIT[case.config["pinv_init"]]
            )
            for n in steps
        }
    )


def hugging_face_attention(case: Case) -> Result:
    """The mixer with an identity as output projection, since the file has none."""
    x_BLD = case.inputs["hidden_states"]
    batch_size, length, width = x_BLD.shape
    shape = Shape(vocab_size=1, max_length=1, d_model=width, num_heads=case.config["heads"])
    model = case.build(lambda: mixer(case, shape, zero_padding=False))
    params = linear(case, "qkv", "query", "key", "value") | conv_params(case, "conv")
    params["out.weight"] = torch.eye(width, dtype=case.dtype)
    params["out.bias"] = torch.zeros(width, dtype=case.dtype)
    mask_BL = torch.ones(batch_size, length, dtype=torch.bool)
    if "attention_mask" in case.inputs:
        mask_BL = case.inputs["attention_mask"][:, 0, 0] == 0
    y_BLD, noted = run_recorded(model, params, x_BLD, mask_BL)
    return Result({"X": y_BLD}, noted)


def mixer_params(case: Case, theirs: str) -> dict[str, Tensor]:
    """The mixer's parameters from those of the multi-head block called `theirs`."""
    return softmax_params(case, theirs) | conv_params(case, f"{theirs}.attn.conv")


def model_with_nystrom(case: Case) -> Result:
    """A whole classifier; each sequence has a call of its own, since "global" sees the batch."""
    return model_for_sc(case, partial(mixer, case), mixer_params, separate_calls=True)


UNITS = {
    "NystromAttention": nystrom_attention,
    "NystromAttention.iterative_inv": iterative_inv,
    "NystromformerSelfAttention": hugging_face_attention,
    "ModelForSC": model_with_nystrom,
    "ModelForSCDual": model_with_nystrom,
}
