"""The run record: one JSON file per run, typed, versioned, written whole; tables need no more."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np

from lra.config import config_hash
from lra.files import write_atomically, write_new
from lra.results import stored
from lra.tasks.task import DataKind
from lra.values import fill

SCHEMA_VERSION = 1
# When the schema changes: raise SCHEMA_VERSION and add a function here, under the version before,
# that turns values of that version into those of the next and sets their `schema_version`. Files
# are never rewritten: old ones pass through all functions from theirs on, each time they are read.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

Status = Literal["completed", "at_chance", "diverged", "out_of_memory", "interrupted", "failed"]


class Newer(ValueError):
    """A record that a later version of this program wrote."""


@dataclass(frozen=True)
class SplitResult:
    """Accuracy is a fraction; `correct` is which examples were right, as packed bits in base64."""

    accuracy: float
    loss: float
    num_examples: int
    correct: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy <= 1:
            raise ValueError(f"accuracy={self.accuracy}: expected a fraction from 0 to 1")
        if self.num_examples < 1:
            raise ValueError(f"num_examples={self.num_examples}: expected at least 1")


@dataclass(frozen=True)
class RunResult:
    """Numbers of the selected step; `test` was read once, there."""

    step: int
    val: SplitResult
    test: SplitResult


class _Step(TypedDict):
    step: int


class Point(_Step, total=False):
    """An evaluation on the validation split; null is a number that was not finite."""

    train_loss: float | None  # mean since the evaluation before
    val_accuracy: float | None
    val_loss: float | None
    lr: float | None


@dataclass(frozen=True)
class Protocol:
    """What a number means."""

    data: DataKind
    budget: Literal["full", "reduced"]
    validation: str
    selection: str
    max_length: int
    difficulty: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """How well tokens of the validation inputs are told; `loss` in nats a token."""

    loss: float
    accuracy: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise ValueError(f"pretraining.val.loss={self.loss}: expected a finite number")
        if not 0 <= self.accuracy <= 1:
            raise ValueError(
                f"pretraining.val.accuracy={self.accuracy}: expected a fraction from 0 to 1"
            )


@dataclass(frozen=True)
class Pretraining:
    """The first phase of a run with self-pretraining; `val` is of the selected step."""

    objective: Literal["masked", "next"]
    mask_rate: float | None
    num_steps: int
    batch_size: int
    lr: float
    seed: int
    identity: str  # hash of everything that the weights depend on
    selection: str
    step: int
    val: Told
    curve: list[Point]
    speed: dict[str, float | None]
    peak_memory_bytes: int | None
    hardware: dict[str, Any]

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"pretraining.{name}={getattr(self, name)}: expected at least 1")
        if (self.objective == "next") != (self.mask_rate is None):
            raise ValueError(
                f"pretraining.mask_rate={self.mask_rate} with objective={self.objective}: "
                "expected a rate with masked, null with next"
            )
        if self.mask_rate is not None and not 0 < self.mask_rate < 1:
            raise ValueError(f"pretraining.mask_rate={self.mask_rate}: expected 0 < rate < 1")
        if not re.fullmatch("[0-9a-f]+", self.identity):
            raise ValueError(f"pretraining.identity={self.identity!r}: expected a hash")
        stretches_of(self.hardware, "pretraining.hardware")


@dataclass(frozen=True)
class Record:
    """One run, re-runnable from `config` and `overrides`."""

    schema_version: int
    run_id: str
    status: Status
    task: str
    model: str
    recipe: str
    seed: int
    config: dict[str, Any]
    config_hash: str
    overrides: list[str]
    protocol: Protocol
    data: dict[str, Any]
    num_params: int
    baseline_params: int | None
    apples_to_apples: bool
    why_not: list[str]
    result: RunResult | None
    curve: list[Point]
    speed: dict[str, float | None]
    peak_memory_bytes: int | None
    hardware: dict[str, Any]
    environment: dict[str, Any]
    started_at: str
    finished_at: str
    message: str = ""  # of a run that did not complete
    # Groups of parameters with a rate or a decay of their own, as `describe_groups` in
    # lra/training/optim.py has them; not in the file of a run whose parameters are all one group.
    groups: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # Positions to either side that each layer reads at most; not in the file of a run whose model
    # may read all.
    reach: list[int] = dataclasses.field(default_factory=list)
    # Of a run whose self-pretraining came to its end; not in the file of any other.
    pretraining: Pretraining | None = None
    # Which of the run's records it is; stands in the name of its file, not in the file.
    number: int = dataclasses.field(default=1, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version={self.schema_version}: this program reads version {SCHEMA_VERSION}"
            )
        if (self.result is None) == (self.status in ("completed", "at_chance")):
            raise ValueError(f"status={self.status!r} does not go with result={self.result}")
        for section in ("task", "model", "shape", "train", "pretrain"):
            if not isinstance(self.config.get(section, {}), dict):
                raise ValueError(
                    f"config.{section}={self.config[section]!r:.60}: expected an object"
                )
        asked = self.config.get("pretrain")
        if self.result and (asked is None) != (self.pretraining is None):
            there = "no such block" if self.pretraining is None else "such a block"
            raise ValueError(f"pretraining: {there} does not go with config.pretrain={asked}")
        if any(positions < 0 for positions in self.reach):
            raise ValueError(f"reach={self.reach}: expected positions of at least 0")
        stretches_of(self.hardware, "hardware")

    @property
    def name(self) -> str:
        """What its file is called: RUN_ID, or RUN_ID.2 and so on for later ones of the same run."""
        return numbered(self.run_id, self.number)

    @property
    def timed_out(self) -> bool:
        """Whether it was its own time limit that stopped it."""
        return self.status == "interrupted" and "train.time_limit=" in self.message

    @property
    def inputs(self) -> str:
        """How the model reads pixels: as `ids`, or as `real` numbers."""
        return str(self.config.get("shape", {}).get("input", "ids"))

    @property
    def knows_columns(self) -> bool:
        """Whether the model is told rows and columns of pixels, as the benchmark's rules forbid."""
        return self.config.get("shape", {}).get("positions") == "rotary_2d"

    @property
    def dirty(self) -> bool:
        """Whether any step was made from a source tree with uncommitted changes."""
        blocks = [self.environment, *stretches_of(self.hardware, "hardware")]
        if first := self.pretraining:
            blocks += [first.hardware, *stretches_of(first.hardware, "pretraining.hardware")]
        return any(block.get("git_dirty") for block in blocks)

    @property
    def device_text(self) -> str:
        """What the run's speed depends on: device, precision, and threads on a CPU."""
        got = self.hardware
        threads = got.get("num_threads") if got.get("device") == "cpu" else None
        several = "" if threads == 1 else "s"
        count = f", {threads} thread{several}" if threads else ""
        known = [s for s in got.get("stretches", ()) if "precision" in s]
        parts = [f"{s.get('name')}, {s.get('precision')}" for s in known or [got]]
        return " then ".join(dict.fromkeys(parts)) + count

    def to_json(self) -> str:
        """The file's text; numbers that are not finite become null."""
        values = dataclasses.asdict(self)
        del values["number"]
        for name in ("groups", "reach"):
            if not values[name]:
                del values[name]
        if self.pretraining is None:
            del values["pretraining"]
        return json.dumps(_finite(values), indent=1, allow_nan=False) + "\n"


