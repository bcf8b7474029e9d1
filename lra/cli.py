"""The only module that knows Hydra: composed configs in, typed configs and clear messages out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lra.config import RunConfig, UnknownKey, fill, flatten, nearest, nearest_key
from lra.files import check_writable
from lra.script import EXIT_INTERRUPTED, EXIT_USAGE, fail, unread
from lra.sweep import Outcome, first_line, note_jobs, outcomes, summary
from lra.tasks.workers import available_cores, available_memory

if TYPE_CHECKING:
    from lra.plan import Plan

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
GROUPS = ("task", "model", "recipe", "pretrain", "hardware", "logger", "experiment")
PLUGINS = {  # of Hydra, and the extra that has them
    "joblib": "parallel", "submitit_slurm": "slurm", "submitit_local": "slurm", "optuna": "tune",
}  # fmt: skip
# Bytes that each job is taken to need; 0.9 to 1.2 GiB are usual for a small model on ListOps.
MEMORY_OF_A_JOB = 3 * 2**29
exit_codes: list[int] = []  # of the jobs that ended
launches: list[Path] = []  # the folder of outcomes of the sweep that this process launched
sweep_sizes: list[int] = []  # its number of jobs
told: set[str] = set()  # why jobs of it will be refused, as said before the first


def typed(cfg: DictConfig) -> RunConfig:
    """A composed config as plain values, checked.

    Raises:
        ValueError: an unknown key, a wrong type or a value out of range; names the key.
    """
    if HydraConfig.initialized():
        job = HydraConfig.get()
        for override in job.overrides.hydra:
            # Hydra itself refuses those without a plus sign, and knows the classes of plugins.
            if override[0] == "+" and (complaint := unknown_hydra_key(job, override)):
                raise ValueError(complaint)
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    config = fill(RunConfig, values)
    if config.hardware.num_threads is None and HydraConfig.initialized():
        threads = threads_per_job(HydraConfig.get())
        config = replace(config, hardware=replace(config.hardware, num_threads=threads))
    return config


def compose_config(overrides: list[str]) -> DictConfig:
    """Compose from `configs/`, inside a running Hydra program or outside one."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", overrides=overrides)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides=overrides)


def all_models() -> list[str]:
    """Every model that is not another name of one, softmax first."""
    files = sorted((CONFIGS / "model").glob("*.yaml"))
    names = [path.stem for path in files if "_target_" in OmegaConf.load(path)]
    return sorted(names, key=lambda name: name != "softmax")


def explain(error: Exception, overrides: list[str]) -> str:
    """One message for what was refused: the key, what is allowed and the nearest known name."""
    several = next((o for o in overrides if re.match(r"(experiment|task|recipe)=\[", o)), None)
    if several:
        return f"{several}: a list, expected one choice; -m with commas runs one after the other"
    if isinstance(error, UnknownKey):
        is_known = error.key in known_keys(overrides)  # so its class lacks it, whatever the file
        return str(error) if is_known else unknown_key(error.key, error.given, overrides)
    if isinstance(error, OverrideParseException):
        return unreadable(error.override, overrides)
    if "INTERVAL_SWEEP" in str(error):
        given = next((o for o in overrides if "interval(" in o), "interval")
        return (
            f"{given}: only a sweeper that optimises can choose from an interval; add "
            "hydra/sweeper=optuna, or list values with commas"
        )
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        if choice in PLUGINS:
            extra = PLUGINS[choice]
            return f"{group}={choice}: `make setup` or pip install -e '.[{extra}]' brings it"
        return f"{group}={choice}: not a choice; {nearest(choice, error.options)}"
    if match := re.search(r"Ambiguous value for argument '(.*)'|weep overrides", str(error)):
        given = match[1] or next((o for o in overrides if "," in o), "")
        key, _, values = given.partition("=")
        if key not in known_keys(overrides):
            return unknown_key(key, given, overrides)
        return (
            f"{given}: expected one value; several make a sweep, with -m (--multirun): "
            f"python run.py -m {' '.join(overrides)}; a list is {key}=[{values}]"
        )
    match = re.search(r"Could not override '([^']+)'", str(error))
    if match:
        key = match[1].lstrip("+~")
        given = next((o for o in overrides if o.lstrip("+~").startswith(f"{key}=")), key)
        if key.startswith("hydra."):
            return unknown_hydra_key(OmegaConf.structured(HydraConf), given) or (
                f"{given}: unknown key"
            )
        return unknown_key(key, given, overrides)
    return str(error)


