"""What every key of the config means: its default, what it may be, what it does.

    python scripts/keys.py                             # groups, and all keys of the default choices
    python scripts/keys.py train shape.pooling lr      # sections, keys, last names
    python scripts/keys.py task=text model=fastformer  # keys and defaults of other choices

Meanings are the comments beside the keys: of a task or model in its file in configs/, of all others
in the typed classes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import itertools
import json
import re
import shutil
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402, F401  # first: it says what to do where packages are missing

# isort: split
from omegaconf import OmegaConf  # noqa: E402

from lra.build import model_name  # noqa: E402
from lra.cli import CONFIGS, GROUPS, choices_with, compose_config, run_program  # noqa: E402
from lra.config import RunConfig  # noqa: E402
from lra.script import Parser  # noqa: E402
from lra.values import describe_type, load_target, nearest_key  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the config, with its section, or a group."""

    name: str
    default: Any
    kind: str  # what it may be
    meaning: str


def all_keys(choices: list[str]) -> list[Key]:
    """The groups, then every key that the choices give, in the order of the config."""
    config: Any = OmegaConf.to_container(compose_config(choices), resolve=True)
    plain: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / "config.yaml"))
    chosen = {k: v for entry in plain["defaults"] if entry != "_self_" for k, v in entry.items()}
    chosen |= {key: value for key, _, value in (c.partition("=") for c in choices)}
    found = [group(name, chosen[name]) for name in GROUPS]
    files = {"task": chosen["task"], "model": model_name(config["model"])}  # not another name of it
    for section, value in config.items():
        if section in ("task", "model", "shape"):
            target = load_target(value.pop("_target_", "models.shape.Shape"), section)
            comments = file_comments(section, files[section]) if section in files else {}
            found += keys_of(target, f"{section}.", value, comments)
        elif section != "recipe":  # a group, whose name the config repeats
            found += keys_of(RunConfig, "", {section: value}, {})
    return found


def group(name: str, chosen: Any) -> Key:
    """A group; what its choices are stands at the top of their files."""
    meanings, stems = [], []
    for path in sorted((CONFIGS / name).glob("*.yaml")):
        stems.append(path.stem)
        lines = [
            x for x in path.read_text(encoding="utf-8").splitlines() if not x.startswith("# @")
        ]
        top = itertools.takewhile(lambda line: re.match("# (?!  )", line), lines)
        text = " ".join(line.lstrip("# ") for line in top)
        meanings.append(f"{path.stem}: {re.split(r'(?<=[.?]) ', text)[0].rstrip('.:')}")
    return Key(name, chosen, " | ".join(stems), "\n".join(meanings))


def keys_of(
    target: type, prefix: str, values: dict[str, Any], comments: dict[str, str]
) -> Iterator[Key]:
    """Keys of a class that a config fills, and of the classes inside it."""
    is_typed = dataclasses.is_dataclass(target)
    hints = typing.get_type_hints(target if is_typed else target.__init__)
    comments = (class_comments(target) if is_typed else {}) | comments
    for name, value in values.items():
        parts = (hints[name], *typing.get_args(hints[name]))
        inner = next((h for h in parts if dataclasses.is_dataclass(h)), None)
        if inner is not None and value is not None:
            yield from keys_of(inner, f"{prefix}{name}.", value, {})
        else:
            kind = describe_type(hints[name])
            meaning = comments.get(name, "").replace("None", "null")  # as a config has it
            yield Key(prefix + name, value, kind, meaning)


def class_comments(target: type) -> dict[str, str]:
    """The comment behind each field of a dataclass, those of its bases included."""
    found = {}
    for cls in filter(dataclasses.is_dataclass, reversed(target.__mro__)):
        source = textwrap.dedent(inspect.getsource(cls))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        lines = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and node.end_lineno in lines:
                found[ast.unparse(node.target)] = lines[node.end_lineno]
    return found


def file_comments(section: str, choice: str) -> dict[str, str]:
    """The comment behind each key of a task's or model's file.

    Keys that go on with a stem, as limit_val does after limit_train, share the first one's.
    """
    found: dict[str, str] = {}
    before = ""
    for line in (CONFIGS / section / f"{choice}.yaml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\s*(\w+):[^#]*(?:#\s*(.*))?$", line):
            name, comment = match[1], match[2]
            stem = name.rpartition("_")[0]
            if not comment and stem and before.startswith(f"{stem}_"):
                comment = found.get(before)
            if comment:
                found[name] = comment
            before = name
    return found


def select(keys: list[Key], words: list[str]) -> list[Key]:
    """The keys that the words name.

    Raises:
        ValueError: a word that names none.
    """
    found = []
    for word in words:
        hits = [
            k for k in keys if f".{k.name}".endswith(f".{word}") or k.name.startswith(f"{word}.")
        ]
        if not hits:
            close = nearest_key(word, [k.name for k in keys])
            hint = f"; did you mean '{close}'?" if close else ""
            section, _, name = word.rpartition(".")
            if others := choices_with(section, name):
                hint = f"; {section}={' or '.join(others)} has it: add that"
            raise ValueError(f"{word}: no key or section of these choices{hint}")
        found += [k for k in hits if k not in found]
    return found or keys


def show(keys: list[Key]) -> str:
    """Each key with its default, and below it what it may be and what it means."""
    width = max(60, min(100, shutil.get_terminal_size().columns))
    lines = []
    for key in keys:
        default = key.default if isinstance(key.default, str) else json.dumps(key.default)
        lines.append(f"{key.name}={default}")
        for text in [*key.meaning.splitlines(), f"({key.kind})"]:
            lines += textwrap.wrap(text, width, initial_indent=4 * " ", subsequent_indent=6 * " ")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="group=choice, or what to show")
    words = parser.parse_args().words
    choices = [w for w in words if "=" in w]
    run_program(
        lambda: print(show(select(all_keys(choices), [w for w in words if w not in choices])))
    )


if __name__ == "__main__":
    main()
