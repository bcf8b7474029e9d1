"""Plain values in, checked objects out, every complaint naming the key.

`fill` calls a class with values from a config, after checking names and types against the class's
own signature. The signature is the schema; there is no second list of keys to keep in step.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
SET_IT = "; set it in a config or on the command line"  # of a key that is missing
MISSING = "???"  # how a config says that a value has yet to be given
# What other programs call the same; both kinds of names, of keys and of choices.
SYNONYMS = {
    "cuda": "gpu", "gpus": "num_devices", "epochs": "num_steps", "hidden_size": "d_model",
    "batchsize": "batch_size", "dataset": "task", "imdb": "text", "aan": "retrieval",
    "cifar": "image", "cifar10": "image", "fp32": "float32", "float16": "fp16", "bfloat16": "bf16",
}  # fmt: skip
_NOTHING = (5, 0.0)  # no likeness
_KEYWORD, _LEFT_OUT = inspect.Parameter.KEYWORD_ONLY, object()  # of keys that a mapping may lack


class UnknownKey(ValueError):
    """A key that a class does not take: with its section, and as `key=value`."""

    def __init__(self, message: str, key: str = "", given: str = "") -> None:
        super().__init__(message)
        self.key, self.given = key, given


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` and the list of what is known."""
    known = list(known)
    close = min(known, key=lambda k: _unlikeness(name, k), default="")
    hint = f"did you mean '{close}'? " if close and _unlikeness(name, close) < _NOTHING else ""
    return f"{hint}known: {', '.join(known) or 'none'}"


def nearest_key(key: str, known: Iterable[str], least: int = 4) -> str | None:
    """The known key, of whatever section, that is most like `section.name`; None if none is.

    Words that agree count before letters that do, and a key of the same section before another.
    `least` of 4 also takes keys that share letters only, 2 asks for the same words.
    """
    section, _, name = key.rpartition(".")

    def unlikeness(other: str) -> tuple[float, ...]:
        place, _, last = other.rpartition(".")
        degree, rest = _unlikeness(name, last)
        is_elsewhere = place != section
        # Anywhere in some hundred keys, a few letters in common mean nothing.
        if is_elsewhere and degree == 4 and rest > 0.25:
            return (*_NOTHING, 0)
        return degree, is_elsewhere, rest

    close = min(known, key=unlikeness, default=None)
    return close if close is not None and unlikeness(close)[0] <= least else None


def _unlikeness(name: str, known: str) -> tuple[float, float]:
    """How far a known name is from what was typed: a degree from 0 to 5, and order within it."""
    if name.casefold() == known.casefold():
        return 0, 0
    ours, theirs = _words(name), _words(known)
    bare = name.removeprefix("num_")
    if ours == theirs or SYNONYMS.get(bare) == known or SYNONYMS.get(known) == bare:
        return 1, 0
    if ours and ours < theirs:
        return 2, len(theirs - ours)
    if len(known) > 1 and known == "".join(word[0] for word in re.split("[_-]+", name) if word):
        return 2, 0
    if theirs and theirs < ours:
        return 3, len(ours - theirs)
    distance = 1 - difflib.SequenceMatcher(None, name.casefold(), known.casefold()).ratio()
    return (4, distance) if distance <= 0.45 else _NOTHING


def _words(name: str) -> frozenset[str]:
    """The words of a name in lower case, without `num` and the plural's s: layers, num_layers."""
    words = re.split(r"[^a-z0-9]+", name.casefold())
    return frozenset(w[:-1] if len(w) > 3 and w.endswith("s") else w for w in words if w) - {"num"}


def fill(target: Callable[..., T], values: Mapping[str, Any], key: str = "", **context: Any) -> T:
    """Call `target` with `values` checked against its signature, plus `context` as it stands.

    Raises:
        ValueError: see `check`; or the target itself refuses a value.
    """
    return target(**context, **check(target, values, key, context))


