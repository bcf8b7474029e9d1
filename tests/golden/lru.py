"""Adapters of the LRU family: recurrence, layer, whole models and initial values.

Flax stores a linear map as a kernel [in, out] and the gain of a norm as `scale`. The layers there
know no lengths, so the encoder here gets a mask without padding; only pooling may know them. Inputs
are rows of numbers, one-hot for tokens, in a linear map: the embedding table holds what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from einops import rearrange
from torch import Tensor, nn

from models import recurrence
from models.classifier import Classifier, pool_tokens
from models.encoder import Encoder
from models.lru import LRU, LRUEncoder, ring
from models.shape import Shape
from tests.golden.case import Case, Result, call

SystemParams = Callable[[Case, str], dict[str, Tensor]]  # of a prefix of theirs, dot included


class UnmaskedClassifier(Classifier):
    """Lengths reach the pooling only."""

    def represent(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        x_BLD = self.encoder(tokens_BL, torch.ones_like(mask_BL))
        return pool_tokens(x_BLD, mask_BL, self.shape.pooling)


def dense(case: Case, ours: str, *theirs: str) -> dict[str, Tensor]:
    """One linear map, or several stacked ones."""
    return {
        f"{ours}.weight": torch.cat([case.params[f"{name}.kernel"].mT for name in theirs]),
        f"{ours}.bias": torch.cat([case.params[f"{name}.bias"] for name in theirs]),
    }


def norm(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    """A norm, with the running statistics of a batch norm."""
    mapped = {
        f"{ours}.weight": case.params[f"{theirs}.scale"],
        f"{ours}.bias": case.params[f"{theirs}.bias"],
    }
    for part in ("mean", "var"):
        if f"{theirs}.{part}" in case.buffers:
            mapped[f"{ours}.running_{part}"] = case.buffers[f"{theirs}.{part}"]
    return mapped


def block_params(
    case: Case, ours: str, theirs: str, their_norm: str, system: SystemParams
) -> dict[str, Tensor]:
    """A layer: system, the maps of the gate that it has, norm; prefixes with their dots."""
    mapped = {f"{ours}mixer.system.{k}": v for k, v in system(case, f"{theirs}seq.").items()}
    maps = [f"{theirs}{n}" for n in ("out1", "out2") if f"{theirs}{n}.kernel" in case.params]
    if maps:
        mapped |= dense(case, f"{ours}mixer.out", *maps)
    return mapped | norm(case, f"{ours}norm", f"{theirs}{their_norm}")


def note(noted: dict[str, Tensor], module: nn.Module, name: str) -> None:
    """Keep what a module gives."""
    module.register_forward_hook(lambda _, args, output: noted.update({name: output}))


def real_everywhere(x_BLD: Tensor) -> Tensor:
    """A mask without padding."""
    return torch.ones(x_BLD.shape[:2], dtype=torch.bool)


def flax_shape(config: dict[str, Any], *, batch_norm: bool, **changes: Any) -> Shape:
    """The parts of a shape that both families read from a file."""
    return Shape(
        max_length=config["L"],
        d_model=config["d_model"],
        num_heads=1,
        dropout=0.0,
        norm="pre" if config["prenorm"] else "post",
        norm_kind="batch" if batch_norm else "layer",
        positions="none",
        **{"vocab_size": 1, "num_layers": 1} | changes,
    )


def run_block(
    case: Case, encoder: Encoder, their_norm: str, system_name: str, system: SystemParams
) -> Result:
    """The first layer of an encoder on the file's input."""
    block, x_BLD = encoder.blocks[0], case.inputs["x"]
    noted: dict[str, Tensor] = {}
    note(noted, block.get_submodule("norm"), "normed")
    note(noted, block.get_submodule("mixer.system"), system_name)
    params = block_params(case, "", "", their_norm, system)
    return Result({"y": call(block, params, x_BLD, real_everywhere(x_BLD))}, noted)


