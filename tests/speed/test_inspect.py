"""What a model costs: sizes and costs against formulas by hand, and the command as a user meets it.

Letters of the formulas: L length, D width, F width of the feed-forward, M memory slots, H heads.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lra.build import make_model, make_task, num_params
from lra.cli import compose_config, typed
from lra.config import HardwareConfig
from lra.speed import cost
from lra.speed.flops import counting_flops
from lra.training.hardware import Hardware
from models.classifier import Classifier
from models.encoder import Encoder
from models.shape import Shape
from scripts import inspect_model
from tests import programs

ROOT = Path(__file__).resolve().parents[2]
CPU = Hardware(HardwareConfig(device="cpu", num_threads=1))
D, F, LAYERS, H = 64, 128, 2, 2  # of the default recipe
SHARED = {"embedding": 16 * D, "positions": 2000 * D, "final norm": 2 * D}
SHARED["head"] = D * 128 + 128 + 128 * 10 + 10


@pytest.fixture
def two_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


def build(*overrides: str) -> Classifier:
    config = typed(compose_config(["task=listops", *overrides]))
    return make_model(config, make_task(config))


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.call("scripts/inspect_model.py", *arguments, cwd=folder)


@pytest.mark.parametrize(
    ("overrides", "mixer", "norms", "extra"),
    [
        (["model=softmax"], 4 * (D * D + D), 4 * D, {}),
        (["model=luna"], 7 * (D * D + D), 6 * D, {"memory": 16 * D}),
        (["model=luna", "model.tie_kv=true"], 5 * (D * D + D), 6 * D, {"memory": 16 * D}),
        (["model=nystromformer"], 4 * (D * D + D) + H * 35, 4 * D, {}),
        (["model=fastformer"], 4 * (D * D + D) + 2 * H * D, 4 * D, {}),
    ],
    ids=["softmax", "luna", "tied luna", "nystromformer", "fastformer"],
)
def test_parameters_by_part(
    overrides: list[str], mixer: int, norms: int, extra: dict[str, int]
) -> None:
    model = build(*overrides)
    parts = cost.parameters_by_part(model)
    expected = SHARED | extra
    for i in (1, 2):
        expected |= {f"layer {i} mixer": mixer, f"layer {i} norms": norms}
        expected[f"layer {i} feed-forward"] = 2 * D * F + F + D
    assert parts == expected
    assert sum(parts.values()) == num_params(model)


def test_shared_and_fixed_parameters_count_once_or_not_at_all() -> None:
    tied = cost.parameters_by_part(build("shape.tie_layers=true"))
    assert tied["every layer mixer"] == 7 * (D * D + D) and "layer 1 mixer" not in tied
    shared = build("model=fastformer", "model.share_layers=true")
    parts = cost.parameters_by_part(shared)
    assert "layer 2 mixer" not in parts and sum(parts.values()) == num_params(shared)
    fixed = cost.parameters_by_part(build("shape.positions=sinusoidal", "shape.pooling=attention"))
    assert fixed["positions"] == 0 and fixed["pooling"] == D * D + D + D + 1


def softmax_flops(length: int) -> int:
    return 2 * length * 4 * D * D + 4 * length * length * D


def luna_flops(length: int, slots: int = 16) -> int:
    from_tokens, from_memory, attention = 4 * D * D, 3 * D * D, 4 * slots * D
    return 2 * length * from_tokens + 2 * slots * from_memory + 2 * length * attention


def nystromformer_flops(length: int, landmarks: int = 128) -> int:
    attention = 2 * (4 * landmarks * length * D) + 2 * landmarks * landmarks * D
    # Six steps of the inverse; the last is applied to the values, and three products with it.
    inverse = (5 * 4 + 1) * 2 * landmarks**3 * H + 4 * 2 * landmarks**2 * D
    convolution = 2 * length * (64 + 34) * D
    return 2 * length * 4 * D * D + attention + inverse + convolution


def fastformer_flops(length: int) -> int:
    return 2 * length * 4 * D * D + 2 * (2 * length * D * H + 2 * length * D)


def whole_flops(mixer_flops: int, length: int) -> int:
    """With the feed-forward of each layer, the mean over tokens and the head."""
    head = 2 * length * D + 2 * D * 128 + 2 * 128 * 10
    return LAYERS * (mixer_flops + 2 * length * 2 * D * F) + head


def costs_of(model: str, *lengths: int) -> cost.Costs:
    def make(length: int) -> Classifier:
        return build(f"model={model}", f"task.max_length={length}")

    return cost.costs(make, lengths, CPU)


def test_operations_of_softmax_equal_the_count_by_hand_at_every_length() -> None:
    found = costs_of("softmax", 640, 2048, 16384)
    assert found.hold and found.checked_at == cost.CHECKED
    for length, counted in found.by_length.items():
        assert counted.flops == whole_flops(softmax_flops(length), length)
    assert found.flops.growth(16384).startswith("quadratic")
    assert found.activations.growth(16384) == "linear in L"  # weights are computed again


@pytest.mark.parametrize(
    ("model", "mixer_flops"),
    [
        ("luna", luna_flops),
        ("nystromformer", nystromformer_flops),
        ("fastformer", fastformer_flops),
    ],
)
def test_operations_of_the_others_are_linear_and_no_more_than_the_papers_products(
    model: str, mixer_flops: Callable[[int], int]
) -> None:
    found = costs_of(model, 640, 2048, 16384)
    assert found.hold
    for length, counted in found.by_length.items():
        # Products in another order than the paper's save some, but not half.
        expected = whole_flops(mixer_flops(length), length)
        assert expected / 2 < counted.flops < 1.001 * expected, length
    assert found.flops.growth(16384) == found.activations.growth(16384) == "linear in L"


@pytest.mark.parametrize("model", ["softmax", "luna", "nystromformer", "fastformer"])
def test_a_training_step_has_three_times_the_operations(model: str) -> None:
    classifier = build(f"model={model}")
    rows = (torch.ones(1, 1, 512, dtype=torch.int64), torch.tensor([[512]]))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as step:
        classifier.eval()(*rows).sum().backward()
    forward = cost.count(classifier, 512, CPU).flops
    assert step.get_total_flops() == pytest.approx(3 * forward, rel=0.05)


def test_activations_are_what_training_keeps() -> None:
    """A feed-forward network, whose kept tensors can be counted by hand."""

    class Plain(nn.Module):
        def __init__(self, shape: Shape) -> None:
            super().__init__()

        def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
            return 2 * x_BLD  # a factor is no tensor: nothing is kept

    shape = Shape(
        vocab_size=9, max_length=4096, d_model=D, d_ff=F, num_layers=1, dropout=0.0,
        positions="none", head_hidden=(), activation="relu",
    )  # fmt: skip
    model = Classifier(Encoder(shape, lambda: Plain(shape)), shape, 2)
    costs = {n: cost.count(model, n, CPU).activation_bytes for n in (512, 1024)}
    # A token's id; the inputs of three norms, with mean and deviation; those of both maps of the
    # feed-forward, the second of which is all that relu keeps; the weight in the mean.
    row = 8 + 3 * (4 * D + 4 + 4) + 4 * D + 4 * F + 4
    assert costs[1024] - costs[512] == pytest.approx(512 * row, rel=0.01)


def test_half_precision_keeps_fewer_bytes() -> None:
    model = build("model=fastformer")
    half = Hardware(HardwareConfig(device="cpu", precision="bf16", num_threads=1))
    full_bytes = cost.count(model, 1024, CPU).activation_bytes
    assert cost.count(model, 1024, half).activation_bytes < 0.8 * full_bytes


def test_polynomial_goes_through_its_points_and_says_how_it_grows() -> None:
    found = cost.Polynomial.through({n: 7 + 5 * n + 3 * n * n for n in (2, 5, 11)})
    assert found(1000) == 7 + 5_000 + 3_000_000
    assert str(found) == "7 + 5 L + 3 L²"
    assert found.growth(1000) == "quadratic in L; the square outweighs the linear part from 2 on"
    found = cost.Polynomial.through({n: 9 * n // 2 - 4 for n in (2, 4, 8)})
    assert str(found) == "-4 + 4.50 L" and found.growth(10**6) == "linear in L"


def test_a_model_with_many_landmarks_is_counted_at_longer_lengths() -> None:
    def make(length: int) -> Classifier:
        return build("model=nystromformer", "model.num_landmarks=600", "model.pinv_iterations=1",
                     f"task.max_length={length}")  # fmt: skip

    found = cost.costs(make, [2048, 30_000], CPU)
    assert found.hold and found.checked_at == 2 * cost.CHECKED
    assert found.flops.growth(30_000) == "linear in L"
    assert found.by_length[2048] == cost.count(make(2048), 2048, CPU)


def test_each_length_is_counted_in_a_model_made_for_it() -> None:
    """BigBird with few blocks attends to everything, with more it does not."""

    def make(length: int) -> Classifier:
        return build("model=bigbird", "model.block_size=128", f"task.max_length={length}")

    found = cost.costs(make, [1024, 4096], CPU)
    for length in (1024, 4096):
        assert found.by_length[length] == cost.count(make(length), length, CPU)
    assert found.counted >= {1024, 4096}


def test_costs_that_follow_no_polynomial_give_no_formula() -> None:
    class Odd(nn.Module):
        """Its map is applied ever more often as the input grows."""

        def __init__(self, shape: Shape) -> None:
            super().__init__()
            self.map = nn.Linear(shape.d_model, shape.d_model)

        def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
            for _ in range(x_BLD.shape[1] ** 2 // 2**17):
                x_BLD = self.map(x_BLD)
            return x_BLD

    def make(length: int) -> Classifier:
        shape = Shape(vocab_size=9, max_length=length, d_model=4, d_ff=4, num_layers=1)
        return Classifier(Encoder(shape, lambda: Odd(shape)), shape, 2)

    found = cost.costs(make, [1024, 100_000], CPU)
    assert not found.hold and list(found.by_length) == [1024]
    assert not cost.run_cost(found, typed(compose_config([])).train, 2000, num_sequences=1)
    text = "\n".join(cost.cost_table(found, [1024, 100_000], 1))
    assert "beyond 1,024 tokens they are left out" in text
    # Unless a run of them is quick.
    assert list(cost.costs(make, [1024, 16_384], CPU).by_length) == [1024, 16_384]


class Transforms(nn.Module):
    """Of each feature, there and back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()

    def forward(self, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x_BLD, n=2 * x_BLD.shape[1], dim=1)
        return torch.fft.irfft(spectrum, n=2 * x_BLD.shape[1], dim=1)[:, : x_BLD.shape[1]]