def known_keys(overrides: list[str]) -> list[str]:
    """Every key of the config that the choices among `overrides` give, and the groups."""
    choices = [o for o in overrides if re.fullmatch(rf"({'|'.join(GROUPS)})=\w+", o)]
    try:
        composed = compose_config(choices)
    except HydraException:  # a choice is wrong as well
        composed = compose_config([])
    return [k for k in flatten(_plain(composed)) if not k.endswith("._target_")] + list(GROUPS)


def unknown_key(key: str, given: str, overrides: list[str]) -> str:
    """What to say of a key that is not there, or not with every choice of a sweep."""
    known = known_keys(overrides)
    if key in known:
        return f"{given}: not a key of every choice in this sweep"
    section, _, name = key.rpartition(".")
    if others := choices_with(section, name):
        return f"{given}: not a key of this choice; {section}={' or '.join(others)} has it"
    close = nearest_key(key, known)
    if close is not None and close.rpartition(".")[0] != section:
        return f"{given}: unknown key; did you mean '{close}'?"
    inside = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
    if close is not None and inside:
        return f"{given}: unknown key; did you mean '{close}'? known: {', '.join(inside)}"
    top = sorted({k.split(".")[0] for k in known})
    return f"{given}: unknown key; {nearest(name, inside or top)}"


def choices_with(group: str, name: str) -> list[str]:
    """The choices of a group that have a key of this name in their file."""
    files = sorted((CONFIGS / group).glob("*.yaml")) if group in GROUPS else []
    found = {file.stem: _plain(OmegaConf.load(file)) for file in files}  # type: ignore[arg-type]
    # A file of the whole config has the group's keys in a section.
    return [stem for stem, keys in found.items() if name in keys.get(group, keys)]


def unreadable(override: str, overrides: list[str]) -> str:
    """What to say of a word that is no `key=value`."""
    key, is_setting, value = override.partition("=")
    known = known_keys(overrides)
    if not is_setting:
        name, colon, rest = key.partition(":")
        if colon and nearest_key(name, known, 2):
            return (
                f"{override}: expected key=value; did you mean '{name}={rest.strip() or 'VALUE'}'?"
            )
        if key in known:
            return f"{override}: no value; expected {key}=VALUE, without blanks around the ="
        groups = [g for g in GROUPS if (CONFIGS / g / f"{key}.yaml").is_file()]
        hint = f"; did you mean '{groups[0]}={key}'?" if groups else ""
        return f"{override}: expected key=value{hint}"
    if key != key.strip():
        return f"{override}: a blank before the =; expected {key.strip()}={value.strip()}"
    if value != value.strip("=, "):
        return f"{override}: cannot be read; did you mean '{key}={value.strip('=, ')}'?"
    name, colon, knobs = value.partition(":")
    if key == "model" and colon:
        words = [f"model={name}", *(f"model.{knob}" for knob in knobs.split(","))]
        return f"{override}: here each key is a word of its own; did you mean '{' '.join(words)}'?"
    quoted = value.replace("'", "\\'")
    return (
        f"{override}: cannot be read as it stands; a value with brackets or other signs "
        f"wants two pairs of quotes: \"{key}='{quoted}'\""
    )


def check_dashes(words: list[str]) -> None:
    """Refuse a key that was given as an option: `--model luna` for `model=luna`."""
    options = {
        i: m for i, w in enumerate(words) if (m := re.fullmatch(r"--?(\w[\w.-]+)(?:=(.*))?", w))
    }
    known = known_keys([]) if options else []
    for i, match in options.items():
        key = nearest_key(match[1].replace("-", "_"), known, 1)
        if key is not None:
            value = match[2] or next((w for w in words[i + 1 : i + 2] if w[:1] != "-"), "VALUE")
            fail(f"{words[i]}: a setting has no dashes; did you mean '{key}={value}'?")


def unknown_hydra_key(hydra_config: Any, override: str) -> str | None:
    """What is wrong with the key of `[+]hydra.a.b=value`, if a class that Hydra types lacks it.

    Hydra itself lets a key in that stands behind a plus sign, although nothing reads it.
    """
    node = hydra_config
    for name in override.lstrip("+~").partition("=")[0].split(".")[1:]:
        kind: Any = OmegaConf.get_type(node) if OmegaConf.is_config(node) else None
        if not dataclasses.is_dataclass(kind):
            return None  # of free form, such as the environment of a job
        known = [field.name for field in dataclasses.fields(kind)]
        if name not in known:
            return f"{override}: unknown key; {nearest(name, known)}"
        node = OmegaConf.select(node, name, throw_on_resolution_failure=False)
    return None


