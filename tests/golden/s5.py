"""Adapters of the S5 family: linear system, layer, whole models and initial values."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from models.s5 import S5SSM, S5Encoder, log_steps
from models.shape import Shape
from tests.golden.case import Case, Result, call
from tests.golden.lru import flax_shape, real_everywhere, run_block, run_model


def ssm_params(case: Case, theirs: str = "") -> dict[str, Tensor]:
    """The system's own parameters; one C of both directions is cut in two."""
    params = {n.removeprefix(theirs): x for n, x in case.params.items() if n.startswith(theirs)}
    mapped = {name: params[name] for name in ("Lambda_re", "Lambda_im", "D")}
    mapped["log_step"] = params["log_step"].squeeze(1)
    mapped["B"] = params["B"].movedim(2, 0)
    if "C1" in params:
        maps = [params["C1"], params["C2"]]
    else:
        maps = list(params["C"].split(len(params["log_step"]), dim=1))
    names = ("C", "backward_C")[: len(maps)]
    return mapped | {name: C.movedim(2, 0) for name, C in zip(names, maps, strict=True)}


def options(config: dict[str, Any]) -> dict[str, Any]:
    """Switches of the linear system under our names."""
    return {
        "state_size": config["ssm_size"],
        "num_blocks": config.get("blocks", 1),
        "discretization": config.get("discretization", "zoh"),
        "conj_sym": config["conj_sym"],
        "clip_eigs": config.get("clip_eigs", False),
        "step_rescale": config.get("step_rescale", 1.0),
        "c_init": config["C_init"],
        "dt_min": config.get("dt_min", 0.001),
        "dt_max": config.get("dt_max", 0.1),
        "bidirectional": config["bidirectional"],
    }


def make_ssm(case: Case) -> S5SSM:
    """The linear system of a file."""
    shape = Shape(vocab_size=1, max_length=1, d_model=case.config["d_model"], num_heads=1)
    return case.build(lambda: S5SSM(shape, **options(case.config)))


def make_encoder(case: Case, shape: Shape) -> S5Encoder:
    """Layers as in the reference."""
    config = case.config
    return S5Encoder(
        shape,
        gate=config["activation"],
        block="own",
        norm_eps=config["norm_eps"],
        **options(config),
    )


def system(case: Case) -> Result:
    """The linear system alone, with its discretised decay and input map."""
    noted: dict[str, Tensor] = {}
    unpatched = S5SSM.decay_and_input

    def keep(self: S5SSM) -> tuple[Tensor, Tensor]:
        decay_N, input_ND = unpatched(self)
        noted["Lambda_bar"], noted["B_bar"] = map(torch.view_as_real, (decay_N, input_ND))
        return decay_N, input_ND

    x_BLD = case.inputs["x"]
    with mock.patch.object(S5SSM, "decay_and_input", keep):
        y_BLD = call(make_ssm(case), ssm_params(case), x_BLD, real_everywhere(x_BLD))
    return Result({"y": y_BLD}, noted)


def layer(case: Case) -> Result:
    """System, gate, residual connection and norm."""
    shape = flax_shape(case.config, batch_norm=case.config["batchnorm"])
    encoder = case.build(lambda: make_encoder(case, shape))
    return run_block(case, encoder, "norm", "ssm", ssm_params)


def classifier(case: Case, *, num_sequences: int) -> Result:
    """Linear encoder to log-probabilities, of one sequence or two."""
    config = case.config
    shape = flax_shape(
        config,
        batch_norm=config["batchnorm"],
        vocab_size=num_sequences * config["batch"] * config["L"],
        num_layers=config["n_layers"],
        pooling="last" if config["mode"] == "last" else "mean",
        head_hidden=(config["d_model"],) if num_sequences == 2 else (),
        head_activation="gelu_tanh",
    )
    return run_model(
        case,
        lambda shape: make_encoder(case, shape),
        shape,
        "norm",
        ssm_params,
        num_sequences=num_sequences,
    )


def initial(case: Case) -> Result:
    """Eigenvalues, and steps from the file's uniform numbers."""
    model, config = make_ssm(case), case.config
    log_step_N = log_steps(case.inputs["u_step"], dt_min=config["dt_min"], dt_max=config["dt_max"])
    outputs = {"Lambda_re": model.Lambda_re, "Lambda_im": model.Lambda_im}
    return Result(outputs | {"log_step": log_step_N[:, None]})


UNITS = {
    "S5SSM": system,
    "SequenceLayer": layer,
    "BatchClassificationModel": lambda case: classifier(case, num_sequences=1),
    "RetrievalModel": lambda case: classifier(case, num_sequences=2),
    "S5SSM.initial": initial,
}
