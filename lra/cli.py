"""The only module that knows Hydra: composed configs in, typed configs and clear messages out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lra.config import RunConfig, UnknownKey, fill, flatten, nearest, nearest_key
from lra.files import check_writable
from lra.script import EXIT_INTERRUPTED, fail, unread
from lra.sweep import Outcome, first_line, note_size, outcomes, summary
from lra.tasks.task import available_cores

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
GROUPS = ("task", "model", "recipe", "hardware", "logger", "experiment")
exit_codes: list[int] = []  # of the jobs that ended
sweep_dirs: list[Path] = []  # of the sweep that this process launched
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
            if complaint := unknown_hydra_key(job, override):
                raise ValueError(complaint)
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    config = fill(RunConfig, values)
    if config.hardware.num_threads is None and (threads := threads_per_job()):
        config = replace(config, hardware=replace(config.hardware, num_threads=threads))
    return config


def compose_config(overrides: list[str]) -> DictConfig:
    """Compose from `configs/`, inside a running Hydra program or outside one."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", overrides=overrides)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides=overrides)


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
    if "hydra/launcher" in str(error):
        extra = "parallel" if "joblib" in str(error) else "slurm"
        return f"{str(error).splitlines()[0]}; pip install 'lra-harness[{extra}]' brings it"
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
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
    close = nearest_key(key, known)
    if close is not None and close.rpartition(".")[0] != section:
        return f"{given}: unknown key; did you mean '{close}'?"
    inside = [k.removeprefix(f"{section}.") for k in known if k.startswith(f"{section}.")]
    top = sorted({k.split(".")[0] for k in known})
    return f"{given}: unknown key; {nearest(name, inside or top)}"


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
    sweep_dir: Path | None
    in_sweep_process: bool  # one job after the other, in the process that the user started


def job_settings() -> JobSettings:
    """The running job's place."""
    job = HydraConfig.get()
    if job.job.chdir:
        os.chdir(job.runtime.cwd)  # relative paths are taken from there, wherever Hydra went
    if job.mode != RunMode.MULTIRUN:
        return JobSettings(0, None, False)
    basic = str(job.launcher._target_).endswith("BasicLauncher")
    return JobSettings(int(job.job.num), Path(job.sweep.dir), basic)


def threads_per_job() -> int | None:
    """Threads for one of several jobs that run side by side; None if they do not."""
    launcher: Any = HydraConfig.get().launcher if HydraConfig.initialized() else {}
    if not str(launcher.get("_target_", "")).endswith("JoblibLauncher"):
        return None
    cores = available_cores()
    jobs = int(launcher.n_jobs)
    return max(1, cores // (jobs if jobs > 0 else cores))


class SweepSummary(Callback):
    """Hydra calls this around the jobs of a sweep, whatever launches them."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Check all jobs before the first starts; remember where they leave their outcomes."""
        sweep_sizes.append(check_jobs(list(config.hydra.overrides.task)))
        sweep_dirs.append(Path(config.hydra.sweep.dir))
        try:
            check_writable(sweep_dirs[-1], "paths.outputs")
        except OSError as error:
            fail(str(error))  # Hydra would only warn of an error in a callback
        note_size(sweep_dirs[-1], sweep_sizes[-1])

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print how each job ended and keep the worst exit code."""
        found = print_summary(Path(config.hydra.sweep.dir))
        exit_codes.extend(o.exit_code for o in found if o.status != "busy")


def print_summary(sweep_dir: Path) -> list[Outcome]:
    """Print how the jobs of a sweep ended so far, and return it."""
    found = outcomes(sweep_dir)
    print(summary(found, max(len(found), *sweep_sizes, 0)), flush=True)
    return found


def check_jobs(overrides: list[str]) -> int:
    """Say which jobs of a sweep will be refused, before the first has run; return their number."""
    from lra.build import make_model, make_task

    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        is_discrete = override.is_sweep_override() and override.is_discrete_sweep()
        values = override.sweep_string_iterator() if is_discrete else ()
        choices.append(
            [f"{override.get_key_element()}={value}" for value in values]
            or [str(override.input_line)]
        )
    jobs = [list(words) for words in itertools.product(*choices)]
    refused: dict[str, list[int]] = {}
    for number, words in enumerate(jobs, start=1):
        try:
            config = typed(compose_config(words))
            make_model(config, make_task(config))
        except HydraException as error:  # Hydra itself would end the sweep with it
            fail(explain(error, overrides))
        except (OmegaConfBaseException, ValueError) as error:
            refused.setdefault(explain(error, words), []).append(number)
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
    return len(jobs)


def run_program(main: Callable[[], Any]) -> None:
    """Run a Hydra program; report user errors as one message and leave with a code of its own."""
    # Let errors out of Hydra, which would print its own advice; they are worded here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    os.environ.setdefault("LRA_SWEEP_ID", str(os.getpid()))
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
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error, overrides))
    except (ValueError, OSError) as error:
        fail(explain(error, overrides))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if type(error).__module__.startswith("yaml."):
            fail(" ".join(str(error).split()))
        if "srun" in str(error):
            fail(f"hardware=slurm: {first_line(error)}; start it where Slurm's commands are")
        if not sweep_dirs:
            raise
        # Jobs catch their own errors, so this is a launcher's whose job was killed.
        for sweep_dir in sweep_dirs:
            print_summary(sweep_dir)
        print(
            f"error: a job ended without an outcome, killed from outside perhaps or for want of "
            f"memory ({type(error).__name__}: {first_line(error)}); the same command goes on with "
            "what is missing",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(max(exit_codes, default=0))


def _terminate(number: int, _frame: object) -> None:
    with contextlib.suppress(OSError):
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)
