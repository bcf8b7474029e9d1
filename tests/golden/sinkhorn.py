"""Adapters of the Sinkhorn family: the arena's layer, and lucidrains' attention without noise.

No file has the plain form. lucidrains' takes sorted keys for sorted values; here that is put back
for its file, so that all else is compared. The arena's sort net has no effect and no gradient with
softmax weights, and is left out of our model.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from models import sinkhorn
from models.shape import Shape
from models.sinkhorn import SinkhornAttention
from tests.golden.case import Case, Result, call
from tests.golden.linformer import arena_linear, arena_shape, ones_mask

LEFT_OUT = {
    "sinkhorn_lra_sinkhorn": "balanced weights of two heads: a reshape mixes heads and blocks, and "
    "the arena ran with softmax weights",
    "sinkhorn_lucid_nonoise_mask": "blocks of padding take part in the balancing, so a row depends "
    "on its padding",
}


def arena_attention(case: Case) -> Result:
    """The arena's layer, as its released models run it."""
    assert case.config["sort_activation"] == "softmax"
    x_BLD = case.inputs["inputs"]
    shape = arena_shape(case, x_BLD.shape[1])
    block_size = case.config["block_size"]
    model = case.build(lambda: SinkhornAttention(shape, block_size=block_size, variant="arena"))
    params = arena_linear(case, "qkv", "query", "key", "value") | arena_linear(case, "out", "out")
    mask_BL = ones_mask(x_BLD)
    if "padding_mask" in case.inputs:
        mask_BL = case.inputs["padding_mask"][..., 0] != 0
    return Result({"output": call(model, params, x_BLD, mask_BL)})


def lucidrains_attention(case: Case) -> Result:
    """Heads in, heads out: attention of blocks with those sorted to them."""
    config = case.config
    size = config["bucket_size"]
    _, num_heads, _, width = case.inputs["q"].shape
    shape = Shape(vocab_size=1, max_length=1, d_model=num_heads * width, num_heads=num_heads)
    model = case.build(
        lambda: SinkhornAttention(
            shape,
            block_size=size,
            num_iterations=config["sinkhorn_iter"],
            temperature=config["temperature"],
        )
    )
    qkv = torch.stack([case.inputs[name].unflatten(2, (-1, size)) for name in "qkv"])
    mask_BNS = torch.ones(qkv.shape[1], *qkv.shape[3:5], dtype=torch.bool)
    sort_blocks = sinkhorn.sort_blocks

    def sort_keys(order_BHNN: Tensor, kv_2BHNSK: Tensor) -> Tensor:
        return sort_blocks(order_BHNN, kv_2BHNSK[[0, 0]])

    with mock.patch.object(sinkhorn, "sort_blocks", sort_keys):
        y = call(model, dict(model.named_parameters()), qkv, mask_BNS, method="attend_sorted")
    return Result({"output": y.flatten(2, 3)})


UNITS = {
    "lra:SinkhornSelfAttention": arena_attention,
    "lucidrains:SinkhornAttention": lucidrains_attention,
}
