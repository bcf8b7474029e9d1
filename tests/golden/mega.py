"""Adapters of the Mega family: moving average, biases, attention, layers, encoders, classifiers.

Differences that are bridged here: the files are time-major and their masks say True = padding;
padding is zeroed before the first layer and behind the last, where ours means nothing; encoder
files pad their tokens to whole chunks, and show those rows too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import mega
from models.classifier import Classifier, pool_tokens
from models.mega import MegaBlock, MegaEncoder, MegaGates, MovingAverage
from models.shape import Shape
from tests.golden.case import Case, Result, call, linear
from tests.golden.luna import batch_first, real, time_first

NORM_KINDS: dict[str, Any] = {
    "layernorm": "layer", "batchnorm": "batch", "scalenorm": "scale", "rmsnorm": "rms",
}  # fmt: skip


def function_alone(case: Case) -> Result:
    return Result({"y": mega.laplace(case.inputs["x"])})


def position_bias(case: Case) -> Result:
    config = case.config
    if config["rel_pos_bias"] == "rotary":
        module: nn.Module = case.build(lambda: mega.RotaryBias(config["zdim"]))
    else:
        module = case.build(lambda: mega.SimpleBias(config["max_positions"]))
    return Result({"bias": call(module, bias_params(case, "", ""), config["seq_len"])})


def moving_average(case: Case) -> Result:
    """All positions at once, and one at a time where the file has that too."""
    config, x_BLD = case.config, batch_first(case.inputs["x"])
    model = case.build(
        lambda: MovingAverage(
            config["embed_dim"],
            ema_size=config["ndim"],
            bidirectional=config["bidirectional"],
            truncation=config["truncation"],
        )
    )
    params = average_params(case, "", "")
    y_BLD = call(model, params, x_BLD, real(case, "padding_mask", x_BLD))
    kernel_EK = call(model, params, x_BLD.shape[1], method="kernel")
    noted = {"kernel": kernel_EK}
    if "mid/incremental" in case.arrays:
        steps, state = [], call(model, params, len(x_BLD), method="start")
        for x_BD in x_BLD.unbind(dim=1):
            y_BD, state = call(model, params, x_BD, state, method="step")
            steps.append(y_BD)
        noted["incremental"] = torch.stack(steps)
    return Result({"y": time_first(y_BLD)}, noted)


def average_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    names = ("delta", "alpha", "beta", "gamma", "omega")
    params = {name: case.params[f"{theirs}{name}"] for name in names}
    return {
        f"{ours}{name}": value.squeeze(-1) if value.dim() == 3 else value
        for name, value in params.items()
    }


def bias_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    if f"{theirs}alpha" in case.params:
        return {f"{ours}{name}": case.params[f"{theirs}{name}"][0] for name in ("alpha", "beta")}
    return {f"{ours}table": case.params[f"{theirs}rel_pos_bias"]}


def norm_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    """A norm of any kind, with the running statistics that it may have."""
    return {
        name.replace(f"{theirs}.norm", ours, 1): value
        for name, value in {**case.params, **case.buffers}.items()
        if name.startswith(f"{theirs}.norm.")
    }


def attention_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    mapped = {f"{ours}{name}": case.params[f"{theirs}{name}"] for name in ("gamma", "beta")}
    for name, their_name in {"value": "v_proj", "maps": "mx_proj", "hidden": "h_proj"}.items():
        mapped |= linear(case, f"{ours}{name}", f"{theirs}{their_name}")
    mapped |= average_params(case, f"{ours}ema.", f"{theirs}move.")
    return mapped | bias_params(case, f"{ours}position_bias.", f"{theirs}rel_pos_bias.")


def feed_forward_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    return linear(case, f"{ours}up", f"{theirs}fc1") | linear(case, f"{ours}down", f"{theirs}fc2")


def block_params(case: Case, ours: str, theirs: str) -> dict[str, Tensor]:
    return (
        norm_params(case, f"{ours}norm1", f"{theirs}mega_layer.norm")
        | attention_params(case, f"{ours}mixer.", f"{theirs}mega_layer.")
        | norm_params(case, f"{ours}norm2", f"{theirs}nffn.norm")
        | feed_forward_params(case, f"{ours}ffn.", f"{theirs}nffn.")
    )


def first(config: dict[str, Any], *names: str) -> Any:
    """The value of whichever of these names the file uses."""
    return next(config[name] for name in names if name in config)


def knobs(config: dict[str, Any]) -> dict[str, Any]:
    """Options of the attention, under the names that each kind of file has for them."""
    chunk_size = config["chunk_size"]
    return dict(
        ema_size=first(config, "ndim", "n_dim"),
        bidirectional=config.get("bidirectional", True),
        truncation=first(config, "truncation", "truncation_length"),
        attention_function=first(config, "attention_activation", "attention_activation_fn"),
        chunk_size=None if chunk_size < 0 else chunk_size,
        z_size=first(config, "zdim", "z_dim"),
        v_size=first(config, "hdim", "hidden_dim", "encoder_hidden_dim"),
        position_bias=config["rel_pos_bias"],
        causal=config.get("causal", False),
    )


def layout(config: dict[str, Any], **sizes: Any) -> Shape:
    pre_norm = first(config, "prenorm", "normalize_before", "encoder_normalize_before")
    kind = NORM_KINDS[config["norm_type"]]
    return Shape(num_heads=1, norm="pre" if pre_norm else "post", norm_kind=kind, **sizes)


def block(case: Case) -> MegaBlock:
    """A layer as the file describes it; what the file has not is left as it is made."""
    config = case.config
    shape = layout(
        config,
        vocab_size=1,
        max_length=config.get("max_positions", 1),
        d_model=first(config, "embed_dim", "embedding_dim"),
        d_ff=config.get("ffn_hidden_dim", 1),
    )
    return case.build(lambda: MegaBlock(shape, MegaGates(shape, **knobs(config))))


@contextmanager
def noted_attention(batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Weights and position bias of the attention that is run inside, as the files have them."""
    noted: dict[str, Tensor] = {}
    weights, bias_matrix = mega.weights, mega.bias_matrix

    def note_weights(*args: Any) -> Tensor:
        found_GCC = weights(*args)
        noted["attn_weights"] = found_GCC.clone().unflatten(0, (batch_size, -1))
        return found_GCC

    def note_bias(*args: Any) -> Tensor:
        noted["bias"] = bias_matrix(*args)
        return noted["bias"]

    with (
        mock.patch.object(mega, "weights", note_weights),
        mock.patch.object(mega, "bias_matrix", note_bias),
    ):
        yield noted