def run_model(
    case: Case,
    make: Callable[[Shape], Encoder],
    shape: Shape,
    their_norm: str,
    system: SystemParams,
    *,
    num_sequences: int = 1,
) -> Result:
    """A whole classifier, or encoder and one map of every row, which no classifier here has."""
    config, x_BLV = case.config, case.inputs["x"]
    num_rows, length = x_BLV.shape[:2]
    outputs = config["d_output"] * config.get("multidim", 1)
    model = case.build(lambda: UnmaskedClassifier(make(shape), shape, outputs, num_sequences))
    kernel, bias = (case.params[f"encoder.encoder.{part}"] for part in ("kernel", "bias"))
    embedded_RD = (x_BLV @ kernel + bias).flatten(0, 1)
    mapped = {"encoder.embedding.tokens.weight": embedded_RD}
    noted: dict[str, Tensor] = {}
    note(noted, model.encoder.embedding, "embedded")
    for i, block in enumerate(model.encoder.blocks):
        note(noted, block, f"block_{i}")
        ours, theirs = f"encoder.blocks.{i}.", f"encoder.layers_{i}."
        mapped |= block_params(case, ours, theirs, their_norm, system)
    if num_sequences == 2:
        # Theirs are r0, r1, r0 - r1, r0 * r1; here the product comes first.
        mapped |= dense(case, "head.0", "decoder.layer1") | dense(case, "head.2", "decoder.layer2")
        u, v, difference, product = mapped["head.0.weight"].chunk(4, dim=1)
        mapped["head.0.weight"] = torch.cat([u, v, product, difference], dim=1)
    else:
        mapped |= dense(case, "head.0", "decoder")
    # Rows are first documents, then second ones.
    tokens_BSL = torch.arange(num_rows * length).view(num_sequences, -1, length).transpose(0, 1)
    lengths_BS = torch.full(tokens_BSL.shape[:2], length)
    if "lengths" in case.inputs:
        lengths_BS = case.inputs["lengths"].view(num_sequences, -1).T
    if config.get("pooling") == "none":
        mask_BL = real_everywhere(x_BLV)
        rows = call(model, mapped, tokens_BSL[:, 0], mask_BL, method="encoder")
        rows = rows @ mapped["head.0.weight"].mT + mapped["head.0.bias"]
        if config["multidim"] > 1:
            rows = rows.unflatten(2, (-1, config["multidim"]))
        return Result({"log_probs": rows.log_softmax(dim=-1)}, noted)
    logits_BC = call(model, mapped, tokens_BSL, lengths_BS)
    noted = {k: rearrange(x, "(b s) l d -> (s b) l d", s=num_sequences) for k, x in noted.items()}
    return Result({"log_probs": logits_BC.log_softmax(dim=-1)}, noted)


def lru_params(case: Case, theirs: str = "") -> dict[str, Tensor]:
    """The recurrence's own parameters."""
    mapped = {n: case.params[f"{theirs}{n}"] for n in ("nu_log", "theta_log", "gamma_log", "D")}
    for name in ("B", "C"):
        mapped[name] = torch.stack([case.params[f"{theirs}{name}_{part}"] for part in ("re", "im")])
    return mapped


def make_encoder(case: Case, shape: Shape) -> LRUEncoder:
    """Layers as in the reference."""
    config = case.config
    return LRUEncoder(
        shape, state_size=config["d_hidden"], block="own", norm_eps=config["norm_eps"]
    )


def recurrence_alone(case: Case) -> Result:
    """The recurrence without a gate."""
    config, x_BLD = case.config, case.inputs["x"]
    shape = Shape(vocab_size=1, max_length=1, d_model=config["d_model"], num_heads=1)
    model = case.build(
        lambda: LRU(
            shape,
            state_size=config["d_hidden"],
            r_min=0.0,
            r_max=1.0,
            max_phase=6.28,
            bidirectional=False,
        )
    )
    states: list[Tensor] = []
    unpatched = recurrence.scan

    def keep(*args: Any, **knobs: Any) -> Tensor:
        states.append(unpatched(*args, **knobs))
        return states[-1]

    with mock.patch.object(recurrence, "scan", keep):
        y_BLD = call(model, lru_params(case), x_BLD, real_everywhere(x_BLD))
    return Result({"y": y_BLD}, {"h": states[0].permute(2, 3, 1, 0)})


def layer(case: Case) -> Result:
    """Recurrence, gate, residual connection and norm."""
    shape = flax_shape(case.config, batch_norm=case.config["norm"] == "batch")
    encoder = case.build(lambda: make_encoder(case, shape))
    return run_block(case, encoder, "normalization", "lru", lru_params)


def model(case: Case) -> Result:
    """Linear encoder to log-probabilities."""
    config = case.config
    shape = flax_shape(
        config,
        batch_norm=config["norm"] == "batch",
        vocab_size=config["batch"] * config["L"],
        num_layers=config["n_layers"],
        pooling="last" if config["pooling"] == "last" else "mean",
        head_hidden=(),
    )
    return run_model(case, lambda s: make_encoder(case, s), shape, "normalization", lru_params)


def initial(case: Case) -> Result:
    """Decays on a ring, from the file's uniform numbers."""
    options = {key: case.config[key] for key in ("r_min", "r_max", "max_phase")}
    values = ring(case.inputs["u_nu"], case.inputs["u_theta"], **options)
    outputs = dict(zip(("nu_log", "theta_log", "gamma_log"), values, strict=True))
    decay_N = torch.exp(torch.complex(-outputs["nu_log"].exp(), outputs["theta_log"].exp()))
    return Result(outputs, {"lambda": torch.view_as_real(decay_N)})


UNITS = {
    "LRU": recurrence_alone,
    "SequenceLayer": layer,
    "BatchClassificationModel": model,
    "LRU.initial": initial,
}