def _plain(cfg: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    return plain


@dataclass(frozen=True)
class JobSettings:
    """Where a job stands in its sweep; number 0 and no folder outside one."""

    number: int
    launch: Path | None  # the folder of outcomes of this start of the sweep
    in_sweep_process: bool  # one job after the other, in the process that the user started
    at_a_time: int | None  # jobs; None where that is a cluster's matter


def job_settings() -> JobSettings:
    """The running job's place."""
    job = HydraConfig.get()
    if job.job.chdir:
        os.chdir(job.runtime.cwd)  # relative paths are taken from there, wherever Hydra went
    if job.mode != RunMode.MULTIRUN:
        return JobSettings(0, None, False, 1)
    basic = str(job.launcher._target_).endswith("BasicLauncher")
    at_a_time = 1 if basic else jobs_at_a_time(job)
    return JobSettings(int(job.job.num), launch_folder(job), basic, at_a_time)


def launch_folder(hydra: Any) -> Path:
    """Where the jobs of this start of a sweep leave their outcomes; one sweep.dir may see many."""
    return Path(hydra.sweep.dir) / f"launch-{hydra.callbacks.summary.launch}"


def jobs_at_a_time(hydra: Any) -> int | None:
    """Jobs that Hydra's settings run side by side on this machine; None if they do not."""
    if not str(hydra.launcher.get("_target_", "")).endswith("JoblibLauncher"):
        return None
    count = int(hydra.launcher.n_jobs)
    return count if count > 0 else available_cores()


def threads_per_job(hydra: Any) -> int | None:
    """Threads for one of several jobs that run side by side; None if they do not."""
    count = jobs_at_a_time(hydra)
    return None if count is None else max(1, available_cores() // count)


def launcher_words(words: list[str]) -> list[str]:
    """What `sweep.parallel` of a command stands for: a launcher, and how many jobs at a time.

    Small models gain more from a core for each job than from all cores for one at a time, so
    `auto` is as many as there are jobs, cores, and memory for, on a CPU.
    """
    asked = next((w.partition("=")[2] for w in reversed(words) if w[:15] == "sweep.parallel="), "")
    if not {"-m", "--multirun"} & set(words) or asked in ("", "null"):
        return []
    overrides = [word for word in words if not word.startswith("-")]
    if other := next((o for o in overrides if re.match("hydra[/.]launcher|hardware=slurm", o)), ""):
        fail(f"sweep.parallel={asked}: {other} says already how jobs are started")
    if asked == "1":
        return []
    if asked == "auto":
        if other := next((o for o in overrides if re.match("hardware=.*gpu", o)), ""):
            fail(
                f"sweep.parallel=auto: counts cores, not what {other} needs; say how many at a time"
            )
        count = min(available_cores(), max(1, available_memory() // MEMORY_OF_A_JOB))
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            with contextlib.suppress(HydraException):  # said when the sweep itself reads it
                (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(overrides), None)
                count = max(1, min(count, len(jobs)))
    elif asked.isdecimal() and int(asked) > 0:
        count = int(asked)
    else:
        return []  # refused with the config
    return ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={count}"]


class SweepSummary(Callback):
    """Hydra calls this around the jobs of a sweep, whatever launches them."""

    def __init__(self, launch: str) -> None:
        self.launch = launch  # jobs find it in their config, see `launch_folder`

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check all jobs before the first starts; remember where they leave their outcomes."""
        hydra = config.hydra
        overrides = list(hydra.overrides.task)
        jobs, repeated = [], {}
        if is_basic(hydra):
            try:
                jobs = sweep_jobs(hydra)
            except HydraException as error:  # Hydra would only warn of an error in a callback
                fail(explain(error, overrides))
            repeated = check_jobs(jobs, overrides)
        else:
            check_search(hydra)
        launches.append(launch_folder(hydra))
        try:
            check_writable(launches[-1], "paths.outputs")
        except OSError as error:
            fail(str(error))
        sweep_sizes.append(len(jobs))
        count, threads = jobs_at_a_time(hydra), threads_per_job(hydra)
        if config.sweep.parallel not in (None, 1) and count is None:
            fail(
                f"sweep.parallel={config.sweep.parallel}: acts on the command line alone, as one "
                "value; give it there"
            )
        if count and threads and jobs:
            print(
                f"{len(jobs)} jobs, {count} at a time with {threads} thread{'s' * (threads > 1)} "
                "each, unless they say otherwise",
                flush=True,
            )
        note_jobs(launches[-1], len(jobs), repeated)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print how each job ended and keep the worst exit code."""
        end_sweep(launch_folder(config.hydra))
        found = Path(config.hydra.sweep.dir) / "optimization_results.yaml"
        if not is_basic(config.hydra) and found.exists():
            print(f"{found}\n{found.read_text().rstrip()}", flush=True)


def end_sweep(launch: Path) -> None:
    """Print how the jobs of a sweep ended and keep their exit codes."""
    found = print_summary(launch)
    exit_codes.extend(o.exit_code for o in found if o.status != "busy")


def print_summary(launch: Path) -> list[Outcome]:
    """Print how the jobs of a sweep ended so far, and return it."""
    found = outcomes(launch)
    print(summary(found, max(len(found), *sweep_sizes, 0)), flush=True)
    return found


def is_basic(hydra: Any) -> bool:
    """Whether Hydra's own sweeper makes the jobs: all there are, known before the first."""
    return str(hydra.sweeper._target_).endswith(".BasicSweeper")


def sweep_words(hydra: Any) -> list[Override]:
    """What the command line and `hydra.sweeper.params` give to a sweeper.

    Raises:
        HydraException: a word cannot be read.
    """
    params = hydra.sweeper.get("params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    # With the loader, which knows the choices of each group, `glob` can be read.
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return parser.parse_overrides([*words, *hydra.overrides.task])


def sweep_jobs(hydra: Any) -> list[list[str]]:
    """The words of every job, as Hydra's own sweeper will make them.

    Raises:
        HydraException: a word cannot be read, or only an optimising sweeper can choose from it.
    """
    state = random.getstate()
    overrides = sweep_words(hydra)
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    random.setstate(state)  # so that the sweeper will shuffle in the same way
    if not jobs:
        empty = next(o for o in overrides if o.is_sweep_override() and not [*o.sweep_iterator()])
        fail(f"{empty.input_line}: no value in it, so the sweep has no jobs")
    return jobs


def check_jobs(jobs: list[list[str]], overrides: list[str]) -> dict[int, tuple[int, str]]:
    """Say which jobs of a sweep will be refused, or are the same run, before the first has run.

    Returns:
        Jobs that would be the run of an earlier one: that one's number and the run's id, by number.
    """
    refused: dict[str, list[int]] = {}
    first: dict[Path, int] = {}  # by the run's folder
    repeated: dict[int, tuple[int, str]] = {}
    for number, words in enumerate(jobs):
        plan, message = check_job(words, overrides)
        if plan is None:
            refused.setdefault(message, []).append(number + 1)
        elif plan.config.checkpoint is None:
            earlier = first.setdefault(plan.run_dir, number)
            if earlier != number:
                repeated[number] = earlier, plan.run_id
    hopeless = sum(map(len, refused.values())) == len(jobs)
    for message, numbers in refused.items():
        told.add(message)
        if len(refused) == 1 and hopeless:
            fail(message if len(jobs) == 1 else f"all {len(jobs)} jobs: {message}")
        which = f"job {numbers[0]} ({' '.join(jobs[numbers[0] - 1])})"
        if len(numbers) > 1:
            which = f"{len(numbers)} of {len(jobs)} jobs ({', '.join(map(str, numbers))})"
        print(f"warning: {which} will be refused: {message}", file=sys.stderr)
    if hopeless:
        fail("no job of this sweep could run, see above")
    for earlier, name in dict.fromkeys(repeated.values()):
        numbers = [number for number, same in repeated.items() if same == (earlier, name)]
        ours, theirs = (
            " ".join(word for word in jobs[one] if word not in jobs[other])
            for one, other in ((numbers[0], earlier), (earlier, numbers[0]))
        )
        which = f"job {numbers[0] + 1} ({ours}) is"
        if len(numbers) > 1:
            which = f"{len(numbers)} jobs ({', '.join(str(n + 1) for n in numbers)}) are"
        tail = "; how it is computed is no part of a run, so both need paths.outputs of their own"
        print(
            f"note: {which} skipped: the same run as job {earlier + 1} ({theirs}), {name}"
            + (tail if "hardware" in ours else ""),
            file=sys.stderr,
        )
    return repeated


def check_job(words: list[str], overrides: list[str]) -> tuple[Plan | None, str]:
    """What a job will run, or why it will be refused."""
    from lra.build import make_model, make_predictor
    from lra.plan import Reference, make_plan

    try:
        plan = make_plan(typed(compose_config(words)), Reference(None, {}))
        model = make_model(plan.config, plan.task)
        if plan.config.pretrain.objective != "none":
            make_predictor(plan.config, model)
        return plan, ""
    except HydraException as error:  # Hydra itself would end the sweep with it
        fail(explain(error, overrides))
    except (OmegaConfBaseException, ValueError) as error:
        return None, explain(error, words)


def check_search(hydra: Any) -> None:
    """Check what can be known of the jobs that an optimising sweeper will choose."""
    direction = str(hydra.sweeper.get("direction", "maximize")).rpartition(".")[2]
    if direction != "maximize":
        fail(
            f"hydra.sweeper.direction={direction}: a job's worth is its best validation accuracy; "
            "expected maximize"
        )
    first: dict[str, str] = {}  # the words of a job, by key
    last: dict[str, str] = {}
    fixed: set[str] = set()
    try:
        overrides = sweep_words(hydra)
    except HydraException as error:  # such as params in a syntax of the sweeper's own
        print(f"note: no job was checked beforehand ({first_line(error)})", file=sys.stderr)
        return
    for override in overrides:
        key, value = override.get_key_element(), override.value()
        if isinstance(value, IntervalSweep):
            values = [str(value.start), str(value.end)]
        elif override.is_sweep_override():
            values = list(override.sweep_string_iterator()) or ["null"]
        else:
            values = [override.get_value_element_as_str()]
            fixed.add(f"{key}={values[0]}")
        first[key], last[key] = f"{key}={values[0]}", f"{key}={values[-1]}"
    print(
        "note: which jobs there will be is the sweeper's choice, so only the first and the last "
        "value of each range are checked beforehand; every job is checked before it trains",
        file=sys.stderr,
    )
    for words in (list(first.values()), list(last.values())):
        if message := check_job(words, list(hydra.overrides.task))[1]:
            chosen = " ".join(word for word in words if word not in fixed)
            print(f"warning: a job with {chosen} will be refused: {message}", file=sys.stderr)


def run_program(main: Callable[[], Any]) -> None:
    """Run a Hydra program; report user errors as one message and leave with a code of its own."""
    # Let errors out of Hydra, which would print its own advice; they are worded here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    os.environ.setdefault("LRA_SWEEP_ID", str(os.getpid()))
    # The jobs of launchers import lra anew, and so find this one even if another is installed.
    places = (str(CONFIGS.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    # Threads that wait by spinning slow each other many times over when a core is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _terminate)
    overrides = [a for a in sys.argv[1:] if not a.startswith("-")]
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        unread()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        for launch in launches:  # a sweeper that has no use for how its jobs ended
            if outcomes(launch):
                end_sweep(launch)
        print(f"error: {explain(error, overrides)}", file=sys.stderr)
        sys.exit(max([EXIT_USAGE, *exit_codes]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if type(error).__module__.startswith("yaml."):
            fail(" ".join(str(error).split()))
        if "srun" in str(error):
            fail(f"hardware=slurm: {first_line(error)}; start it where Slurm's commands are")
        if given := next((o for o in overrides if "hydra.sweeper.params" in o), None):
            fail(f"{given}: only in a config file; here give the values themselves: seed=0,1")
        if not launches:
            raise
        # Jobs catch their own errors, so this is a launcher's whose job was killed.
        for launch in launches:
            print_summary(launch)
        traced = re.findall(r"^\S*(?:Error|Exception): .*", str(error), re.MULTILINE)  # in the job
        why = traced[-1] if traced else f"{type(error).__name__}: {first_line(error)}"
        print(
            f"error: a job ended without an outcome, killed from outside perhaps or for want of "
            f"memory ({why}); the same command goes on with "
            "what is missing",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(max(exit_codes, default=0))


def _terminate(number: int, _frame: object) -> None:
    with contextlib.suppress(OSError):
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)