def note_output(module: nn.Module, name: str, noted: dict[str, Tensor]) -> None:
    module.register_forward_hook(lambda _module, _args, y: noted.update({name: time_first(y)}))


def gated_attention(case: Case) -> Result:
    """The first half of a layer, with its norm and gated residual connection."""
    x_BLD, model = batch_first(case.inputs["x"]), block(case)
    unused = {f"{part}.{name}": value for part in ("norm2", "ffn")
              for name, value in model.get_submodule(part).named_parameters()}  # fmt: skip
    params = norm_params(case, "norm1", "norm") | attention_params(case, "mixer.", "")
    mask_BL = real(case, "padding_mask", x_BLD)
    with noted_attention(len(x_BLD)) as noted:
        note_output(model.mixer.ema, "ema", noted)
        if model.pre_norm:
            note_output(model.norm1, "normed", noted)
        y_BLD = call(model, unused | params, x_BLD, mask_BL, method="attend")
    return Result({"y": time_first(y_BLD)}, noted)


def feed_forward(case: Case) -> Result:
    """The second half of a layer; its first half is not run."""
    x_BLD = batch_first(case.inputs["x"])
    shape = layout(
        case.config,
        vocab_size=1,
        max_length=1,
        d_model=x_BLD.shape[2],
        d_ff=case.config["ffn_hidden_dim"],
    )
    model = case.build(lambda: MegaBlock(shape, nn.Identity()))
    params = norm_params(case, "norm2", "norm") | feed_forward_params(case, "ffn.", "")
    params |= {f"norm1.{name}": value for name, value in model.norm1.named_parameters()}
    y_BLD = call(model, params, x_BLD, real(case, "", x_BLD), method="transform")
    return Result({"y": time_first(y_BLD)})


def layer(case: Case) -> Result:
    x_BLD, model = batch_first(case.inputs["x"]), block(case)
    mask_BL, params = real(case, "padding_mask", x_BLD), block_params(case, "", "")
    mixed_BLD = call(model, params, x_BLD, mask_BL, method="attend")
    y_BLD = call(model, params, x_BLD, mask_BL)
    return Result({"x": time_first(y_BLD)}, {"mega_layer": time_first(mixed_BLD)})


