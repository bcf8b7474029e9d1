"""Every command that README, CONTRIBUTING and the Makefile name is one that exists, as written.

Runs and measurements are not started: a run's words go through the same composition and checks that
come before its work, a script's options have to be in its help, a make target is expanded.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep

from lra.build import make_task
from lra.cli import GROUPS, compose_config, typed
from tests import programs

ROOT = Path(__file__).resolve().parent.parent
# CONTRIBUTING's own files are written out and run by test_extension.py.
NEWCOMERS = ("gated", "digitsum")


def commands() -> list[str]:
    """Lines of shell blocks, and commands inside sentences, without comments."""
    found: dict[str, None] = {}
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        quoted = re.findall(r"`([^`]+)`", prose.replace("\n", " "))
        for line in [line for block in blocks for line in block.splitlines()] + quoted:
            command = re.split(r"\s#\s", line)[0].strip()
            if re.match(r"(\S*python|make|bash|torchrun|pip) .", command):
                found[command] = None
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [*found, *(f"make {target}" for target in targets)]


def test_commands_are_found() -> None:
    found = commands()
    assert len(found) > 40
    assert {"make run", "make test", "python scripts/records.py validate"} <= set(found)


@pytest.mark.parametrize("command", commands())
def test_command(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "torchrun":
        words = [w for w in words if not w.startswith("--")]
    if program == "make":
        assert shutil.which("make")
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
    elif program == "bash":
        assert words[0] == "scripts/get_data.sh" and words[1] == "data"
        usage = (ROOT / words[0]).read_text()
        assert re.search(rf"\b{words[2]}\b", usage)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        asked = re.findall(r"\[(.*)\]", words[-1])
        assert asked and set(asked[0].split(",")) <= set(extras["optional-dependencies"])
    elif words[0] == "-m":
        assert words[1] == "pytest" and (ROOT / words[2]).exists()
    elif words[0] == "run.py":
        check_run(words[1:])
    else:
        check_script(words[0], words[1:])


def check_run(words: list[str]) -> None:
    overrides = [w for w in words if not w.startswith("-") and not w.startswith("hydra")]
    overrides = [w for w in overrides if w not in ("job",)]  # of --cfg
    if any(name in word for word in overrides for name in NEWCOMERS):
        overrides = [w for w in overrides if w.partition("=")[2] not in NEWCOMERS]
    choices = []
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.get_key_element()
        value, values = override.value(), None
        if isinstance(value, IntervalSweep):
            values = [str(value.start), str(value.end)]
        elif override.is_sweep_override():
            values = list(override.sweep_string_iterator())
        choices.append([f"{key}={v}" for v in values] if values else [override.input_line])
    assert "-m" in words or all(len(c) == 1 for c in choices)
    for chosen in product(*choices):
        # A task is made too, so that its own checks of its settings run.
        make_task(typed(compose_config([str(c) for c in chosen])))


def check_script(script: str, words: list[str]) -> None:
    text = usage(script)
    if not {"--help", "-h"} & set(words):
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in text
            key, is_setting, _ = word.partition("=")
            if is_setting and key in GROUPS and not re.search(rf"\b{key}=", text):
                typed(compose_config([word]))
            elif is_setting and not word.startswith("--"):
                assert re.search(rf"\b{key}\b", text) or "." in key or key in GROUPS, word


@functools.cache
def usage(script: str) -> str:
    done = programs.call(script, "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_runs_outside_the_harness_as_readme_shows() -> None:
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```\n")
    (block,) = [block for block in blocks if "make_encoder(" in block]
    found: dict[str, Any] = {}
    exec(block, found)
    assert found["x"].shape == (2, 1024, 64) and found["x"].isfinite().all()


def test_readme_is_read_in_ten_minutes() -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    words = [w for line in text.splitlines() if not line.startswith("|") for w in line.split()]
    assert len(words) < 2500  # at 250 a minute; tables and commands are looked at


def test_where_things_are_names_every_file() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2]
    named = set(re.findall(r"\b\w+\.py\b", tree))
    there = {p.name for wing in ("lra", "models") for p in (ROOT / wing).rglob("*.py")}
    assert there - named - {"gated.py", "digitsum.py"} == {"__init__.py"}
    assert named - there == {"run.py"}
