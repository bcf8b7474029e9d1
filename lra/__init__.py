"""Long Range Arena in PyTorch. `lra.load("outputs/RUN_ID")` is a trained model, ready for use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lra.script import check_packages

check_packages()  # before any import that would fail for want of one

if TYPE_CHECKING:
    from lra.trained import TrainedModel

CONFIGS = Path(__file__).resolve().parent.parent / "configs"  # here, for --help imports no more


def load(run: str | Path, device: str = "cpu") -> TrainedModel:
    """The model of a run's folder with its selected weights, and the task it was trained on.

    Raises:
        ValueError: no such run or device, no weights in it, or they do not fit its config.
    """
    from lra.trained import TrainedModel  # brings torch

    return TrainedModel(Path(run), device)
