"""What an earlier run left: its config, and the weights that were selected, checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def stored_config(run_dir: Path, given: str) -> dict[str, Any]:
    """The config that a run has left in its folder; `given` is what asks for it, for the message.

    Raises:
        ValueError: it is not there, or not readable.
    """
    import yaml

    try:
        stored: Any = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError(f"{type(stored).__name__}, expected keys with values")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{given}: no run with a readable config.yaml ({error})") from None
    return stored


def ancestry(source: Path) -> Iterator[dict[str, Any]]:
    """Configs of the run that left these weights and of those it went on from, the latest first.

    As far as their folders are still there and can be read; `source` is as for `selected_path`.
    """
    seen = set()
    while source not in seen:
        seen.add(source)
        run_dir = source if source.is_dir() else source.parent.parent
        try:
            config = stored_config(run_dir, str(source))
        except ValueError:  # weights from elsewhere, of which nothing is known
            return
        yield config
        source = Path(str(config.get("init_from") or source))


def selected_path(source: Path, vocabulary: str | None = None) -> Path:
    """A checkpoint file itself, or a run folder's best one, the last where none was to be chosen.

    Raises:
        ValueError: nothing there, unreadable, or of another vocabulary.
    """
    from lra.training import checkpoint

    if not source.exists():
        raise ValueError(f"{source}: no such run folder or checkpoint file")
    path = source
    if source.is_dir():
        folder = source / "checkpoints"
        state, warnings = checkpoint.load_latest(folder, needs_best=_needs_best(source))
        if state is None:
            why = f" that can be read ({warnings[0]})" if warnings else ""
            raise ValueError(f"{source}: no checkpoint in its folder 'checkpoints'{why}")
        if vocabulary and state["identity"].get("vocabulary") not in (None, vocabulary):
            raise ValueError(
                f"{source}: was trained with another vocabulary than this task has now"
            )
        path = folder / f"step-{state['state']['step']:08d}.pt"
        best = checkpoint.best_path(folder, state["state"]["best_step"])
        path = best if best.exists() else path
    return path


def _needs_best(run_dir: Path) -> bool:
    """Whether a run chooses its weights by validation, as far as its config is there to tell."""
    try:
        return bool(stored_config(run_dir, str(run_dir))["train"]["selection"] != "last")
    except (ValueError, KeyError, TypeError):
        return False


def selected_weights(source: Path, model: Any, vocabulary: str | None = None) -> dict[str, Any]:
    """Weights of a checkpoint file, or of a run folder's best (else last) checkpoint.

    Raises:
        ValueError: nothing there, unreadable, of another architecture or another vocabulary.
    """
    from lra.training import checkpoint

    path = selected_path(source, vocabulary)
    weights: dict[str, Any] = checkpoint.read(path)["model"]
    own = model.state_dict()
    wrong = [k for k in own.keys() | weights.keys()
             if k not in own or k not in weights or own[k].shape != weights[k].shape]  # fmt: skip
    if wrong:
        raise ValueError(
            f"{path}: weights of another architecture ({len(wrong)} of {len(own)} tensors differ, "
            f"e.g. {sorted(wrong)[0]})"
        )
    return weights