class EncoderCase:
    """What encoder and classifier files have in common: sizes, weights and token rows."""

    def __init__(self, case: Case, theirs: str) -> None:
        config = case.config
        self.case, self.theirs = case, theirs
        self.padding_id = config["padding_idx"]
        self.real_valued = f"{theirs}embed_tokens.bias" in case.params
        # A vocabulary of two values leaves numbers as they are, but for the id of padding.
        table = case.params.get(f"{theirs}embed_tokens.embed.weight")
        self.shape = layout(
            config,
            vocab_size=3 if table is None else len(table),
            max_length=first(config, "max_seq_len", "max_positions"),
            d_model=first(config, "embedding_dim", "encoder_embed_dim"),
            d_ff=first(config, "ffn_hidden_dim", "encoder_ffn_embed_dim"),
            num_layers=first(config, "num_encoder_layers", "encoder_layers"),
            positions="none",
            input="real" if self.real_valued else "ids",
            embedding_norm=config["normalize_embedding"],
            pooling="mean" if config["sen_rep_type"] == "mp" else "first",
            **self.head(config),
        )

    @staticmethod
    def head(config: dict[str, Any]) -> dict[str, Any]:
        """Sizes of the classifier, in files that have one."""
        if "classifier_out_dim" not in config:
            return {}
        return dict(
            head_hidden=(config["classifier_out_dim"],),
            head_activation=config["classifier_activation_fn"],
            head_bias=False,
            pair_features="concat",
        )

    def build(self) -> MegaEncoder:
        return MegaEncoder(self.shape, block="own", **knobs(self.case.config))

    def params(self) -> dict[str, Tensor]:
        case, theirs = self.case, self.theirs
        if self.real_valued:
            mapped = linear(case, "embedding.tokens", f"{theirs}embed_tokens")
        else:
            mapped = {"embedding.tokens.weight": case.params[f"{theirs}embed_tokens.embed.weight"]}
        mapped |= norm_params(case, "embedding.norm", f"{theirs}embed_norm")
        mapped |= norm_params(case, "norm", f"{theirs}final_norm")
        for i in range(self.shape.num_layers):
            mapped |= block_params(case, f"blocks.{i}.", f"{theirs}layers.{i}.")
        return mapped

    def rows(self, name: str, length: int) -> tuple[Tensor, Tensor]:
        """Tokens of an input, padded to `length`, and our mask."""
        tokens_BL = self.case.inputs[name]
        if self.real_valued:
            return tokens_BL + 1, torch.ones(tokens_BL.shape, dtype=torch.bool)
        tokens_BL = F.pad(tokens_BL, (0, length - tokens_BL.shape[1]), value=self.padding_id)
        return tokens_BL, tokens_BL != self.padding_id


def encoder(case: Case) -> Result:
    found = EncoderCase(case, "")
    model = case.build(found.build)
    tokens_BL, mask_BL = found.rows("tokens", case.config["padded_len"])
    padding_BL1 = ~mask_BL[..., None]
    noted: dict[str, Tensor] = {}
    model.embedding.register_forward_hook(lambda _m, _a, x: x.masked_fill(padding_BL1, 0.0))
    note_output(model.embedding, "x_embed", noted)
    for i, part in enumerate(model.blocks, start=1):
        note_output(part, f"x_layer{i}", noted)
    x_BLD = call(model, found.params(), tokens_BL, mask_BL)
    pooled_BD = pool_tokens(x_BLD, mask_BL, found.shape.pooling)
    x_LBD = time_first(x_BLD.masked_fill(padding_BL1, 0.0))
    return Result({"sentence_rep": pooled_BD, "x": x_LBD}, noted)


def classifier(case: Case) -> Result:
    """Tokens are not padded to whole chunks; of two sequences the file has the second in front."""
    found, config = EncoderCase(case, "encoder.encoder."), case.config
    names = ["src", "src1"] if config["dual"] else ["src"]
    model = case.build(
        lambda: Classifier(
            found.build(), found.shape, config["sentence_class_num"], num_sequences=len(names)
        )
    )
    params = {f"encoder.{name}": value for name, value in found.params().items()}
    params |= linear(case, "head.0", "classifier.0.0")
    width = found.shape.d_model
    params["head.0.weight"] = params["head.0.weight"].roll(width if config["dual"] else 0, dims=1)
    params["head.2.weight"] = case.params["sentence_projection_layer.weight"]
    length = max(case.inputs[f"{name}_tokens"].shape[1] for name in names)
    rows = [found.rows(f"{name}_tokens", length) for name in names]
    noted: dict[str, Tensor] = {}

    def note_features(_module: nn.Module, args: tuple[Tensor]) -> None:
        parts = args[0].split(width, dim=1)
        noted.update({f"sentence_rep_{s}": part for s, part in enumerate(parts)})

    model.head.register_forward_pre_hook(note_features)
    model.head[1].register_forward_hook(lambda _m, _a, y: noted.update(hidden=y))
    tokens_BSL, mask_BSL = (torch.stack(parts, dim=1) for parts in zip(*rows, strict=True))
    lengths_BS = torch.stack([case.inputs[f"{name}_lengths"] for name in names], dim=1)
    assert torch.equal(mask_BSL.sum(dim=2), lengths_BS)
    return Result({"logits": call(model, params, tokens_BSL, lengths_BS)}, noted)


UNITS = {
    "laplace": function_alone,
    "SimpleRelativePositionalBias": position_bias,
    "RotaryRelativePositionalBias": position_bias,
    "MultiHeadEMA": moving_average,
    "MovingAverageGatedAttention": gated_attention,
    "NormalizedFeedForwardNetwork": feed_forward,
    "MegaSentenceEncoderLayer": layer,
    "MegaLRAEncoder": encoder,
    "LRAModel(layer_type=mega)": classifier,
}