def test_a_formula_that_the_longest_count_contradicts_is_none() -> None:
    """Length times its logarithm is near a square where formulas are fitted, and not beyond."""

    def make(length: int) -> Classifier:
        shape = Shape(vocab_size=9, max_length=length, d_model=16, d_ff=64, num_layers=1)
        return Classifier(Encoder(shape, lambda: Transforms(shape)), shape, 2)

    assert cost.costs(make, [1024], CPU).hold
    found = cost.costs(make, [1024, 16_384, 10**9], CPU)
    assert not found.hold and list(found.by_length) == [1024, 16_384]
    text = "\n".join(cost.cost_table(found, [1024, 16_384, 10**9], 1))
    assert "quadratic" not in text and "beyond 16,384 tokens they are left out" in text


def test_fourier_transforms_count_by_their_length() -> None:
    shape = Shape(vocab_size=9, max_length=64, d_model=4, d_ff=4, num_layers=1, head_hidden=())
    model = Classifier(Encoder(shape, lambda: Transforms(shape)), shape, 2)
    transforms = 2 * 4 * 2.5 * 128 * 7  # there and back, features, n log2 n of 128
    maps, pooling, head = 2 * 2 * 64 * 4 * 4, 2 * 64 * 4, 2 * 4 * 2
    assert cost.count(model, 64, CPU).flops == transforms + maps + pooling + head


