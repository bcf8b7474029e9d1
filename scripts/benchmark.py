"""Speed and memory by sequence length, beside the softmax model measured in the same call.

    python scripts/benchmark.py
    python scripts/benchmark.py models=softmax,luna:projection_length=128 lengths=1024,4096
    python scripts/benchmark.py recipe=luna mode=train batch_size=8 hardware.num_threads=2 name=mine
    python scripts/benchmark.py --peer                # public code too, needs 'bench'
    python scripts/benchmark.py --peer models=softmax,performer
    python scripts/benchmark.py --breakdown models=softmax,luna lengths=2048
    python scripts/benchmark.py --check               # fails where a ratio is below its floor

Every round measures every cell (model, length, mode) once, each in a process of its own; ratios are
taken inside a round, and the tables show their median and spread. What a CPU does by itself stands
beside them, see lra/speed/limits.py. Writes `<paths.results>/benchmarks/<name>.json`;
scripts/make_tables.py puts it beside published figures.
Rows have random ids, full length and no padding. --peer adds other implementations of the models
named, of all if none is (lra/speed/peers.py lists them), with the options of our model's config,
and prints the speed of ours as a multiple of theirs. Words, besides the keys of the config:

    models=NAME,..      default: all; NAME:key=value sets a model's option; peers can be named too
    lengths=N,..        tokens (default: 1024,2048,3072,4096; for --breakdown 2048)
    mode=train,inference
    batch_size=N        default: 32, as in the Long Range Arena
    repeats=N           rounds (default: 3)
    time_s=SECONDS      for which a cell is timed in each round (default: 2)
    max_step_s=SECONDS  a step that takes longer is `too slow` and not repeated (default: 30)
    max_memory_gb=N     on a CPU, a cell that needs more is `out of memory` (default: no limit)
    peers=true          as --peer
    name=NAME           of the record, which replaces one of that name (default: device-recipe)
    paths.results=DIR   a key of the config: where the record goes (default: results)
"""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402, F401  # first: it says what to do where packages are missing

# isort: split
from hydra.errors import HydraException  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402

from lra.cli import (  # noqa: E402
    CONFIGS,
    GROUPS,
    all_models,
    compose_config,
    explain,
    run_program,
)
from lra.config import RunConfig  # noqa: E402
from lra.console import first_line, has_bars  # noqa: E402
from lra.results.efficiency import benchmark_tables  # noqa: E402
from lra.results.markdown import Table  # noqa: E402
from lra.runs import now  # noqa: E402
from lra.script import Parser, exit_codes  # noqa: E402
from lra.speed.benchmarks import (  # noqa: E402
    BASELINE,
    SCHEMA_VERSION,
    Benchmark,
    Key,
    Limits,
    Measurement,
    ratio_text,
    ratios_to,
    save,
    summarise,
)
from lra.speed.cells import CellFailed, in_own_process  # noqa: E402
from lra.tasks.workers import available_cores  # noqa: E402
from lra.values import fill, nearest  # noqa: E402

LENGTHS = (1024, 2048, 3072, 4096)


@dataclass(frozen=True)
class Floor:
    """The least speed of `model`, as a multiple of that of `against`, in training."""

    model: str
    against: str
    least: float


