"""scripts/benchmark.py: real processes at tiny sizes, and the arithmetic behind its tables."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

from lra.cli import all_models
from lra.config import RunConfig
from lra.results import efficiency
from lra.speed import cells, peers, textbook
from lra.speed.benchmarks import Benchmark, Key, Measurement, load_benchmarks, ratios_to, summarise
from lra.speed.breakdown import ORDER, Roofline, breakdown, breakdown_rows, count
from lra.speed.cells import CellFailed, in_own_process
from lra.speed.cost import stage_shapes
from lra.speed.limits import machine_limits
from lra.speed.measure import measure, random_batch, step_times
from lra.training.hardware import Hardware
from lra.values import fill
from models.classifier import Classifier
from models.encoder import Encoder, make_encoder
from models.mega import MegaEncoder
from models.shape import Shape
from tests import programs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "benchmark.py"
TINY = ["batch_size=2", "time_s=0.01", "hardware.num_threads=1"]
CALL: dict[str, Any] = {
    "mode": "inference", "time_s": 0.01, "max_step_s": 60.0, "max_memory_gb": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = module  # where its dataclasses look for their own types
    spec.loader.exec_module(module)
    return module


def values(script: ModuleType, model: str, length: int) -> dict[str, Any]:
    """The config of a cell as plain values."""
    settings = script.Settings(batch_size=2)
    config = script.composed([model], ["hardware.num_threads=1"], settings)[model]
    return script.at_length(config, length)


def call(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return programs.call(SCRIPT, *words, cwd=cwd)


def test_a_call_leaves_a_record_that_the_tables_show(tmp_path: Path) -> None:
    done = call(
        "models=softmax,luna:projection_length=4", "lengths=32", "repeats=2", "mode=inference",
        *TINY, f"paths.results={tmp_path}/results", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"round [12] .* steps/s +\d+ MB", done.stdout)) == 4
    (benchmark,), warnings = load_benchmarks(tmp_path / "results")
    assert not warnings and benchmark.name == "cpu-nystromformer"
    assert (benchmark.task, benchmark.recipe, benchmark.repeats) == ("text", "nystromformer", 2)
    assert benchmark.threads == 1 and benchmark.batch_size == 2 and benchmark.started_at
    assert benchmark.environment["torch"] and "repeats=2" in benchmark.overrides
    assert "paths." not in str(benchmark.overrides)  # where things lie is no part of a record
    assert {(c.model, c.length) for c in benchmark.cells} == {
        ("softmax", 32),
        ("luna:projection_length=4", 32),
    }
    for cell in benchmark.cells:
        assert cell.status == "ok" and cell.repeats == 2 and cell.spread is not None
        assert cell.steps_per_s and cell.tokens_per_s
        assert cell.tokens_per_s == pytest.approx(cell.steps_per_s * 2 * cell.length)
        assert cell.peak_memory_bytes is not None and cell.peak_memory_bytes < 2**27
        assert (cell.ratio_spread is None) == (cell.model == "softmax")
    (limits,) = benchmark.limits  # of the one thread that was asked for
    assert limits.threads == 1 and min(dataclasses.astuple(limits)) > 0
    *tables, (_, rates) = efficiency.benchmark_tables(benchmark)
    assert rates.markdown() in done.stdout
    assert efficiency.benchmark_tables(dataclasses.replace(benchmark, limits=[])) == tables
    table = "| Model | 32 |\n|---|---:|\n| luna:projection_length=4 |"
    assert table in done.stdout

    programs.call("scripts/make_tables.py", "--no-figures", cwd=tmp_path).check_returncode()
    text = (tmp_path / "results" / "tables" / "efficiency.md").read_text()
    assert table in text and "inference, steps per second (times softmax, spread over 2" in text


def test_limits_leave_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    one, two = machine_limits(time_s=0)
    assert (one.threads, two.threads, torch.get_num_threads()) == (1, 2, 2)
    torch.set_num_threads(before)


def test_a_step_that_takes_too_long_is_marked(script: ModuleType) -> None:
    request = CALL | {"config": values(script, "softmax", 32), "max_step_s": 1e-9}
    answer = in_own_process(request)
    assert answer["measured"]["status"] == "too_slow" and answer["hardware"]["device"] == "cpu"


def test_a_cell_that_needs_too_much_memory_is_marked(script: ModuleType) -> None:
    request = CALL | {"config": values(script, "textbook", 2048), "max_memory_gb": 0.02}
    assert in_own_process(request)["measured"]["status"] == "out_of_memory"


def test_a_cell_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "LIMIT_S", 0.05)
    with pytest.raises(CellFailed, match="no answer within"):
        in_own_process({})


def test_what_fails_otherwise_is_an_error_and_earlier_cells_are_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, Any] = {"limits": [], "l2_bytes": None}
    answers = iter([limits, {"measured": {"status": "ok", "steps_per_s": 2.0}}])

    def answer(_request: dict[str, Any]) -> dict[str, Any]:
        for found in answers:
            return found
        raise CellFailed("Traceback: an operation is missing")

    monkeypatch.setattr(script, "in_own_process", answer)
    argv = ["benchmark.py", "models=softmax,luna", "lengths=32", f"paths.results={tmp_path}"]
    monkeypatch.setattr(sys, "argv", argv)
    assert script.main() == 1
    (benchmark,), _ = load_benchmarks(tmp_path)
    assert [c.model for c in benchmark.cells] == ["softmax"]


def test_a_failing_process_hands_on_its_traceback() -> None:
    with pytest.raises(CellFailed, match="Traceback(.|\n)*KeyError"):
        in_own_process({})


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_a_cell_trains_and_evaluates(script: ModuleType, mode: str) -> None:
    config = fill(RunConfig, values(script, "luna", 48))
    found = measure(config, Hardware(config.hardware), **CALL | {"mode": mode})
    assert found.status == "ok" and found.steps_per_s and found.peak_memory_bytes is not None


def test_batches_are_full_and_free_of_padding(script: ModuleType) -> None:
    task = script_task(script, 100)
    batch = random_batch(task, 3, seed=0)
    assert batch.tokens_BSL.shape == (3, 1, 100) and batch.lengths_BS.eq(100).all()
    assert batch.tokens_BSL.min() >= 1 and batch.tokens_BSL.max() < task.vocab_size


def script_task(script: ModuleType, length: int) -> Any:
    from lra.build import make_task

    return make_task(fill(RunConfig, values(script, "softmax", length)))


def test_ratios_are_taken_inside_a_round() -> None:
    """Everything is half as fast in the second round; the ratio does not see it."""
    soft, luna, slow = (Key(m, 64, "train") for m in ("softmax", "luna", "slow"))
    rounds = [
        {soft: Measurement("ok", 10.0, 100), luna: Measurement("ok", 20.0, 50),
         slow: Measurement("ok", 1.0, 7)},
        {luna: Measurement("ok", 11.0, 60), soft: Measurement("ok", 5.0, 90),
         slow: Measurement("too_slow")},
        {soft: Measurement("ok", 10.0, 90), luna: Measurement("ok", 24.0, 55)},
    ]  # fmt: skip
    cells = {c.model: c for c in summarise(rounds, num_sequences=2, batch_size=4)}
    assert ratios_to("softmax", luna, rounds) == [2.0, 2.2, 2.4]
    assert cells["luna"].ratio_to_softmax == 2.2
    assert cells["luna"].ratio_spread == pytest.approx(0.4 / 2.2)
    assert cells["luna"].spread == pytest.approx(13 / 20) and cells["luna"].repeats == 3
    assert (cells["luna"].steps_per_s, cells["luna"].peak_memory_bytes) == (20.0, 60)
    assert cells["luna"].tokens_per_s == 20.0 * 4 * 64 * 2
    assert cells["slow"].status == "too_slow" and cells["slow"].steps_per_s is None
    alone = summarise(rounds[:1], num_sequences=1, batch_size=4)
    assert alone[1].ratio_spread is None and alone[1].spread is None


def test_measured_ratios_stand_beside_the_published() -> None:
    cells = summarise(
        [{Key("softmax", 1024, "train"): Measurement("ok", 1.0, 400),
          Key("luna", 1024, "train"): Measurement("ok", 1.5, 100),
          Key("softmax", 4096, "train"): Measurement("out_of_memory"),
          Key("luna", 4096, "train"): Measurement("ok", 1.0, 900)}], 1, 32,
    )  # fmt: skip
    benchmark = Benchmark(
        schema_version=1, device="cpu", hardware="Some CPU", precision="float32", threads=1,
        batch_size=32, cells=cells, environment={}, recipe="lra",
    )  # fmt: skip
    published = efficiency.load_efficiency(ROOT / "results" / "published_efficiency.csv")
    speed, memory = efficiency.beside_tables([benchmark], published)
    assert speed[1].header == ["Model", "Variant", "1K", "2K", "3K", "4K", "Figures"]
    ours = "measured, Some CPU, float32, batch 32, 1 thread, recipe lra"
    assert speed[1].rows[-2:] == [
        ["luna", "", "1.50", "", "", "", ours],
        ["softmax", "", "1.00", "", "", "out of memory", ours],
    ]
    assert memory[1].rows[-2][2] == "0.25"
    linformer = next(row for row in memory[1].rows if row[0] == "Linformer")
    assert linformer[5] == f"{0.99 / 9.48:.2f}"  # printed in GB only
    assert efficiency.beside_tables([], published) == []
    assert json.loads(benchmark.to_json())["cells"][0]["model"] == "softmax"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models=lunna"], "models=lunna: did you mean 'luna'"),
        (["models=luna:tie_kvv=true"], "model.tie_kvv=true: unknown key; did you mean 'model.tie"),
        (["models=nystromformer:num_landmarks=0"], "num_landmarks=0: expected at least 1"),
        (["models=textbook:width=3"], "model.width=3: unknown key"),
        (["lengths=0"], "lengths=0: expected at least 1"),
        (["lengths=1K"], "lengths[0]='1K': expected an integer"),
        (["mode=training"], "mode[0]='training': not a choice; did you mean 'train'"),
        (["batchsize=3"], "batchsize=3: unknown; did you mean 'batch_size'"),
        (["model=luna"], "model=luna: here it is models=NAME"),
        (["model.tie_kv=true"], "here it is models=NAME:tie_kv=true"),
        (["task.max_length=9"], "here it is lengths=N"),
        (["hardware.precison=bf16"], "hardware.precison=bf16: unknown key; did you mean"),
        (["hardware.num_devices=2"], "hardware.num_devices=2: expected 1"),
        (["repeats=0"], "repeats=0: expected at least 1"),
        (["name=../x"], "name=../x: expected a file's name"),
        (["--breakdown", "hardware.compile=true"], "hardware.compile=true: --breakdown"),
        (["--check", "lengths=64"], "--check has its own lengths"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_measured(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words])
    with pytest.raises(ValueError, match=re.escape(message)):
        script.main()


def test_a_message_is_one_line_and_the_code_is_that_of_wrong_input(tmp_path: Path) -> None:
    done = call("lengths=0", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: lengths=0: expected at least 1\n"


@pytest.mark.parametrize("name", [name for name, peer in peers.PEERS.items() if peer.package])
def test_a_missing_package_is_named_with_its_extra(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    package = peers.PEERS[name].package or ""
    module = package.replace("-", "_")
    for loaded in [m for m in sys.modules if m.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    message = f"{package} is not installed; pip install -e '.[bench]'"
    with pytest.raises(ValueError, match=re.escape(message)):
        values(script, name, 32)


def test_peers_stand_against_models_and_come_with_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {Requirement(text).name for text in extra["optional-dependencies"]["bench"]}
    assert packages == {peer.package for peer in peers.PEERS.values() if peer.package}
    assert {peer.model for peer in peers.PEERS.values()} <= set(all_models())


NYSTROM = {"num_landmarks": 8, "conv_kernel_size": 3}
SMALL: dict[str, dict[str, Any]] = {  # options for 20 tokens
    "nystrom_attention": NYSTROM | {"pinv_iterations": 2},
    "transformers_nystromformer": NYSTROM,
    "textbook_nystromformer": NYSTROM,
    "performer_pytorch": {"kernel": "softmax", "num_features": 6},
    "linformer_package": {"rank": 3},
    "local_attention": {"window": 6},
    "transformers_longformer": {"window": 6, "num_global": 1},
    "transformers_bigbird": {"block_size": 2, "num_random": 1},
    "sinkhorn_transformer": {"block_size": 8, "num_iterations": 2, "temperature": 0.75},
    "reformer_pytorch": {"num_hashes": 2, "chunk_length": 3},
}


def peer_encoder(name: str, **sizes: Any) -> Encoder:
    """A small one with the peer inside; skipped where its package is not installed."""
    if name in peers.PEERS and (package := peers.PEERS[name].package):
        pytest.importorskip(package.replace("-", "_"))
    module, _, target = peers.TARGETS[name].rpartition(".")
    shape = Shape(vocab_size=9, max_length=20, d_model=8, num_heads=2, d_ff=8, **sizes)
    torch.manual_seed(0)
    target_class = getattr(importlib.import_module(module), target)
    return make_encoder(target_class, shape, **SMALL.get(name, {}))


@pytest.mark.parametrize("name", peers.TARGETS)
def test_peers_mix_in_the_same_encoder(name: str) -> None:
    encoder = peer_encoder(name, dropout=0.0).eval()
    x_BLD = encoder(torch.randint(1, 9, (2, 20)), torch.ones(2, 20, dtype=torch.bool))
    assert x_BLD.shape == (2, 20, 8) and x_BLD.isfinite().all()
    x_BLD.sum().backward()
    assert all(p.grad is not None for p in encoder.blocks[0].mixer.parameters())


@pytest.mark.parametrize("name", peers.TARGETS)
def test_peers_train_on_a_short_row_with_a_class_token(name: str) -> None:
    encoder = peer_encoder(name, pooling="cls").train()
    encoder(torch.randint(1, 9, (2, 7)), torch.ones(2, 7, dtype=torch.bool)).sum().backward()


def test_a_peer_has_the_options_of_our_model(script: ModuleType) -> None:
    pytest.importorskip("performer_pytorch")
    ours, peer = (values(script, m, 32)["model"] for m in ("performer", "performer_pytorch"))
    assert peer.pop("_target_") == "lra.speed.peers.PerformerPytorch"
    assert peer == {"kernel": ours["kernel"], "num_features": ours["num_features"]}
    assert values(script, "performer_pytorch:num_features=8", 32)["model"]["num_features"] == 8


def test_a_length_that_a_peer_does_not_have_is_refused(script: ModuleType) -> None:
    pytest.importorskip("transformers")
    settings = script.Settings(lengths=(2048, 160))
    with pytest.raises(ValueError, match="max_length=160: expected more than 11 blocks of 16"):
        script.composed(["transformers_bigbird"], [], settings)


def test_the_textbook_mixes_as_the_softmax_model_does() -> None:
    from models.softmax import SoftmaxAttention

    shape = Shape(vocab_size=9, max_length=20, d_model=8, num_heads=2)
    ours, theirs = SoftmaxAttention(shape).eval(), textbook.TextbookAttention(shape).eval()
    theirs.load_state_dict(ours.state_dict())
    x_BLD, mask_BL = torch.randn(2, 20, 8), torch.ones(2, 20, dtype=torch.bool)
    torch.testing.assert_close(theirs(x_BLD, mask_BL), ours(x_BLD, mask_BL))


def test_textbook_nystrom_mixes_as_ours_does() -> None:
    from models.nystromformer import NystromAttention

    shape = Shape(vocab_size=9, max_length=24, d_model=8, num_heads=2)
    ours = NystromAttention(shape, num_landmarks=4, pinv_init="global")
    theirs = textbook.TextbookNystrom(shape, num_landmarks=4)
    state = ours.state_dict()
    state["conv.weight"] = state.pop("conv_HW")[:, None, :, None]
    theirs.load_state_dict(state)
    x_BLD, mask_BL = torch.randn(2, 24, 8), torch.ones(2, 24, dtype=torch.bool)
    torch.testing.assert_close(theirs(x_BLD, mask_BL), ours(x_BLD, mask_BL))


def test_counted_operations_and_bytes_of_a_linear_map() -> None:
    linear, x = nn.Linear(32, 16, bias=False), torch.randn(8, 32)
    flops, num_bytes = count(lambda: linear(x))
    assert flops == 2 * 8 * 32 * 16
    assert num_bytes == 4 * (8 * 32 + 32 * 16 + 8 * 16)  # views such as the transpose are free
    out = torch.zeros(3, 4, 6)
    flops, num_bytes = count(lambda: out.baddbmm_(torch.ones(3, 4, 5), torch.ones(3, 5, 6)))
    assert flops == 2 * 3 * 4 * 5 * 6
    x = torch.ones(1, 100).expand(50, 100)
    assert count(lambda: x + 1)[1] == 4 * (100 + 50 * 100)  # what is repeated lies there once


def test_counted_attention_is_that_of_the_textbook() -> None:
    q_BHLK = torch.randn(1, 2, 32, 8, requires_grad=True)

    def attend() -> None:
        nn.functional.scaled_dot_product_attention(q_BHLK, q_BHLK, q_BHLK).sum().backward()

    products = 2 * 2 * 32 * 32 * 8  # of one [L, K] x [K, L] in both heads
    assert count(attend)[0] == (2 + 5) * products  # the backward pass forms the weights again


def test_a_step_falls_into_parts(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lra.speed.breakdown.REPEATS", 1)
    config = fill(RunConfig, values(script, "fastformer", 64))
    hardware = Hardware(config.hardware)
    found = breakdown(config, hardware, time_s=0.01)
    parts = found["parts"]
    assert [p for p in parts if p.startswith("forward: mixer")] == [
        "forward: mixer of layer 1", "forward: mixer of layer 2",
    ]  # fmt: skip
    assert all(seconds > 0 for seconds in parts.values()), parts
    assert found["flops"] > 3 * 2 * 2 * 64 * 64 * 128 and found["bytes"] > 0
    rows = breakdown_rows({"softmax": [found, found], "fastformer": [found, found]})
    assert len(rows) == len(ORDER) + 1 + 2  # two mixers; the step and its ratio
    assert rows[-1] == ["times softmax's speed", *["1.00 (spread 0 %)"] * 2]
    shares = [float(row[1].split()[0]) for row in rows[:-2]]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_bytes_are_those_read_and_written_once() -> None:
    a, b, c = torch.ones(3, 64, 64)
    matrix = 64 * 64 * 4
    for operation, expected in (
        (lambda: torch.mm(a, b), 3), (lambda: torch.mm(a, b, out=c), 3), (lambda: c.copy_(a), 2),
        (lambda: c.zero_(), 1), (lambda: c.fill_(1.0), 1), (lambda: c.add_(a), 3),
    ):  # fmt: skip
        assert count(operation)[1] == expected * matrix


def test_the_mixer_of_megas_own_block_is_seen() -> None:
    shape = Shape(vocab_size=16, max_length=32, d_model=16, d_ff=16, num_heads=2, num_layers=1)
    model = Classifier(MegaEncoder(shape, block="own"), shape, 2)
    stages = [stage for stage, _ in stage_shapes(model, 32)]
    assert stages.index("layer 1 mixer") < stages.index("layer 1 feed-forward")


def test_roofline_shares() -> None:
    line = Roofline(step_s=2.0, flops=10**9, num_bytes=10**9, flops_per_s=1e9, bytes_per_s=5e9)
    assert (line.arithmetic_share, line.memory_share) == (0.5, 0.1)
    assert str(line).endswith("share of the roofline reached 50 %")


@pytest.mark.parametrize(("least", "code", "mark"), [(0.4, 0, "ok"), (0.6, 1, "TOO SLOW")])
def test_the_guard_fails_below_a_floor(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    least: float, code: int, mark: str,
) -> None:  # fmt: skip
    times = {"softmax": [2.0, 4.0, 2.0], "textbook": [1.0, 2.0, 1.1]}
    monkeypatch.setattr(script, "in_own_process", lambda _request: {"times": times})
    monkeypatch.setattr(script, "FLOORS", (script.Floor("softmax", "textbook", least),))
    assert script.check_floors(script.Settings(), []) == code
    line = capsys.readouterr().out
    assert line.startswith(mark) and "softmax trains at 0.50 (spread 10 %) times" in line


def test_the_guard_measures_all_in_one_process(script: ModuleType) -> None:
    configs = {m: fill(RunConfig, values(script, m, 32)) for m in ("softmax", "no_mixer")}
    hardware = Hardware(configs["softmax"].hardware)
    times = step_times(configs, hardware, num_rounds=2)
    assert {m: len(t) for m, t in times.items()} == {"softmax": 2, "no_mixer": 2}
    assert all(t > 0 for own in times.values() for t in own)


def test_all_models_are_measured_by_default_and_peers_on_demand(script: ModuleType) -> None:
    models = script.chosen(script.Settings())
    assert models[0] == "softmax" and {"luna", "nystromformer", "fastformer"} < set(models)
    assert "transformer" not in models  # another name of softmax
    more = script.chosen(dataclasses.replace(script.Settings(), peers=True))
    assert more == [*models, *peers.PEERS]
    some = script.Settings(models=("luna", "performer:num_features=8"), peers=True)
    assert script.chosen(some) == ["luna", "performer:num_features=8", "performer_pytorch"]


def test_models_are_shown_as_multiples_of_their_peers(script: ModuleType) -> None:
    speeds = {"local": [3.0, 8.0], "local:window=8": [6.0, 8.0], "local_attention": [2.0, 4.0]}
    rounds = script.Rounds(dict.fromkeys(speeds), script.Settings(lengths=(64, 96)))
    rounds.measured = [
        {Key(model, 64, "train"): Measurement("ok", found[i]) for model, found in speeds.items()}
        for i in range(2)
    ]
    (title, table), (other, empty) = script.peer_tables(rounds)
    assert title.startswith("train, ") and other.startswith("inference, ")
    assert table.header == ["Model", "Peer", "64", "96"]
    assert table.rows == [
        ["local", "local_attention", "1.75 (spread 29 %)", "-"],
        ["local:window=8", "local_attention", "2.50 (spread 40 %)", "-"],
    ]
    assert {cell for row in empty.rows for cell in row[2:]} == {"-"}
    rounds.configs = {"luna": None}
    assert script.peer_tables(rounds) == []
