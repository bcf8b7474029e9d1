"""Adapters of the S4D family: kernels, layers and models of the full code and the stand-alone one.

The stand-alone code has no B, which is 1, and a plus before A_imag where ours and the full code
have a minus. Complex numbers are pairs of real ones on a last axis, in the files as in our models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.classifier import Classifier
from models.encoder import Encoder, MixerBlock
from models.s4d import (
    S4DEncoder,
    S4DKernel,
    S4DMixer,
    S4DOptions,
    initial_dt,
    initial_states,
)
from models.shape import Shape
from tests.golden.case import Case, Result, call, linear, norm


def knobs(config: dict[str, Any]) -> dict[str, Any]:
    """Our options of a unit's switches; what the stand-alone code leaves out is as it has it."""
    return {
        "state_size": config["d_state"],
        "init": config.get("init", "lin").removeprefix("diag-"),
        "discretization": config.get("disc", "zoh"),
        "real_part": config.get("real_transform", "exp"),
        "dt_transform": config.get("dt_transform", "exp"),
        "dt_min": config.get("dt_min", 0.001),
        "dt_max": config.get("dt_max", 0.1),
        "tie_dt": config.get("dt_tie", True),
        "num_copies": config.get("n_ssm"),
        "channels": config.get("channels", 1),
        "kernel_length": config.get("l_max"),
        "bidirectional": config.get("bidirectional", False),
        "tie_dropout": True,
    }


def kernel_params(case: Case, ours: str = "", theirs: str = "") -> dict[str, Tensor]:
    """Those of a kernel; `ours` and `theirs` are prefixes, dot included."""
    params = {
        name.removeprefix(theirs): value
        for name, value in case.params.items()
        if name.startswith(theirs)
    }
    if "log_dt" in params:  # the stand-alone code
        num_states = params["A_imag"].shape
        mapped = {
            "raw_dt": params["log_dt"][:, None],
            "A_real": params["log_A_real"],
            "A_imag": -params["A_imag"],
            "B": torch.tensor([1.0, 0.0], dtype=case.dtype).expand(*num_states, 2),
            "C": params["C"][None],
        }
    else:
        mapped = {"raw_dt": params["inv_dt"], "B": params["B"][0]}
        mapped |= {name: params[name] for name in ("A_real", "A_imag", "C")}
    return {f"{ours}{name}": value for name, value in mapped.items()}


def mixer_params(case: Case, ours: str = "", theirs: str = "") -> dict[str, Tensor]:
    """Those of a layer, an S4Block or the stand-alone S4D."""
    inner = theirs if f"{theirs}D" in case.params else f"{theirs}layer."
    weight = case.params[f"{theirs}output_linear.0.weight"]
    skip = case.params[f"{inner}D"]
    return kernel_params(case, f"{ours}kernel.", f"{inner}kernel.") | {
        f"{ours}skip": skip.view(-1, skip.shape[-1]),
        f"{ours}out.weight": weight.flatten(1),
        f"{ours}out.bias": case.params[f"{theirs}output_linear.0.bias"],
    }


def norm_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    """A norm, with running statistics if there are any."""
    statistics = {
        f"{ours}.{name}": case.buffers[f"{theirs}.{name}"]
        for name in ("running_mean", "running_var")
        if f"{theirs}.{name}" in case.buffers
    }
    return norm(case, ours, theirs) | statistics


def shape_of(case: Case, **fields: Any) -> Shape:
    """The sizes and the layout of a unit; a table of ids is as long as it needs to be."""
    config = case.config
    sizes: dict[str, Any] = {
        "vocab_size": 3,
        "max_length": config["L"],
        "d_model": config["d_model"],
        "num_heads": 1,
        "num_layers": config.get("n_layers", 1),
        "norm": "pre" if config.get("prenorm") else "post",
        "norm_kind": config.get("norm", "layer"),
        "positions": "none",
        "head_hidden": (),
    }
    return Shape(**sizes | fields)


