"""An encoder that goes from token to token gives what it gives of all tokens at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.encoder import STEPWISE, Encoder, EncoderState
from tests.models.test_models import MODELS, SMALL, batch, build, largest_difference, options_of

LENGTH = 20
# Knobs that are not as in the config, or of the shape, for each way that a state can take.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {}) for name in STEPWISE),
    *((name, {}, {"norm": "post", "positions": "sinusoidal"}) for name in STEPWISE),
    *((name, {"block": "own"}, {}) for name in ("s4d", "lru", "s5", "mega")),
    *((name, {"block": "own"}, {"norm": "post"}) for name in ("s4d", "mega")),
    *((name, {}, {"tie_layers": True}) for name in ("luna", "mega", "s5")),
    ("s4d", {"block": "own"}, {"norm_kind": "batch", "input": "real", "positions": "none"}),
    ("luna", {"tie_kv": True, "activation": "elu"}, {"embedding_scale": True}),
    ("luna", {}, {"norm": "post", "norm_kind": "batch", "embedding_norm": True}),
    ("local", {"pattern": "blocks", "window": 64, "block_size": 6}, {}),
    ("local", {"window": 2}, {}),
    ("mega", {"chunk_size": None, "position_bias": "rotary", "truncation": 3}, {}),
    ("performer", {"kernel": "relu"}, {}),
    *((name, {}, {"positions": "rotary"}) for name in ("softmax", "local", "linear", "performer")),
]
GROWS = {"softmax"}


def causal(name: str, knobs: dict[str, Any], layout: dict[str, Any]) -> Encoder:
    one_way = {"causal": True, "bidirectional": False}
    knobs = {k: v for k, v in one_way.items() if k in options_of(name)} | knobs
    encoder = build(name, replace(SMALL, max_length=LENGTH, **layout), **knobs).eval().encoder
    for norm in encoder.modules():
        if hasattr(norm, "running_mean"):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    return encoder


def tensors(state: Any) -> Iterator[Tensor]:
    """All that a state holds."""
    if isinstance(state, Tensor):
        yield state
    elif is_dataclass(state):
        yield from tensors([getattr(state, field.name) for field in fields(state)])
    elif isinstance(state, list | tuple):
        for part in state:
            yield from tensors(part)


def size(state: EncoderState) -> int:
    return sum(x.numel() for x in tensors(state))


@pytest.mark.parametrize(
    "name, knobs, layout",
    CASES,
    ids=[" ".join((n, *(f"{k}={v}" for k, v in (a | b).items()))) for n, a, b in CASES],
)
@torch.no_grad()
def test_parallel_and_step_by_step_forms_agree(
    name: str, knobs: dict[str, Any], layout: dict[str, Any]
) -> None:
    encoder = causal(name, knobs, layout)
    tokens_BL = batch(LENGTH, LENGTH)[0][:, 0]
    expected_BLD = encoder(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))
    state, rows, sizes = encoder.start(2), [], []
    assert len(state.layers) == SMALL.num_layers
    for tokens_B1 in tokens_BL.split(1, dim=1):
        x_B1D, state = encoder.step(tokens_B1, state)
        rows.append(x_B1D)
        sizes.append(size(state))
    assert largest_difference(torch.cat(rows, dim=1), expected_BLD) < 1e-10
    assert expected_BLD.std(dim=1).min() > 1e-3
    # Once a window or a chunk is full, nothing grows.
    grows = name in GROWS or knobs.get("chunk_size", 8) is None
    assert (sizes[-1] > max(sizes[:-1])) == grows
    with pytest.raises(ValueError, match=f"input of {LENGTH + 1} tokens, .*={LENGTH}"):
        encoder.step(tokens_BL[:, :1], state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name, knobs, layout", CASES)
@torch.no_grad()
def test_steps_in_low_precision(
    name: str, knobs: dict[str, Any], layout: dict[str, Any], dtype: torch.dtype
) -> None:
    encoder = causal(name, knobs, layout).to(dtype)
    tokens_BL = batch(9, 9)[0][:, 0]
    expected_BLD = encoder(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))
    state, rows = encoder.start(2), []
    for tokens_B1 in tokens_BL.split(1, dim=1):
        x_B1D, state = encoder.step(tokens_B1, state)
        rows.append(x_B1D)
    assert rows[0].dtype == dtype
    assert largest_difference(torch.cat(rows, dim=1), expected_BLD) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_what_reads_ahead_does_not_start(name: str) -> None:
    expected = "causal=false|bidirectional=true" if name in STEPWISE else "cannot go from token"
    if name == "luna":
        expected = "LunaAttention cannot go .* model.causal=true these .*luna"
    knobs = {"bidirectional": True} if "bidirectional" in options_of(name) else {}
    with pytest.raises(ValueError, match=expected):
        build(name, **knobs).encoder.start(1)


def test_causal_models_without_steps_say_which_have_them() -> None:
    with pytest.raises(ValueError, match=r"SynthesizerAttention .* softmax, luna, .*, local$"):
        build("synthesizer", causal=True).encoder.start(1)
