"""Checkpoint files: whole or not at all, the last two kept, weights only; trainer.py says when."""

from __future__ import annotations

import errno
import random
import re
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lra.console import first_line
from lra.files import replacing

KEEP = 2
FORMAT_VERSION = 1
# Errors that say nothing of what is in a file, and may pass.
NOT_OF_THE_FILE = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EMFILE,
                   errno.ENFILE)  # fmt: skip


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write `step-<step>.pt`, then drop older ones and weights that no kept checkpoint calls best.

    Raises:
        OSError: the disk is full or not writable; earlier checkpoints stay as they are.
    """
    write(folder / f"step-{step:08d}.pt", {"format": FORMAT_VERSION, **state})
    kept = checkpoints(folder)[:KEEP]
    for path in checkpoints(folder)[KEEP:]:
        path.unlink()
    oldest = step_of(kept[-1])
    # Kept states may name any best weights from the step of the oldest on, or the newest before it:
    # a state that was saved before the evaluation of its own step names those.
    best = sorted(folder.glob("best-*.pt"), key=step_of, reverse=True)
    older = [path for path in best if step_of(path) < oldest]
    needed = [path for path in best if step_of(path) >= oldest] + older[:1]
    for path in set(best) - set(needed):
        path.unlink()


def write(path: Path, state: dict[str, Any]) -> None:
    """Save a state as a whole.

    Raises:
        OSError: the disk is full or not writable; what was there before stays.
    """
    try:
        with replacing(path) as file:
            torch.save(state, file)
    except RuntimeError as error:  # how torch reports a failed write
        free = shutil.disk_usage(path.parent).free >> 20
        reason = f"{free} MiB free there: {first_line(error)}"
        raise OSError(errno.ENOSPC, reason, str(path)) from error


def read(path: Path) -> dict[str, Any]:
    """Load tensors and plain values; nothing in the file is executed.

    Raises:
        ValueError: the file is missing, truncated, damaged or of another format.
        OSError: the disk does not give it.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # whose checksums torch does not look at
            if archive.testzip() is not None:
                raise zipfile.BadZipFile
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:  # also what a damaged file makes of a place to read at
        if error.errno not in NOT_OF_THE_FILE:
            raise ValueError(
                f"{path}: not a readable checkpoint ({error.strerror or error})"
            ) from None
        reason = f"cannot be read now ({error.strerror}); once it can, the same command goes on"
        raise OSError(error.errno, reason, str(path)) from None
    except MemoryError:
        raise
    except Exception as error:  # of any kind: random bytes are random instructions to the reader
        raise ValueError(
            f"{path}: not a readable checkpoint (damaged, or it holds other objects than weights, "
            f"which are never loaded; {type(error).__name__})"
        ) from None
    if not isinstance(state, dict) or "model" not in state:
        raise ValueError(f"{path}: not a checkpoint of this program (no model weights in it)")
    return state


def checkpoints(folder: Path) -> list[Path]:
    """The states of a run, newest first."""
    return sorted(folder.glob("step-*.pt"), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's file name."""
    match = re.fullmatch(r"(?:step|best)-(\d+)\.pt", path.name)
    if not match:
        raise ValueError(f"{path}: expected a name like step-00000100.pt")
    return int(match[1])


def best_path(folder: Path, step: int) -> Path:
    """Where the weights of the best evaluation lie."""
    return folder / f"best-{step:08d}.pt"


def load_latest(
    folder: Path, *, needs_best: bool = False
) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest readable state, or None, and a warning for each file that was passed over.

    With `needs_best` the weights that the state calls best have to be readable too. Its step says
    which file it was.

    Raises:
        OSError: the disk does not give a file.
    """
    passed_over: list[str] = []
    for path in checkpoints(folder):
        try:
            state = read(path)
            best_step = state["state"]["best_step"] if needs_best and "state" in state else 0
            if best_step:
                read(best_path(folder, best_step))
            return state, passed_over
        except ValueError as error:
            passed_over.append(f"{path.name} is passed over: {error}")
    return None, passed_over


def drop_beyond(folder: Path, step: int) -> None:
    """Remove what a stopped run has left of steps beyond `step`, at which it goes on.

    Weights that were the best there may never be so again, and no state would be kept beside newer
    ones. Only who holds the run's lock may call this: a file half-written is taken for a left-over.
    """
    found = [*checkpoints(folder), *folder.glob("best-*.pt")]
    for path in [*folder.glob(".*.tmp"), *(path for path in found if step_of(path) > step)]:
        path.unlink(missing_ok=True)


def random_states() -> dict[str, Any]:
    """The states of all generators that a model could draw from."""
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        # Of the run's own device, which may have another number when the run goes on.
        # Initialized by the run itself: a run on the CPU shall take no memory of a GPU.
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (
            numpy_state[0],
            torch.from_numpy(numpy_state[1].astype(np.int64)),
            *numpy_state[2:],
        ),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Undo `random_states`."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_initialized() and states["cuda"]:
        # States of all devices, as they once were saved, have that of this one by its number.
        last = len(states["cuda"]) - 1
        torch.cuda.set_rng_state(states["cuda"][min(torch.cuda.current_device(), last)])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def seed_everything(seed: int) -> None:
    """Seed every generator from the run's seed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