def mask_of(case: Case, x: Tensor) -> Tensor:
    """Real positions of [B, L, ...]: the first `lengths`, or all."""
    lengths_B = case.inputs.get("lengths", torch.full((len(x),), x.shape[1]))
    return torch.arange(x.shape[1]) < lengths_B[:, None]


def note(noted: dict[str, Tensor], module: nn.Module, name: str) -> None:
    """Keep what a module gives."""
    module.register_forward_hook(lambda _, args, output: noted.update({name: output}))


def kernel(case: Case) -> Result:
    """A kernel alone; that of the stand-alone code has no axis of channels."""
    options = S4DOptions(**knobs(case.config))
    model = case.build(lambda: S4DKernel(case.config["d_model"], options.channels, options))
    kernel_MDK = call(model, kernel_params(case), case.config["L"])
    return Result({"K": kernel_MDK[0] if case.unit == "S4DKernel" else kernel_MDK})


def layer(case: Case) -> Result:
    """The mixer: an S4Block, or the stand-alone layer, whose positions may come last."""
    transposed = case.config["transposed"]
    x = case.inputs["u" if "u" in case.inputs else "x"]
    x_BLD = x.mT if transposed else x
    model = case.build(lambda: S4DMixer(shape_of(case), S4DOptions(**knobs(case.config))))
    noted: dict[str, Tensor] = {}
    note(noted, model.kernel, "K")
    note(noted, model.inner_dropout, "conv")
    y_BLD = call(model, mixer_params(case), x_BLD, mask_of(case, x_BLD))
    if case.unit == "S4D":
        noted = {"K": noted["K"][0]}
    return Result({"y": y_BLD.mT if transposed else y_BLD}, noted)


def block(case: Case) -> Result:
    """A layer with its residual connection and its norm."""
    shape, options = shape_of(case), S4DOptions(**knobs(case.config))
    model = case.build(lambda: MixerBlock(shape, S4DMixer(shape, options), tie_dropout=True))
    noted: dict[str, Tensor] = {}
    note(noted, model.mixer, "layer")
    mapped = mixer_params(case, "mixer.", "layer.") | norm_params(case, "norm", "norm.norm")
    x_BLD = case.inputs["x"]
    return Result({"y": call(model, mapped, x_BLD, mask_of(case, x_BLD))}, noted)


def make_model(case: Case, shape: Shape, num_sequences: int = 1) -> Classifier:
    """A whole classifier of the file's sizes."""
    options = knobs(case.config)

    def make() -> Classifier:
        encoder: Encoder = S4DEncoder(shape, block="own", **options)
        return Classifier(encoder, shape, case.config["num_classes"], num_sequences)

    return case.build(make)


