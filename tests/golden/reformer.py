"""Adapters of the Reformer family: Hugging Face's LSH attention, also in classifiers; the arena's.

Hugging Face's rotations are [H, K, R, factors' halves]; its chunks follow the padded length. What
it leaves in padded rows is compared with itself: ours are zero there.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from models.reformer import ReformerAttention
from models.shape import Shape
from tests.golden.case import Case, Result, call
from tests.golden.softmax import model_for_sc


def lsh_attention(case: Case) -> Result:
    """The mixer with an identity as output projection, since the file has none."""
    config, x_BLD = case.config, case.inputs["hidden_states"]
    batch_size, length, d_model = x_BLD.shape
    num_heads, head_dim = config["num_attention_heads"], config["attention_head_size"]
    width = num_heads * head_dim
    shape = Shape(
        vocab_size=1, max_length=length, d_model=d_model, num_heads=num_heads, head_dim=head_dim
    )
    model = case.build(
        lambda: ReformerAttention(
            shape,
            num_hashes=config["num_hashes"],
            num_buckets=config["num_buckets"],
            chunk_length=config["lsh_attn_chunk_length"],
            num_chunks_before=config["lsh_num_chunks_before"],
            num_chunks_after=config["lsh_num_chunks_after"],
            mask_later=config["is_decoder"],
            padded_chunks=True,
        )
    )
    mask_BL = torch.ones(batch_size, length, dtype=torch.bool)
    if "attention_mask" in case.inputs:
        mask_BL = case.inputs["attention_mask"] != 0
    params = {"query_value.weight": stacked(case, "query_key", "value")}
    if "rotations" in case.buffers:
        params["rotations_HKM"] = case.buffers["rotations"].flatten(2)
    qv_BLTHK = call(model.query_value, {"weight": params["query_value.weight"]}, x_BLD)
    qv_BLTHK = qv_BLTHK.unflatten(2, (2, num_heads, head_dim))
    rest = {name: value for name, value in model.named_parameters() if name not in params}
    y_BLHK = call(model, params | rest, qv_BLTHK, mask_BL, method="attend")
    theirs_BLE = torch.from_numpy(case.arrays["out/output"]).to(case.dtype)
    y_BLE = torch.where(mask_BL[..., None], y_BLHK.reshape(batch_size, length, width), theirs_BLE)
    return Result({"output": y_BLE})


def stacked(case: Case, *names: str) -> Tensor:
    return torch.cat([case.params[f"{name}.weight"] for name in names])


def mixer_params(case: Case, theirs: str) -> dict[str, Tensor]:
    """The mixer's parameters and its rotations from those of the block called `theirs`."""
    return {
        "query_value.weight": stacked(case, f"{theirs}.W_q", f"{theirs}.W_v"),
        "out.weight": case.params[f"{theirs}.ff.weight"],
        "out.bias": case.params[f"{theirs}.ff.bias"],
        "rotations_HKM": case.buffers[f"{theirs}.attn.rotations"].flatten(2),
    }


def model_with_reformer(case: Case) -> Result:
    """A whole classifier; the defaults of `ReformerAttention` are those of the source."""
    mixer = partial(ReformerAttention, num_hashes=case.config["num_hash"])
    return model_for_sc(case, mixer, mixer_params)


def arena_attention(case: Case) -> Result:
    """The whole mixer, in the arena's variant. Its kernels are [D, H, K]."""
    config, x_BLD = case.config, case.inputs["inputs"]
    shape = Shape(
        vocab_size=1,
        max_length=x_BLD.shape[1],
        d_model=x_BLD.shape[2],
        num_heads=config["num_heads"],
        attention_bias=config["bias"],
    )
    assert config["chunk_len"] == config["n_buckets"]  # in the files as in what the arena runs
    model = case.build(
        lambda: ReformerAttention(
            shape,
            num_hashes=config["n_hashes"],
            num_buckets=config["n_buckets"],
            variant="arena",
        )
    )
    names = ("query", "value")
    rotations_KM = case.buffers["rotations"].flatten(1)
    params = {
        "query_value.weight": torch.cat([case.params[f"{n}.kernel"].flatten(1).T for n in names]),
        "rotations_HKM": rotations_KM.expand(config["num_heads"], -1, -1),
    }
    if config["bias"]:
        params["query_value.bias"] = torch.cat([case.params[f"{n}.bias"].flatten() for n in names])
    mask_BL = torch.ones(x_BLD.shape[:2], dtype=torch.bool)
    if "padding_mask" in case.inputs:
        mask_BL = case.inputs["padding_mask"][..., 0]
    return Result({"output": call(model, params, x_BLD, mask_BL)})


UNITS = {
    "hf:LSHSelfAttention": lsh_attention,
    "ModelForSC": model_with_reformer,
    "lra:ReformerSelfAttention": arena_attention,
}
