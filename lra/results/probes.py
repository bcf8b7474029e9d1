"""What probes found in a trained run: how far it looks; one JSON file for each run.

`scripts/probe.py` writes results/probes/<run_id>.json; figures and the page show it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lra.files import write_atomically
from lra.results import stored


@dataclass(frozen=True)
class Agreement:
    """The run beside a rule of results/floors/, test example by test example."""

    name: str  # of the rule
    label: int | None  # the class whose examples these are; None: all
    num_examples: int
    agreement: float  # share of examples that both or neither get right
    only_run: int  # examples that the run alone gets right
    only_floor: int
    z: float  # of the sign test, positive where the run is better
    p: float  # two-sided


@dataclass(frozen=True)
class Window:
    """Accuracy where no more than `size` tokens of each sequence are shown."""

    size: int
    place: Literal["first", "last", "best", "mean"]  # best of the cuts; mean: logits over the cuts
    accuracy: float
    error: float  # standard error over examples


@dataclass(frozen=True)
class Shuffle:
    """Accuracy after blocks of `block` tokens changed places, or tokens within such blocks."""

    block: int
    kind: Literal["blocks", "within"]
    accuracy: float
    error: float


@dataclass(frozen=True)
class Influence:
    """Change when a token is replaced by another one; mean and standard error over replacements."""

    distance: int
    positions: float | None  # of encoder outputs that far from the token, over their own size
    positions_error: float | None
    logits: float | None  # of the logits, the token so far behind the first; over their spread
    logits_error: float | None
    untrained: float | None  # `positions` with fresh weights of the run's seed, without init_from


@dataclass(frozen=True)
class Attention:
    """Mean distance between a query and what it reads, weighted as it reads."""

    layer: int
    head: int
    distance: float
    error: float  # standard error over examples
    uniform: float  # the same, if all tokens were read evenly


@dataclass(frozen=True)
class Probes:
    """All of one run."""

    run_id: str
    task: str
    model: str
    fingerprint: str  # of the data, the run's own
    step: int  # whose weights were probed
    seed: int  # of cuts, shuffles and replacements
    reach: int | None  # positions that the whole encoder can join; None: all
    num_examples: int
    accuracy: float
    error: float
    seconds: float
    floors: list[Agreement]
    windows: list[Window]
    shuffles: list[Shuffle]
    influence: list[Influence]
    attention: list[Attention]

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"


def save(probes: Probes, results_dir: Path) -> Path:
    """Write the probes of a run, over earlier ones."""
    path = results_dir / "probes" / f"{probes.run_id}.json"
    write_atomically(path, probes.to_json())
    return path


def load(path: Path) -> Probes:
    """Read and check one file.

    Raises:
        ValueError: not JSON, an unknown or missing field, a wrong type, or of another run than its
            name says; names the file and the field.
    """
    probes = stored.read(path, Probes, "probes")
    if path.stem != probes.run_id:
        raise ValueError(f"{path}: holds run {probes.run_id}")
    return probes


def load_all(results_dir: Path) -> tuple[list[Probes], list[str]]:
    """All readable ones by run, and a warning for each file that is not one."""
    return stored.read_all(sorted((results_dir / "probes").glob("*.json")), load)
