"""A model pretrained to tell the next token goes on from a prompt, as its parallel form would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lra.cli import compose_config, typed
from lra.generation import bits_per_token, continuation, draw, load_predictor
from lra.job import run_job
from lra.plan import Reference
from lra.tasks.cache import prepare
from lra.tasks.image import Image
from lra.tasks.listops import ListOps
from lra.tasks.retrieval import Retrieval
from lra.tasks.text import Text
from tests.models.test_stepwise import size
from tests.test_job import SOFTMAX
from tests.test_trained import TINY

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "generate.py"
MAX_LENGTH = 60
Call = Callable[..., tuple[str, str]]


def trained(folder: Path, *words: str) -> Path:
    places = [f"paths.{p}={folder / p}" for p in ("data", "cache", "outputs", "results")]
    config = typed(compose_config([*TINY, *places, "train.num_steps=4", *words]))
    return folder / "outputs" / run_job(config, [], Reference(None, SOFTMAX)).run_id


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = [
        "task=text", f"task.max_length={MAX_LENGTH}", "model=luna", "model.causal=true",
        "pretrain=next", "pretrain.num_steps=30", "pretrain.warmup_steps=2", "pretrain.lr=0.02",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lra.tasks.cache.available_cores", lambda: 1)
        return trained(tmp_path_factory.mktemp("next"), *words)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    main, threads = runpy.run_path(str(SCRIPT))["main"], torch.get_num_threads()

    def generate(*words: str | Path) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *map(str, words)])
        try:
            main()
        finally:
            torch.set_num_threads(threads)
        return tuple(capsys.readouterr())

    return generate


@torch.no_grad()
def test_each_token_is_what_the_parallel_form_says_of_all_before_it(run: Path) -> None:
    _, _, predictor = load_predictor(run)
    values = list(b"the ")
    drawn = list(continuation(predictor, values, 40, temperature=0))
    assert len(drawn) == 40
    for value in drawn:
        tokens_11L = torch.tensor([[values]]) + 1
        last_111 = torch.tensor([[[len(values) - 1]]])
        logits_V = predictor(tokens_11L, torch.tensor([[len(values)]]), last_111)[0, 0, 0]
        assert value == logits_V.argmax()
        values.append(value)
    # Trained, if little: real letters cost less than the eight bits of any byte.
    assert bits_per_token(predictor, list(b"tone as in")) < 6
    state, sizes = predictor.start(1), set()
    for value in values:
        _, state = predictor.step(torch.tensor([[value + 1]]), state)
        sizes.add(size(state))
    assert len(sizes) == 1 and state.position == len(values)


def test_draws_follow_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.tensor([0.0, 3.0, 2.0, 1.0])

    def shares(temperature: float, top_k: int | None = None) -> torch.Tensor:
        draws = [draw(logits_V, temperature, top_k, generator) for _ in range(600)]
        return torch.bincount(torch.tensor(draws), minlength=4) / len(draws)

    assert (shares(1.0) - logits_V.softmax(dim=0)).abs().max() < 0.05
    assert (shares(2.0) - (logits_V / 2).softmax(dim=0)).abs().max() < 0.05
    first_two_V = torch.tensor([-torch.inf, 3.0, 2.0, -torch.inf]).softmax(dim=0)
    assert (shares(1.0, 2) - first_two_V).abs().max() < 0.05
    for temperature, top_k in ((0.0, None), (1e-300, None), (1.0, 1)):
        assert shares(temperature, top_k)[1] == 1


def test_the_script_continues_a_prompt(run: Path, call: Call) -> None:
    _, task, predictor = load_predictor(run)
    printable = runpy.run_path(str(SCRIPT))["printable"]
    prompt = list("tone café".encode())
    for words, seed in ((["seed=0"], 0), ([], 0), (["seed=6"], 6)):
        out, err = call(run, "prompt=tone café", "num_tokens=30", "top_k=50", *words)
        values = [*prompt, *continuation(predictor, prompt, 30, top_k=50, seed=seed)]
        assert out == printable(task.decode(np.array(values, np.uint8))) + "\n"
        assert "10 tokens read and 30 drawn in" in err and "bits a token" in err
    assert out != call(run, "prompt=tone café", "num_tokens=30", "top_k=50")[0]
    # As many as there are places, however many that is.
    assert f" {MAX_LENGTH - 1} drawn" in call(run, "prompt=t")[1]


def test_without_a_prompt_it_continues_a_test_example(run: Path, call: Call) -> None:
    config, task, _ = load_predictor(run)
    whole = prepare(task, config.paths.cache).test.sequence(2, 0)
    assert len(whole) == MAX_LENGTH
    out, err = call(run, "example=2")
    assert out.startswith(task.decode(whole[:30])) and "30 tokens read and 30 drawn" in err


def test_what_is_shown_early_stays_and_commands_no_terminal(tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT))
    values = [*"aé€😀".encode(), 0xE2, 0x82, 0xF0, *b"bcdef"]
    task = Text(data_dir=tmp_path)
    final = script["decoded"](task, values)
    shown = [script["settled_text"](task, values[:n]) for n in range(len(values) + 1)]
    assert final == "aé€😀\\xe2\\x82\\xf0bcdef" and all(final.startswith(text) for text in shown)
    assert shown[-1] == final[:-3] and shown[4] == "a"
    assert script["printable"]("a\x1b[2J\tb\n\x7fé") == "a\\x1b[2J\tb\n\\x7fé"


@pytest.mark.parametrize(
    "words, expected",
    [
        ("prompt=", "prompt=: task 'text': expected something .* a test example is continued"),
        ("tone", "tone: expected key=value, as 'prompt=tone'"),
        ("promt=a", "did you mean 'prompt'"),
        ("prompt=a num_tokens=60", "num_tokens=60 behind a prompt of 1: .*max_length=60"),
        (f"prompt={'a' * 70}", "behind a prompt of 70"),
        ("num_tokens=0", "num_tokens=0: expected at least 1"),
        ("num_tokens=2.5", "expected an integer"),
        ("temperature=-1", "temperature=-1.0: expected at least 0"),
        ("temperature=NaN", "expected at least 0"),
        ("top_k=0", "top_k=0"),
        ("example=41", "example=41: there are 41, from 0"),
    ],
)
def test_wrong_words_are_named(run: Path, call: Call, words: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        call(run, *words.split())


def test_runs_that_cannot_go_on_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no such run; did you mean '{run}'"):
        load_predictor(run.with_name(run.name[:-1]))
    config = (run / "config.yaml").read_text()
    for text, expected in (
        (config, "no pretrained.pt in it"),
        (config.replace("seed:", "sead:"), f"{tmp_path}/config.yaml: sead=0: unknown key"),
        (config[: config.index("pretrain:")], "a run with pretrain=none, expected pretrain=next"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=expected):
            load_predictor(tmp_path)


def test_prompts_of_each_task_are_beginnings(tmp_path: Path) -> None:
    listops = ListOps(data_dir=tmp_path)
    assert bytes(listops.encode_prompt("[MAX 4 [MIN 2]")) == bytes([11, 4, 10, 2, 14])
    with pytest.raises(ValueError, match="unknown symbol"):
        listops.encode_prompt("[MAX 4 tail")
    for decoded, expected in ((False, b"b'text"), (True, b"text")):
        retrieval = Retrieval(data_dir=tmp_path, decode_literals=decoded)
        assert retrieval.encode_prompt("text") == expected
    with pytest.raises(ValueError, match="expected an array"):
        Image(data_dir=tmp_path).encode_prompt("text")