def s5_flops(length: int, states: int = 32, chunk: int = 32) -> int:
    maps = 2 * length * (2 * states * D + 4 * states * D + D * D)  # to both runs, from them, gate
    num_chunks = length // chunk
    assert num_chunks == chunk  # their last states are one chunk
    inside = 4 * 2 * states * chunk * chunk * (num_chunks + 1)  # of real and imaginary parts
    carried = 2 * 2 * states * num_chunks * 2 * chunk
    return maps + 2 * (inside + carried)


def test_products_in_place_and_in_other_threads_count(two_threads: None) -> None:
    model = build("model=s5")
    assert cost.count(model, 1024, CPU).flops == whole_flops(s5_flops(1024), 1024)
    assert torch.get_num_threads() == 2
    a, b = torch.ones(2, 3, 5), torch.ones(2, 5, 7)
    with counting_flops() as counter:
        torch.zeros(3, 7).addmm_(a[0], b[0])
    assert counter.get_total_flops() == 2 * 3 * 5 * 7
    with counting_flops() as counter:
        torch.zeros(2, 3, 7).baddbmm_(a, b, alpha=-1)
    assert counter.get_total_flops() == 2 * 2 * 3 * 5 * 7


def test_a_whole_run_is_counted_at_its_longest_input() -> None:
    """By hand: three passes for an example trained on, one for each that is evaluated."""
    train = typed(compose_config(["task=listops", "train.eval_every=2000"])).train
    passes = whole_flops(softmax_flops(2000), 2000)
    (line,) = cost.run_cost(costs_of("softmax", 2000), train, 2000, num_sequences=1)
    assert line == (
        f"a run, if all inputs have 2,000 tokens: {3 * 5000 * 32 * passes / 1e15:.3g} PFLOP in "
        f"training (5,000 steps of 32); 3 evaluations: {3 * 1000 * passes / 1e12:.3g} TFLOP for "
        "each 1,000 validation examples"
    )