def check(
    target: Callable[..., Any],
    values: Mapping[str, Any],
    key: str = "",
    context: Iterable[str] = (),
) -> dict[str, Any]:
    """`values` as arguments of `target`, converted to its annotations, with its defaults filled in.

    Args:
        target: a dataclass, a TypedDict or any class with annotated parameters.
        values: plain values, e.g. a part of the composed config.
        key: where `values` stand in the config, for messages; empty at the top.
        context: parameters that the caller supplies, which a config may not set.

    Raises:
        ValueError: an unknown or missing key, or a value of another type; names the key, the value,
            what is allowed and the nearest known name.
    """
    parameters, hints = _signature(target)
    allowed = [name for name in parameters if name not in set(context)]
    prefix = f"{key}." if key else ""
    arguments = {}
    for name, value in values.items():
        if name not in allowed:
            given = f"{prefix}{name}={_show(value)}"
            message = f"{given}: unknown key; {nearest(name, allowed)}"
            raise UnknownKey(message, f"{prefix}{name}", given)
        if value != MISSING:
            arguments[name] = convert(value, hints.get(name, Any), f"{prefix}{name}")
    for name in allowed:
        default = parameters[name].default
        if name in arguments:
            continue
        if default is inspect.Parameter.empty:
            expected = describe_type(hints.get(name, Any))
            raise ValueError(f"{prefix}{name} is missing, expected {expected}{SET_IT}")
        # A dataclass shows `field(default_factory=...)` as a marker; it fills that in itself.
        if default is not _LEFT_OUT and type(default).__name__ != "_HAS_DEFAULT_FACTORY_CLASS":
            arguments[name] = default
    return arguments


@functools.cache
def _signature(
    target: Callable[..., Any],
) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    function: Any = target
    if typing.is_typeddict(target):
        hints = typing.get_type_hints(target)
        required = dict.fromkeys(function.__required_keys__, inspect.Parameter.empty)
        return {
            name: inspect.Parameter(name, _KEYWORD, default=required.get(name, _LEFT_OUT))
            for name in hints
        }, hints
    if isinstance(target, type) and not dataclasses.is_dataclass(target):
        function = getattr(target, "__init__", target)
    return inspect.signature(target).parameters, typing.get_type_hints(function)


def convert(value: Any, hint: Any, key: str) -> Any:
    """Check one value against a type annotation; numbers are never guessed from strings.

    Raises:
        ValueError: names the key, the value and what is allowed.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        with_keys = [a for a in args if dataclasses.is_dataclass(a) or typing.get_origin(a) is dict]
        if isinstance(value, Mapping) and len(with_keys) == 1:
            return convert(value, with_keys[0], key)  # names what is wrong inside
        for arg in args:
            try:
                return convert(value, arg, key)
            except ValueError:
                continue
    elif origin is Literal:
        if value in args and type(value) in {type(a) for a in args}:
            return value
        raise ValueError(
            f"{key}={_show(value)}: not a choice; {nearest(str(value), map(str, args))}"
        )
    elif typing.is_typeddict(hint) and isinstance(value, Mapping):
        return check(hint, value, key)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return fill(hint, value, key)
        first = dataclasses.fields(hint)[0].name
        raise ValueError(f"{key}={_show(value)}: has keys of its own, such as {key}.{first}")
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        inner = args if origin is tuple and args[-1] is not ... else [args[0]] * len(value)
        if len(inner) == len(value):
            return origin(
                convert(v, h, f"{key}[{i}]")
                for i, (v, h) in enumerate(zip(value, inner, strict=True))
            )
    elif origin is dict and isinstance(value, Mapping):
        return {name: convert(v, args[1], f"{key}.{name}") for name, v in value.items()}
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint is Path and isinstance(value, str) and value.strip():
        try:
            return Path(value).expanduser()
        except RuntimeError as error:  # ~name of nobody
            raise ValueError(f"{key}={_show(value)}: {error}") from None
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{key}={_show(value)}: expected {describe_type(hint)}")


def load_target(path: Any, key: str) -> type:
    """Import the class that a config's `_target_` names, e.g. `models.luna.LunaEncoder`.

    Raises:
        ValueError: there is no such module or class.
    """
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}._target_={path}: cannot be imported ({error})") from None


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _show(value: Any) -> str:
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def describe_type(hint: Any) -> str:
    """What a type annotation allows, in words."""
    if hint is type(None):
        return "null"
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " | ".join(map(str, args))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(describe_type(a) for a in args)
    if typing.get_origin(hint) is tuple and args[-1] is not ...:
        return f"a list of {len(args)} numbers"
    if typing.get_origin(hint) in (list, tuple):
        return f"a list of {describe_type(args[0])}"
    if typing.get_origin(hint) is dict or typing.is_typeddict(hint):
        return "keys with values"
    if dataclasses.is_dataclass(hint):
        return "keys with values"
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))
