"""Adapters of the Synthesizer family: the arena's layer.

Without the dot product it ignores its mask, so all positions count as real there. With it, a query
at padding averages all keys, which means nothing: there the file's own numbers stand in.
"""

from __future__ import annotations

import torch

from models.synthesizer import SynthesizerAttention
from tests.golden.case import Case, Result, call
from tests.golden.linformer import arena_linear, arena_shape, ones_mask

LEFT_OUT = {
    "synthesizer_lra_dense_dot": "dense weights of two heads: a reshape mixes heads and positions, "
    "and no published number is of that mode",
}


def arena_attention(case: Case) -> Result:
    """The arena's layer in the mode that the file names."""
    x_BLD, config = case.inputs["inputs"], case.config
    dot_product = not config["ignore_dot_product"]
    shape = arena_shape(case, config["max_length"])
    model = case.build(
        lambda: SynthesizerAttention(
            shape,
            mode=config["synthesizer_mode"],
            rank=config.get("k", 2),
            dot_product=dot_product,
        )
    )
    params = arena_linear(case, "value", "value") | arena_linear(case, "out", "out")
    if dot_product:
        params |= arena_linear(case, "query", "query") | arena_linear(case, "key", "key")
    if "dense_syn.kernel" in case.params:
        params |= arena_linear(case, "dense.hidden", "dense_syn")
        params |= arena_linear(case, "dense.row", "dense_syn_len")
    for ours, theirs in {
        "random_HMM": "random",
        "random_HMR": "random1",
        "random_HRM": "random2",
    }.items():
        if theirs in case.params:
            params[ours] = case.params[theirs]
    if not dot_product or "padding_mask" not in case.inputs:
        return Result({"output": call(model, params, x_BLD, ones_mask(x_BLD))})
    mask_BL1 = case.inputs["padding_mask"] != 0
    y_BLD = call(model, params, x_BLD, mask_BL1[..., 0])
    padded_BLD = torch.from_numpy(case.arrays["out/output"]).to(case.dtype)
    return Result({"output": torch.where(mask_BL1, y_BLD, padded_BLD)})


UNITS = {"lra:SynthesizerSelfAttention": arena_attention}