def test_hours_by_card_are_operations_over_a_share_of_the_peak() -> None:
    train = typed(compose_config(["task=listops", "train.eval_every=2000"])).train
    passes = whole_flops(softmax_flops(2000), 2000)
    found = costs_of("softmax", 2000)
    (line,) = cost.run_hours(found, train, 2000, num_val=700)
    work = (3 * 5000 * 32 + 3 * 700) * passes / 3600
    assert "700 validation examples" in line and "an estimate" in line
    assert f"A100 {work / (0.4 * 19.5e12):.2f} to {work / (0.1 * 19.5e12):.1f}, H100 SXM" in line
    # A small model waits for its launches: 5,000 steps of 5 to 20 ms.
    (line,) = cost.run_hours(found, replace(train, batch_size=1), 2000, num_val=None)
    assert f"RTX 4090 {5000 * 0.005 / 3600:.2f} to {5000 * 0.02 / 3600:.2f}" in line
    assert not cost.run_hours(found, train, 1999, num_val=None)


def test_a_whole_run_shorter_than_the_formulas_hold_is_counted(tmp_path: Path) -> None:
    """Nystromformer with fewer tokens than landmarks: the formula would give 19 times as much."""
    done = call(tmp_path, "model=nystromformer", "task.max_length=100", "--lengths=256")
    assert done.returncode == 0, done.stderr
    passes = cost.count(build("model=nystromformer", "task.max_length=100"), 100, CPU).flops
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    (line,) = [line for line in lines if line.startswith("a run, if all")]
    assert f"100 tokens: {3 * 5000 * 32 * passes / 1e12:.3g} TFLOP in training" in line
    assert [line.split()[0] for line in lines if line.endswith((" a run", " formula"))] == ["256"]


