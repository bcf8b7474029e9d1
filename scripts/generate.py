"""Let a model that was pretrained with pretrain=next go on from a beginning, token by token.

python scripts/generate.py outputs/RUN_ID
python scripts/generate.py outputs/RUN_ID "prompt=This film is" num_tokens=500 temperature=0.8

    prompt=TEXT      what to go on from; default: the first half of a test example
    example=N        which one, from 0
    num_tokens=N     how many to add; default: 200, or as many as the example has left
    temperature=T    1: as the model has it; lower: more likely tokens; 0: always the likeliest
    top_k=K          draw among the K likeliest only; null: among all
    seed=N           the same seed draws the same tokens

Text goes to stdout, figures to stderr. Of pictures, which have no text, an example is continued.
Memory does not grow with the length, but for model=softmax.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402, F401  # first: it says what to do where packages are missing

# isort: split
import numpy as np  # noqa: E402

from lra.config import RunConfig  # noqa: E402
from lra.script import Parser, run_script  # noqa: E402
from lra.tasks.cache import prepare  # noqa: E402
from lra.tasks.task import Task  # noqa: E402
from lra.values import fill  # noqa: E402

NUM_TOKENS = 200
UNSETTLED = 3  # a letter takes up to 4 bytes, so this many tokens may change how the last ones look


@dataclass(frozen=True)
class Settings:
    """The script's own words."""

    prompt: str | None = None
    example: int = 0
    num_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("example", 0), ("num_tokens", 1), ("top_k", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: expected at least {least}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: expected at least 0")


def settings_from(words: Sequence[str]) -> Settings:
    """Settings as `key=value`, all but the prompt as JSON.

    Raises:
        ValueError: an unknown key, or a value of a wrong type or out of range.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, is_setting, text = word.partition("=")
        if not is_setting:
            raise ValueError(f"{word}: expected key=value, as 'prompt={word}'")
        try:
            values[name] = text if name == "prompt" else json.loads(text)
        except ValueError:
            values[name] = text
    return fill(Settings, values)


def beginning(task: Task, config: RunConfig, settings: Settings) -> tuple[list[int], int]:
    """Raw values to go on from, and how many to add.

    Raises:
        ValueError: the prompt is none of the task, there is no such example, or it gets too long.
    """
    if settings.prompt is not None:
        try:
            prompt = [int(value) for value in task.encode_prompt(settings.prompt)]
            if not prompt:
                raise ValueError("expected something to go on from")
        except ValueError as error:
            raise ValueError(
                f"prompt={settings.prompt}: task '{task.name}': {error}; without prompt= a test "
                "example is continued"
            ) from None
        wanted = min(NUM_TOKENS, task.max_length - len(prompt))
    else:
        test = prepare(task, config.paths.cache).test
        if settings.example >= len(test):
            raise ValueError(f"example={settings.example}: there are {len(test)}, from 0")
        whole = test.sequence(settings.example, 0).tolist()
        prompt = whole[: -(-len(whole) // 2)]
        wanted = len(whole) - len(prompt)
    num_tokens = settings.num_tokens or wanted
    if num_tokens < 1 or len(prompt) + num_tokens > task.max_length:
        raise ValueError(
            f"num_tokens={num_tokens} behind a prompt of {len(prompt)}: the model takes "
            f"task.max_length={task.max_length} tokens in all"
        )
    return prompt, num_tokens


def decoded(task: Task, values: Sequence[int]) -> str:
    """Values as people read them."""
    return task.decode(np.array(values, np.uint8 if task.num_values <= 256 else np.uint16))


def settled_text(task: Task, values: Sequence[int]) -> str:
    """The same, as far as no later value changes how it looks."""
    return os.path.commonprefix([decoded(task, values), decoded(task, values[:-UNSETTLED])])


def printable(text: str) -> str:
    """Without characters that would command a terminal: those as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("run", help="the folder of a run with pretrain=next, as outputs/RUN_ID")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="see above")
    arguments = parser.parse_intermixed_args()

    settings = settings_from(arguments.settings)
    import torch

    from lra.generation import bits_per_token, continuation, load_predictor

    torch.set_num_threads(1)  # a step is too small to be divided, which takes twice the time
    config, task, predictor = load_predictor(Path(arguments.run))
    prompt, num_tokens = beginning(task, config, settings)
    if len(prompt) > 1:
        bits = bits_per_token(predictor, prompt)
        print(f"prompt: {bits:.3f} bits a token, after its first", file=sys.stderr)
    values, shown = [*prompt], ""
    started = time.perf_counter()
    for value in continuation(
        predictor, prompt, num_tokens, temperature=settings.temperature, top_k=settings.top_k,
        seed=settings.seed,
    ):  # fmt: skip
        values.append(value)
        text = settled_text(task, values)
        print(printable(text[len(shown) :]), end="", flush=True)
        shown = text
    wall_time_s = time.perf_counter() - started
    print(printable(decoded(task, values)[len(shown) :]))
    print(
        f"{len(prompt):,} tokens read and {num_tokens:,} drawn in {wall_time_s:.1f} s: "
        f"{len(values) / wall_time_s:,.0f} tokens/s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    run_script(main)