def classifier(case: Case) -> Result:
    """A whole model; the files' documents of pairs come first ones first."""
    config, x = case.config, case.inputs["x"]
    kind = config["kind"]
    pairs = kind == "retrieval"
    shape = shape_of(
        case,
        vocab_size=3 if kind == "pixels" else config["vocab_size"],
        input="real" if kind == "pixels" else "ids",
        pooling={"pool": "mean", "last": "last"}[config["decoder"]["mode"]],
        head_hidden=(config["d_model"],) if pairs else (),
        head_activation=config["decoder"].get("activation", "relu"),
    )
    model = make_model(case, shape, 2 if pairs else 1)
    mapped = {"encoder.embedding.tokens.weight": case.params["encoder.0.weight"]}
    if kind == "pixels":
        mapped = {
            "encoder.embedding.tokens.weight": case.params["encoder.0.weight"][:, 0],
            "encoder.embedding.tokens.bias": case.params["encoder.0.bias"],
        }
        x = x[..., 0] + 1  # with three ids the value of id 2 is 1, that of id 1 is 0
    noted: dict[str, Tensor] = {}
    note(noted, model.encoder.embedding, "embedded")
    note(noted, model.encoder, "tokens")
    for i, own in enumerate(model.encoder.blocks):
        theirs = f"model.layers.{i}"
        mapped |= mixer_params(case, f"encoder.blocks.{i}.mixer.", f"{theirs}.layer.")
        mapped |= norm_params(case, f"encoder.blocks.{i}.norm", f"{theirs}.norm.norm")
        note(noted, own, f"block_{i}")
    if config["prenorm"]:
        mapped |= norm_params(case, "encoder.norm", "model.norm.norm")
    if pairs:
        # They join u, v, u - v, u * v; we join u, v, u * v, u - v.
        head = "decoder.0.retrieval.classifier"
        u, v, difference, product = case.params[f"{head}.0.weight"].chunk(4, dim=1)
        mapped |= linear(case, "head.0", f"{head}.0") | linear(case, "head.2", f"{head}.2")
        mapped["head.0.weight"] = torch.cat([u, v, product, difference], dim=1)
    else:
        mapped |= linear(case, "head.0", "decoder.0.output_transform")
    lengths_B = mask_of(case, x).sum(dim=1)
    num_sequences = 2 if pairs else 1
    x_BSL = torch.stack(x.chunk(num_sequences), dim=1)
    lengths_BS = torch.stack(lengths_B.chunk(num_sequences), dim=1)
    logits_BC = call(model, mapped, x_BSL, lengths_BS)
    if pairs:  # back to the files' order of rows
        noted = {name: torch.cat(y.unflatten(0, (-1, 2)).unbind(1)) for name, y in noted.items()}
    return Result({"logits": logits_BC}, noted)


def standalone_model(case: Case) -> Result:
    """The small model around the stand-alone layer. The table has the mapped input's own rows."""
    x_BLI = case.inputs["x"]
    batch_size, length, _ = x_BLI.shape
    shape = shape_of(case, vocab_size=batch_size * length)
    model = make_model(case, shape)
    rows_ND = x_BLI.flatten(0, 1) @ case.params["encoder.weight"].T + case.params["encoder.bias"]
    mapped = {"encoder.embedding.tokens.weight": rows_ND} | linear(case, "head.0", "decoder")
    noted: dict[str, Tensor] = {}
    note(noted, model.encoder.embedding, "embedded")
    for i, own in enumerate(model.encoder.blocks):
        mapped |= mixer_params(case, f"encoder.blocks.{i}.mixer.", f"s4_layers.{i}.")
        mapped |= norm_params(case, f"encoder.blocks.{i}.norm", f"norms.{i}")
        note(noted, own.get_submodule("mixer"), f"layer_{i}")
    tokens_B1L = torch.arange(batch_size * length).view(batch_size, 1, length)
    logits_BC = call(model, mapped, tokens_B1L, torch.full((batch_size, 1), length))
    noted = {name: y.mT if name.startswith("layer") else y for name, y in noted.items()}
    return Result({"logits": logits_BC}, noted)


def initial(case: Case) -> Result:
    """First values. Eigenvectors are known up to a phase; the example in the file fixes a sign."""
    options = S4DOptions(**knobs(case.config))
    frequency_N, b_N = initial_states(options.init, options.state_size)
    a_N2 = torch.stack([torch.full_like(frequency_N, -0.5), -frequency_N], dim=1)
    b_N2 = torch.view_as_real(b_N)
    share_D = torch.linspace(0, 1, case.config["d_model"], dtype=torch.float64)
    outputs = {"A": a_N2, "dt_grid": initial_dt(share_D, options)}
    if options.init != "legs":
        return Result(outputs | {"B": b_N2})
    sign_N1 = torch.from_numpy(case.arrays["mid/B_example"])[:, :1].sign()
    return Result(outputs, {"B_example": b_N2 * sign_N1})


UNITS = {
    "S4DKernel": kernel,
    "SSMKernelDiag": kernel,
    "S4D": layer,
    "S4Block": layer,
    "SequenceResidualBlock": block,
    "S4Classifier": classifier,
    "S4Model": standalone_model,
    "S4D.initial": initial,
}