# Some 70 % of what two cores gave: machines are noisy, and what a mistake costs is mostly more.
FLOORS = (
    Floor("softmax", "textbook", 1.2),
    Floor("nystromformer", "textbook_nystromformer", 0.9),
    Floor("luna", "no_mixer", 0.42),
    Floor("fastformer", "no_mixer", 0.47),
    Floor("s4d", "no_mixer", 0.35),
    Floor("lru", "no_mixer", 0.36),
    Floor("s5", "no_mixer", 0.33),
    Floor("mega", "no_mixer", 0.2),
    Floor("linear", "no_mixer", 0.31),
    Floor("local", "no_mixer", 0.25),
    Floor("longformer", "no_mixer", 0.2),
    Floor("bigbird", "no_mixer", 0.17),
    Floor("sparse", "no_mixer", 0.16),
    Floor("sinkhorn", "no_mixer", 0.18),
    Floor("synthesizer", "no_mixer", 0.17),
    Floor("linformer", "no_mixer", 0.16),
    Floor("reformer", "no_mixer", 0.16),
    Floor("performer", "no_mixer", 0.15),
    Floor("s4d", "textbook_s4d", 1.1),
    Floor("lru", "textbook_scan", 1.1),
    Floor("mega", "textbook_mega", 0.9),
)
CHECK_LENGTH, CHECK_BATCH, CHECK_ROUNDS = 1024, 8, 7


@dataclass(frozen=True)
class Settings:
    """The script's own words."""

    models: tuple[str, ...] = ()  # none: all
    lengths: tuple[int, ...] = ()  # none: LENGTHS
    mode: tuple[Literal["train", "inference"], ...] = ("train", "inference")
    batch_size: int = 32
    repeats: int = 3
    time_s: float = 2.0
    max_step_s: float = 30.0
    max_memory_gb: float | None = None
    peers: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for length in self.lengths:
            if length < 1:
                raise ValueError(f"lengths={length}: expected at least 1")
        for name in ("batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("time_s", "max_step_s", "max_memory_gb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: expected a number above 0")
        if self.name != Path(self.name).name:
            raise ValueError(f"name={self.name}: expected a file's name without a folder")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="key=value", help="see above")
    parser.add_argument("--peer", action="store_true", help="public code too")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--breakdown", action="store_true", help="parts of a training step")
    kind.add_argument("--check", action="store_true", help="compare ratios with their floors")
    arguments = parser.parse_intermixed_args()
    own, overrides = split_words(arguments.words + ["peers=true"] * arguments.peer)
    if arguments.check:
        if given := own.keys() - {"batch_size", "repeats"}:
            raise ValueError(f"--check has its own {', '.join(sorted(given))}")
        own = {"batch_size": CHECK_BATCH, "repeats": CHECK_ROUNDS} | own
    settings = fill(Settings, own)
    warn_if_busy()
    try:
        if arguments.check:
            return check_floors(settings, overrides)
        if arguments.breakdown:
            show_breakdown(settings, overrides)
        else:
            benchmark(settings, overrides, arguments.words + ["--peer"] * arguments.peer)
    except CellFailed as error:
        print(f"{error}\nerror: a measurement failed, see above", file=sys.stderr)
        return 1
    return 0


