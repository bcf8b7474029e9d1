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
        stored: dict[str, Any] = yaml.safe_load(
            (run_dir / "config.yaml").read_text(encoding="utf-8")
        )
    except (OSError, yaml.YAMLError) as error:
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
        if not isinstance(config, dict):
            return
        yield config
        source = Path(str(config.get("init_from") or source))


def selected_path(source: Path, vocabulary: str | None = None) -> Path:
    """A checkpoint file itself, or a run folder's best (else last) one.

    Raises:
        ValueError: nothing there, unreadable, or of another vocabulary.
    """
    from lra.training import checkpoint

    path = source
    if source.is_dir():
        state, warnings = checkpoint.load_latest(source / "checkpoints")
        if state is None:
            why = f" that can be read ({warnings[0]})" if warnings else ""
            raise ValueError(f"{source}: no checkpoint in its folder 'checkpoints'{why}")
        if vocabulary and state["identity"].get("vocabulary") not in (None, vocabulary):
            raise ValueError(
                f"{source}: was trained with another vocabulary than this task has now"
            )
        path = checkpoint.checkpoints(source / "checkpoints")[0]
        best = source / "checkpoints" / f"best-{state['state']['best_step']:08d}.pt"
        path = best if best.exists() else path
    return path


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