def stretches_of(hardware: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Steps that were computed in several ways, as a `hardware` block has them; else none.

    Raises:
        ValueError: they are no such list; `where` names the block.
    """
    found = hardware.get("stretches", [])
    if not isinstance(found, list) or not all(isinstance(s, dict) for s in found):
        raise ValueError(f"{where}.stretches={found!r}: expected a list of objects")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def record_path(results_dir: Path, task: str, model: str, name: str) -> Path:
    """Where a run's record lies."""
    return results_dir / "runs" / task / model / f"{name}.json"


def numbered(run_id: str, number: int) -> str:
    """The name of a run's first, second, ... record."""
    return run_id if number == 1 else f"{run_id}.{number}"


def number_of(path: Path, run_id: str) -> int | None:
    """Which record of the run a file's name says it is; None if it is not called like one."""
    match = re.fullmatch(re.escape(run_id) + r"(?:\.([2-9]|[1-9]\d+))?\.json", path.name)
    return match and int(match[1] or 1)


def siblings(first: Path) -> list[Path]:
    """The records of a run that there are, by number; `first` is where RUN_ID.json has its place.

    They are of one setting and seed: trained here, on other machines, or once more.
    """
    numbers = {
        n: path for path in first.parent.glob("*.json") if (n := number_of(path, first.stem))
    }
    return [numbers[n] for n in sorted(numbers)]


def free_path(first: Path) -> Path:
    """The first of a run's places for records where none lies."""
    taken, number = set(siblings(first)), 1
    while (path := first.with_name(f"{numbered(first.stem, number)}.json")) in taken:
        number += 1
    return path


def save(record: Record, results_dir: Path) -> Path:
    """Write one record atomically; what has its name is replaced."""
    path = record_path(results_dir, record.task, record.model, record.name)
    write_atomically(path, record.to_json())
    return path


def save_beside(record: Record, results_dir: Path) -> Path:
    """Write one record to the first free place of its run; no other is touched."""
    first = record_path(results_dir, record.task, record.model, record.run_id)
    while True:
        path = free_path(first)
        with contextlib.suppress(FileExistsError):  # another process was faster
            write_new(path, record.to_json())
            return path


def load(path: Path) -> Record:
    """Read and check one record.

    Raises:
        ValueError: not JSON, an unknown or missing field, a wrong type, an accuracy that the test
            results contradict, or another schema version; names the file and the field. `Newer`, if
            the version is above this program's.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON record ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(values).__name__}")
    version = values.get("schema_version")
    while isinstance(version, int) and version in MIGRATIONS:
        values = MIGRATIONS[version](values)
        version = values["schema_version"]
    if version != SCHEMA_VERSION:
        is_newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise (Newer if is_newer else ValueError)(
            f"{path}: schema_version={version}, but this program reads version {SCHEMA_VERSION}"
        )
    try:
        record = fill(Record, values)
        check_correct(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    object.__setattr__(record, "number", number_of(path, record.run_id) or 1)
    return record


def started(path: Path) -> str | None:
    """`started_at` of a record of whatever schema; None if there is none that can be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return str(values["started_at"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, where a finite number or null was expected")


def load_all(results_dir: Path) -> tuple[list[Record], list[str]]:
    """All readable records in a fixed order, and a warning for each file that is not one."""
    return stored.read_all(sorted((results_dir / "runs").glob("*/*/*.json")), load)


def problems(record: Record, path: Path) -> list[str]:
    """What does not fit together in a readable record: place, hash, phases, times."""
    found = []
    if path.parts[-3:] != record_path(Path(), record.task, record.model, record.name).parts[1:]:
        found.append(f"holds task {record.task}, model {record.model}, run {record.run_id}")
    if config_hash(record.config) != record.config_hash:
        found.append(f"config_hash={record.config_hash[:12]}: not the hash of its config")
    if record.config.get("seed", record.seed) != record.seed:
        found.append(f"seed={record.seed}, but the config has {record.config['seed']}")
    for name in ("objective", "mask_rate", "num_steps", "batch_size", "lr"):
        asked = record.config.get("pretrain", {}).get(name)
        if record.pretraining and getattr(record.pretraining, name) != asked:
            done = getattr(record.pretraining, name)
            found.append(f"pretraining.{name}={done}, but the config has {asked}")
    if record.pretraining and record.pretraining.seed != record.seed:
        found.append(f"pretraining.seed={record.pretraining.seed}, but the run has {record.seed}")
    for name in ("started_at", "finished_at"):
        try:
            datetime.datetime.fromisoformat(getattr(record, name))
        except ValueError:
            found.append(f"{name}={getattr(record, name)!r}: not a time")
    return found


def check_correct(record: Record) -> None:
    """See that the test accuracy is that of the test examples, where the record has them.

    Raises:
        ValueError: it is not, or they cannot be read.
    """
    test = record.result.test if record.result else None
    if test and test.correct is not None:
        correct_N = unpack_correct(test.correct, test.num_examples)
        if abs(correct_N.mean() - test.accuracy) > 1e-9:
            raise ValueError(
                f"accuracy={test.accuracy}, but {correct_N.sum()} of {len(correct_N)} right"
            )


def pack_correct(correct_N: np.ndarray) -> str:
    """Booleans as base64 of packed bits, eight examples a byte."""
    return base64.b64encode(np.packbits(correct_N).tobytes()).decode()


def unpack_correct(text: str, num_examples: int) -> np.ndarray:
    """Undo `pack_correct`."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text, validate=True), np.uint8))
    if not 0 <= len(bits) - num_examples < 8:
        raise ValueError(f"correct: {len(bits)} bits do not hold {num_examples} examples")
    return bits[:num_examples].astype(bool)


def environment() -> dict[str, Any]:
    """Versions and the state of the source tree."""
    packages = {}
    for name in ("torch", "numpy", "hydra-core", "omegaconf", "tqdm", "filelock", "pillow"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    commit, dirty = git_state(Path(__file__).resolve().parent.parent.parent)
    return {
        "python": platform.python_version(),
        "torch": packages.get("torch"),
        "packages": packages,
        "git_commit": commit,
        "git_dirty": dirty,
    }


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout, and whether code or configs differ from it; None outside one."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()

    try:
        # Only what decides a number counts as a difference: new records in results/ do not.
        changed = git("status", "--porcelain", "--", "configs", "lra", "models", "run.py")
        return git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None, None
