"""Hydra's configs: composed ones in, typed ones and clear messages out; sweeps: see multirun.py."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lra import CONFIGS
from lra.config import RunConfig
from lra.console import first_line, print_line
from lra.script import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    exit_codes,
    fail,
    open_streams,
    terminate,
    unread,
)
from lra.sweep import end_sweep, launches, outcomes, print_summary
from lra.tasks.workers import available_cores
from lra.values import UnknownKey, fill, flatten, nearest, nearest_key

GROUPS = ("task", "model", "recipe", "pretrain", "hardware", "logger", "experiment")
NO_NAME = "Config group override must be a string"  # Hydra of model=null and the like
PLUGINS = {  # of Hydra, and the extra that has them
    "joblib": "parallel", "submitit_slurm": "slurm", "submitit_local": "slurm", "optuna": "tune",
}  # fmt: skip


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
    # One that is known is in a file, and its class lacks it.
    if isinstance(error, UnknownKey) and error.key not in known_keys(overrides):
        return unknown_key(error.key, error.given, overrides)
    if isinstance(error, OverrideParseException):
        return unreadable(error.override, overrides)
    if NO_NAME in str(error):
        for given in overrides:
            group, _, choice = given.lstrip("+").partition("=")
            choices = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
            if group in GROUPS and choice not in choices:
                return f"{given}: not a choice; {nearest(choice, choices)}"
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
        value = OverridesParser.create().parse_override(given).value()
        known = known_keys(overrides)
        inside = [f"{key}.{name}" for name in flatten(value)] if isinstance(value, dict) else []
        wrong = next((name for name in inside if name not in known), key)
        return unknown_key(wrong, given, overrides)
    if match := re.match(r"Error merging override ([^=]+)=", str(error)):
        key, given = match[1], str(error).removeprefix("Error merging override ")
        expected = f"a list: {key}=[..]" if key in known_keys(overrides) else "keys with values"
        return f"{given}: expected {expected}"
    return str(error) + set_by(str(error), overrides)


def set_by(message: str, overrides: list[str]) -> str:
    """Says that the experiment, not the command, has set the key that a message begins with."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides)
    key, name = message.partition("=")[0], given.get("experiment", "")
    file = CONFIGS / "experiment" / f"{name}.yaml"
    keys: Any = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else {}
    if key in given or key not in flatten(keys):
        return ""
    needs = ": CONTRIBUTING.md says what a task needs for that" if key[:5] == "task." else ""
    return f" (experiment={name} sets it{needs})"


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
    if f",{key}=" in value:
        values = value.replace(f",{key}=", ",")
        return f"{override}: a key stands once, before its values; did you mean '{key}={values}'?"
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


def settings_first(words: list[str]) -> list[str]:
    """The words of a command, options last: Hydra refuses settings on both sides of an option."""
    settings = get_args_parser().parse_intermixed_args(words).overrides
    return [*settings, *(word for word in words if word not in settings)]


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


def run_program(main: Callable[[], Any]) -> None:
    """Run a Hydra program; report user errors as one message and leave with a code of its own."""
    open_streams()
    # Hydra prints --info by logging, which would answer each line that nobody reads with a trace.
    logging.raiseExceptions = False
    # Let errors out of Hydra, which would print its own advice; they are worded here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    os.environ.setdefault("LRA_SWEEP_ID", str(os.getpid()))
    # The jobs of launchers import lra anew, and so find this one even if another is installed.
    places = (str(CONFIGS.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    # Threads that wait by spinning slow each other many times over when a core is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # the last two are warnings
        signal.signal(number, terminate)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, terminate)
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
        print_line(f"error: {explain(error, overrides)}", sys.stderr)
        sys.exit(max([EXIT_USAGE, *exit_codes]))
    except KeyboardInterrupt:
        print_line("interrupted", sys.stderr)
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
        print_line(
            f"error: a job ended without an outcome, killed from outside perhaps or for want of "
            f"memory ({why}); the same command goes on with "
            "what is missing",
            sys.stderr,
        )
        sys.exit(1)
    sys.exit(max(exit_codes, default=0))