def split_words(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The script's own settings, and overrides of the config.

    Raises:
        ValueError: a word that is neither, or a key of the config that has a word of its own here.
    """
    known = {f.name: f for f in fields(Settings)}
    elsewhere = {
        "model": "models=NAME,..", "task.max_length": "lengths=N,..",
        "train.batch_size": "batch_size=N",
    }  # fmt: skip
    own: dict[str, Any] = {}
    overrides = []
    for word in words:
        name, _, text = word.partition("=")
        if name in elsewhere:
            raise ValueError(f"{word}: here it is {elsewhere[name]}")
        if name.startswith("model."):
            raise ValueError(f"{word}: here it is models=NAME:{word.removeprefix('model.')}")
        if name in known:
            is_list = str(known[name].type).startswith("tuple")
            own[name] = plain(f"[{text}]" if is_list else text, word)
            own[name] = list(dict.fromkeys(own[name])) if is_list else own[name]
        elif "." in name or name.lstrip("+~") in (*GROUPS, "seed"):
            overrides.append(word)
        else:
            raise ValueError(f"{word}: unknown; {nearest(name, [*known, *GROUPS, 'seed'])}")
    if "name" in own:
        own["name"] = str(own["name"])
    return own, overrides


def plain(text: str, word: str) -> Any:
    """A value as the config's files would have it."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except Exception as error:  # of the YAML library, whichever that is
        raise ValueError(f"{word}: {first_line(error)}") from None
    return values["value"]


def chosen(settings: Settings) -> list[str]:
    """The models to measure, as they were named, and their peers."""
    from lra.speed.peers import PEERS

    models = list(settings.models or all_models())
    names = {base_name(model) for model in models}
    peers = [name for name, peer in PEERS.items() if peer.model in names and name not in names]
    return models + peers * settings.peers


def base_name(model: str) -> str:
    """Of `luna:tie_kv=true` the model."""
    return model.partition(":")[0]


def composed(models: Sequence[str], overrides: list[str], settings: Settings) -> dict[str, Any]:
    """The config of each model as plain values, checked as far as that goes without measuring.

    Raises:
        ValueError: an unknown model, key or value, or a package that is not installed.
    """
    import torch

    from lra.build import make_model, make_task, resolved
    from lra.speed.peers import PEERS, TARGETS, shared_options

    task = [] if any(o.startswith("task=") for o in overrides) else ["task=text"]
    configs = {}
    for text in models:
        name, *knobs = text.split(":")
        is_other = name in TARGETS
        if not is_other and not (CONFIGS / "model" / f"{name}.yaml").exists():
            raise ValueError(f"models={text}: {nearest(name, [*all_models(), *TARGETS])}")
        choice = [f"model={PEERS[name].model if name in PEERS else BASELINE if is_other else name}"]
        choice += [] if is_other else [f"model.{knob}" for knob in knobs]
        every = [*task, *choice, f"train.batch_size={settings.batch_size}", *overrides]
        try:
            values: Any = OmegaConf.to_container(compose_config(every), resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(explain(error, every)) from None
        if is_other:
            options = shared_options(name, values["model"])
            options |= dict(OmegaConf.to_container(OmegaConf.from_dotlist(knobs)) or {})
            values["model"] = {"_target_": TARGETS[name]} | options
        config = fill(RunConfig, values)
        if config.hardware.num_devices > 1:
            raise ValueError(f"hardware.num_devices={config.hardware.num_devices}: expected 1")
        resolved(config)
        for length in settings.lengths or LENGTHS[:1]:
            config = fill(RunConfig, at_length(values, length))
            with torch.device("meta"):
                make_model(config, make_task(config))
        configs[text] = values
    return configs


def at_length(values: dict[str, Any], length: int) -> dict[str, Any]:
    """The config with another length."""
    return values | {"task": values["task"] | {"max_length": length}}


class Rounds:
    """Measures all cells of a benchmark again and again; keeps what it has when one fails."""

    def __init__(self, configs: dict[str, Any], settings: Settings) -> None:
        self.configs, self.settings = configs, settings
        self.measured: list[dict[Key, Measurement]] = []
        self.hardware: dict[str, Any] = {}

    def run(self) -> None:
        """All rounds. A cell that was too slow or out of memory is not repeated.

        Models stand innermost, so that what is compared runs side by side, and every other round
        takes them in reverse, so that none always comes after the same neighbour.
        """
        from tqdm import tqdm

        lengths, width = self.settings.lengths or LENGTHS, max(map(len, self.configs))
        total = self.settings.repeats * len(lengths) * len(self.settings.mode) * len(self.configs)
        with tqdm(total=total, unit="cell", disable=not has_bars()) as bar:
            for number in range(self.settings.repeats):
                self.measured.append({})
                models = list(self.configs)[:: -1 if number % 2 else 1]
                for key in (Key(m, n, mode) for n in lengths for mode in self.settings.mode
                            for m in models):  # fmt: skip
                    if any(done[key].status != "ok" for done in self.measured if key in done):
                        bar.update()
                        continue
                    found = self.measure(key)
                    self.measured[-1][key] = found
                    bar.update()
                    line = f"round {number + 1}  {key.model:<{width}}  {describe(key, found)}"
                    tqdm.write(line, file=sys.stdout)
                    sys.stdout.flush()

    def measure(self, key: Key) -> Measurement:
        """One cell once."""
        answer = in_own_process({
            "config": at_length(self.configs[key.model], key.length), "mode": key.mode,
            "time_s": self.settings.time_s, "max_step_s": self.settings.max_step_s,
            "max_memory_gb": self.settings.max_memory_gb,
        })  # fmt: skip
        self.hardware = answer.get("hardware", self.hardware)
        return Measurement(**answer["measured"])


def describe(key: Key, found: Measurement) -> str:
    """One cell in words."""
    what = f"{key.mode:<9}  {key.length:>6,} tokens  "
    if found.status != "ok":
        return what + found.status.replace("_", " ")
    memory = found.peak_memory_bytes
    return what + f"{found.steps_per_s:8.3f} steps/s" + (
        f"  {memory / 2**20:8,.0f} MB" if memory is not None else ""
    )  # fmt: skip


def benchmark(settings: Settings, overrides: list[str], words: list[str]) -> None:
    """Measure, write the record, print its tables."""
    models = chosen(settings)
    configs = composed(models, overrides, settings)
    if BASELINE not in models:
        print(f"warning: {BASELINE} is not among the models, so there are no ratios to it")
    started_at, load_average = now(), round(os.getloadavg()[0], 2)
    limits = machine_limits(next(iter(configs.values())), settings)
    rounds = Rounds(configs, settings)
    try:
        rounds.run()
    finally:  # what was measured before a failure or a signal is kept
        if any(rounds.measured):
            config = fill(RunConfig, next(iter(configs.values())))
            found = as_record(rounds, config, settings)
            told = [word for word in words if not word.startswith("paths.")]
            found = replace(
                found, overrides=told, load_average=load_average, started_at=started_at, **limits
            )
            path = save(found, config.paths.results)
            for title, table in benchmark_tables(found):
                print(f"\n{title}\n\n{table.markdown()}", end="")
            for title, table in peer_tables(rounds):
                print(f"\n{title}\n\n{table.markdown()}", end="")
            print(f"\nrecord   {path}")


def machine_limits(values: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What the CPU does by itself, as fields of the record; no limits where a GPU computes."""
    answer = in_own_process({"config": values, "limits": True, "time_s": settings.time_s / 10})
    found = [Limits(**rates) for rates in answer.get("limits", [])]  # nothing if it was killed
    return {"limits": found, "l2_bytes": answer.get("l2_bytes")}


def as_record(rounds: Rounds, config: RunConfig, settings: Settings) -> Benchmark:
    """Everything measured so far."""
    from lra.build import make_task
    from lra.results.records import environment
    from lra.speed.peers import PEERS

    task, precision = make_task(config), config.hardware.precision
    device = rounds.hardware.get("device", config.hardware.device)
    parts = [device, config.recipe, *[task.name] * (task.name != "text")]
    parts += [precision] * (precision != "float32")
    facts = environment()
    used = [PEERS[m].package for m in map(base_name, rounds.configs) if m in PEERS]
    facts["packages"] |= {name: importlib.metadata.version(name) for name in used if name}
    return Benchmark(
        schema_version=SCHEMA_VERSION,
        device="cuda" if device == "cuda" else "cpu",
        hardware=rounds.hardware.get("name", "unknown device"),
        precision=precision,
        threads=rounds.hardware.get("num_threads"),
        batch_size=settings.batch_size,
        cells=summarise(rounds.measured, task.num_sequences, settings.batch_size),
        environment=facts,
        name=settings.name or "-".join(parts),
        task=task.name,
        recipe=config.recipe,
        repeats=settings.repeats,
        max_step_s=settings.max_step_s,
        finished_at=now(),
    )


def peer_tables(rounds: Rounds) -> list[tuple[str, Table]]:
    """Speed of each model over that of its peers by length, where both were measured."""
    from lra.speed.peers import PEERS

    named = [(m, PEERS[base_name(m)].model) for m in rounds.configs if base_name(m) in PEERS]
    pairs = [(ours, peer) for ours in rounds.configs for peer, model in named
             if base_name(ours) == model]  # fmt: skip
    lengths = rounds.settings.lengths or LENGTHS
    tables = []
    for mode in rounds.settings.mode if pairs else ():
        lines = []
        for ours, peer in pairs:
            found = [ratios_to(peer, Key(ours, n, mode), rounds.measured) for n in lengths]
            lines.append([ours, peer, *(ratio_text(r) if r else "-" for r in found)])
        title = f"{mode}, speed of ours as a multiple of its peer's"
        faults = {peer: PEERS[base_name(peer)].fault for _, peer in pairs}
        title += "".join(f"; {peer} {fault}" for peer, fault in faults.items() if fault)
        tables.append((title, Table(["Model", "Peer", *map(str, lengths)], lines)))
    return tables


def show_breakdown(settings: Settings, overrides: list[str]) -> None:
    """Print each model's parts of a training step at each length, and its roofline."""
    from lra.speed.breakdown import Roofline, breakdown_rows

    models = chosen(settings)
    configs = composed(models, overrides, settings)
    hardware = next(iter(configs.values()))["hardware"]
    for key in ("compile", "activation_checkpointing"):
        if hardware[key]:
            raise ValueError(f"hardware.{key}=true: --breakdown times modules that run once each")
    for length in settings.lengths or (2048,):
        rounds: dict[str, list[dict[str, Any]]] = {model: [] for model in models}
        for number in range(settings.repeats):
            for model in models[:: -1 if number % 2 else 1]:
                answer = in_own_process({
                    "config": at_length(configs[model], length), "breakdown": True,
                    "time_s": settings.time_s,
                })  # fmt: skip
                if "parts" not in answer:
                    raise CellFailed(f"{model}, {length:,} tokens: out of memory")
                rounds[model].append(answer)
                print(f"round {number + 1}  {model}", flush=True)
        print(f"\ntraining step, {length:,} tokens, batch {settings.batch_size}: percent of the "
              f"step, median over {settings.repeats} rounds (smallest to largest)\n")  # fmt: skip
        print(Table(["Part", *models], breakdown_rows(rounds)).markdown())
        for model, found in rounds.items():
            print(f"{model}: {Roofline.of(found)}")


def check_floors(settings: Settings, overrides: list[str]) -> int:
    """Compare ratios of training speed with FLOORS; 1 if one is below."""
    models = list(dict.fromkeys(m for f in FLOORS for m in (f.against, f.model)))
    configs = composed(models, overrides, replace(settings, lengths=(CHECK_LENGTH,)))
    times = in_own_process({
        "configs": {m: at_length(values, CHECK_LENGTH) for m, values in configs.items()},
        "num_rounds": settings.repeats,
    })["times"]  # fmt: skip
    failed = 0
    for floor in FLOORS:
        pairs = zip(times[floor.against], times[floor.model], strict=True)
        ratios = [theirs / ours for theirs, ours in pairs]
        is_below = statistics.median(ratios) < floor.least
        failed += is_below
        print(
            f"{'TOO SLOW' if is_below else 'ok':<8}  {floor.model} trains at {ratio_text(ratios)} "
            f"times the speed of {floor.against}, floor {floor.least}"
        )
    return int(failed > 0)


def warn_if_busy() -> None:
    """Other work makes all times worse, and ratios less certain."""
    with suppress(OSError):
        load = os.getloadavg()[0]
        if load > 0.5:
            print(f"warning: the load average is {load:.1f} on {available_cores()} cores: other "
                  "work is running, so trust ratios with a small spread only")  # fmt: skip


if __name__ == "__main__":
    run_program(lambda: exit_codes.append(main()))
