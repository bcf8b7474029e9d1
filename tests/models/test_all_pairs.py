"""Every model on every task: a training step, an evaluation and a record, on small real files and
on the synthetic stand-ins."""

from __future__ import annotations

import socket
from itertools import product
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lra.cli import CONFIGS, compose_config, typed
from lra.job import run_job
from lra.plan import Reference
from lra.results.published import TITLES

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
TASKS = ["listops", "text", "retrieval", "image", "pathfinder", "pathx"]
MODELS = ["softmax", "luna", "nystromformer", "fastformer"]
TINY = [
    "shape.d_model=8", "shape.d_ff=8", "shape.num_layers=1", "shape.num_heads=2",
    "shape.head_hidden=[4]", "train.num_steps=1", "train.batch_size=2", "train.warmup_steps=0",
    "train.eval_every=1", "task.limit_train=4", "task.limit_val=2", "task.limit_test=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the models, so that each task is prepared once."""
    return tmp_path_factory.mktemp("cache")


CASES = [
    # Softmax attention over 16,384 positions takes as long as all other cases together.
    pytest.param(*case, marks=[pytest.mark.slow] * (case[1:] == ("pathx", "softmax")))
    for case in product(["files", "synthetic"], TASKS, MODELS)
]


@pytest.mark.parametrize(("source", "task", "model"), CASES)
def test_a_step_and_an_evaluation(
    source: str,
    task: str,
    model: str,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("asks the network"))
    if source == "files" and not DATA.is_dir():
        pytest.skip("no folder of small real data beside the repository")
    sizes = ["task.num_train=8", "task.num_val=4", "task.num_test=4"] * (source == "synthetic")
    config = typed(
        compose_config(
            [
                f"model={model}", f"task={task}", f"task.source={source}", *TINY, *sizes,
                f"paths.data={DATA if source == 'files' else tmp_path}", f"paths.cache={cache}",
                f"paths.outputs={tmp_path}", f"paths.results={tmp_path}",
            ]
        )
    )  # fmt: skip
    baseline = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / "softmax.yaml"))
    record = run_job(config, [], Reference(None, baseline))
    assert record.status in ("completed", "at_chance") and record.result is not None
    assert record.result.test.num_examples == 2 and record.result.step == 1
    assert record.protocol.data == ("partial" if source == "files" else "synthetic")
    assert record.curve[0]["train_loss"] > 0
    _, title, table = capsys.readouterr().out.rpartition(f"\n{TITLES[task]}\n")
    assert title and f"> {model} " in table
