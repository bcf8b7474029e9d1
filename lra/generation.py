"""A causal model that was pretrained to tell each token from those before it, as a language model.

Shapes: B batch, V raw values. Values are the task's raw ones; the model's ids are one more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lra.build import make_model, make_predictor, make_task
from lra.config import RunConfig
from lra.pretraining import WEIGHTS
from lra.tasks.task import Task
from lra.trained import check_run, naming_config, run_config
from lra.training.weights import selected_weights
from models.predictor import Predictor


def load_predictor(run: Path) -> tuple[RunConfig, Task, Predictor]:
    """What a run with `pretrain=next` has after its first phase, and its task.

    Raises:
        ValueError: no such run, not pretrained so or not yet, or the model cannot go by tokens.
    """
    check_run(run)
    config = run_config(run, str(run))
    if config.pretrain.objective != "next":
        raise ValueError(
            f"{run}: a run with pretrain={config.pretrain.objective}, expected pretrain=next: only "
            "such a model tells each token from those before it"
        )
    if not (run / WEIGHTS).exists():
        raise ValueError(f"{run}: no {WEIGHTS} in it; the run has not done its first phase")
    with naming_config(run):
        task = make_task(config)
        predictor = make_predictor(config, make_model(config, task))
    predictor.load_state_dict(selected_weights(run / WEIGHTS, predictor))
    predictor.eval().start(1)  # refuses what cannot
    return config, task, predictor


@torch.no_grad()
def continuation(
    predictor: Predictor,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Draw the values that follow a prompt, one by one.

    Args:
        prompt: one value at least; with `num_tokens` at most as many as the model has positions.
        temperature: divides the logits; 0 takes the likeliest value.
        top_k: draw among so many likeliest values only.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    values, state = [*prompt], predictor.start(batch_size=1)
    for place in range(len(prompt) + num_tokens - 1):
        logits_1V, state = predictor.step(torch.tensor([[values[place] + 1]]), state)
        if place + 1 == len(values):
            values.append(draw(logits_1V[0], temperature, top_k, generator))
            yield values[-1]


def draw(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> int:
    """One value, with the probabilities that the logits give."""
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.double() - logits_V.max()  # so that none overflows, however cold
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial((logits_V / temperature).softmax(dim=0), 1, generator=generator))


@torch.no_grad()
def bits_per_token(predictor: Predictor, values: Sequence[int]) -> float:
    """What the model needs for each value but the first, in the mean; two values at least."""
    tokens_11L = torch.tensor([[values]]) + 1
    places_11M = torch.arange(len(values) - 1)[None, None]
    logits_11MV = predictor(tokens_11L, torch.tensor([[len(values)]]), places_11M)
    return float(F.cross_entropy(logits_11MV[0, 0], torch.tensor(values[1:]))) / math.log(2)