def test_the_report_of_the_default_run(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (
        "luna on listops, recipe nystromformer",
        "layer 1 mixer 29,120 16,640",
        "total 231,946 205,706",
        "+12.8 % against softmax: over the 10 % rule",
        "token ids [1, 1, 1024]",
        "layer 2 [1, 1024, 64], [1, 16, 64]",
        "pooled [1, 64]",
        "head [1, 10]",
    ):
        assert line in lines, done.stdout
    (check,) = [line for line in lines if line.startswith("formulas against a run of 2,048")]
    assert check.count("+0.00 % of") == 2
    assert any(
        line.startswith("a run, if all inputs have 2,000 tokens: 95.4 TFLOP") for line in lines
    )
    assert [line.split()[0] for line in lines if line.endswith((" a run", " formula"))] == [
        "1,024", "2,048", "4,096", "8,192", "16,384",
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_model_that_one_recipe_refuses_is_left_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_model, "all_models", lambda: ["softmax", "bigbird"])
    words = ["model=all", "task=listops", "task.max_length=256"]
    lines = inspect_model.overview(words, [64]).split("\n")
    assert "- " in next(line for line in lines if line.startswith("bigbird"))
    assert lines[-2] == "refused, so left out"
    assert lines[-1].startswith("model=bigbird recipe=lra: model.num_random=3: only ")
    assert sum(line.startswith("bigbird") for line in lines) == 3  # counted by its own recipe
    lines = inspect_model.overview([*words, "recipe=lra"], [64]).split("\n")
    assert sum(line.startswith("bigbird") for line in lines) == 1


def test_all_models_have_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_model, "all_models", lambda: ["softmax", "luna"])
    lines = [
        " ".join(line.split()) for line in inspect_model.overview(["model=all"], [64]).split("\n")
    ]
    passes = 3 * 5000 * 32 + 100 * 2000  # each time 2,000 validation examples
    work = passes * whole_flops(softmax_flops(2000), 2000) / 3600
    shares = [(work / (0.4e12 * peak), work / (0.1e12 * peak)) for peak in (19.5, 67, 82.6, 12.7)]
    hours = [" to ".join(f"{x:.1f}" if x >= 0.1 else f"{x:.2f}" for x in pair) for pair in shares]
    assert lines[1] == "parameters lra luna mega nystromformer s4 s5"
    assert " 205,706 " in lines[2] and lines[2].startswith("softmax ")
    assert " +12.8 %* " in lines[3] and lines[3].startswith("luna ")
    assert lines[5:8] == [
        "operations of a forward pass by length, listops, recipe nystromformer",
        "FLOPs a token 64",
        f"softmax {whole_flops(softmax_flops(64), 64) / 64:,.0f}",
    ]
    assert lines[8].startswith("luna ") and lines[10].startswith(
        "hours of a run (training, and 2,000"
    )
    assert lines[11:13] == ["hours A100 H100 SXM RTX 4090 RTX 3060", f"softmax {' '.join(hours)}"]
    assert lines[13].startswith("luna ") and len(lines) == 14


def test_the_report_of_a_changed_pair_task(tmp_path: Path) -> None:
    done = call(
        tmp_path, "task=retrieval", "model.tie_kv=true", "shape.d_model=32", "--lengths", "64,256"
    )
    assert done.returncode == 0, done.stderr
    assert "luna on retrieval" in done.stdout and "within the 10 % rule" in done.stdout
    assert "not apples to apples: shape.d_model=32 (recipe: 64)" in done.stdout
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "embedding [2, 1024, 32]" in lines and "pooled [1, 128]" in lines
    length, flops, a_token = [line for line in lines if line.startswith("256 ")][0].split()[:3]
    whole, share = (int(text.replace(",", "")) for text in (flops, a_token))
    assert share == round(whole / 512)
    assert any(line.startswith("a run, if all inputs have 2 x 4,000 tokens: ") for line in lines)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("model.tie_kvv=true", ["model.tie_kvv=true: unknown key", "did you mean 'model.tie_kv'"]),
        ("model=lunna", ["model=lunna", "did you mean 'luna'"]),
        ("--lengths=1k", ["--lengths=1k", "expected"]),
        ("--lengths=0", ["--lengths=0", "expected"]),
        ("model.projection_length=0", ["model.projection_length=0", "at least 1"]),
    ],
)
def test_wrong_input_gets_one_message(tmp_path: Path, argument: str, expected: list[str]) -> None:
    done = call(tmp_path, argument)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    for text in expected:
        assert text in done.stderr
