"""How far a trained model looks: test rows seen through windows, shuffled, with tokens replaced.

Every draw comes from the seed, the probe and the example's number, so nothing depends on batches.
Lengths are the examples' own, and padding, as much as the run evaluates with, is never touched.

Shapes: N examples, S sequences of each, L length, C classes, T replaced tokens, B batch, D d_model.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lra.build import make_model, model_name
from lra.console import has_bars
from lra.results.floors import Floors, floors_path
from lra.results.floors import load as load_floors
from lra.results.probes import Agreement, Attention, Influence, Probes, Shuffle, Window
from lra.results.statistics import sign_test
from lra.tasks.batches import TokenArrays, eval_batches
from lra.tasks.cache import Dataset, prepare, stratified
from lra.trained import TrainedModel
from lra.training import checkpoint
from lra.training.checkpoint import seed_everything
from models.classifier import Classifier

SMALLEST_WINDOW = 16
NUM_CUTS = 5  # of a window: evenly spread from the first token to the last
SHUFFLES, REPLACED = 2, 3  # keep the draws of different probes apart
MAX_LENGTH_OF_ATTENTION = 4096  # beyond which weights are not formed

Sequences = tuple[np.ndarray, ...]  # raw values of an example's sequences


@dataclass(frozen=True)
class Rows:
    """Test examples and how a model reads them."""

    examples: list[Sequences]
    numbers_N: np.ndarray  # in the test split
    labels_N: np.ndarray
    max_length: int
    batch_size: int
    device: torch.device
    seed: int
    pad_to: int | None = None  # as the run's own evaluation pads

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sequence) for example in self.examples for sequence in example)

    def draws(self, probe: int, detail: int, example: int, sequence: int) -> np.random.Generator:
        """Random numbers of one sequence in one probe."""
        number = int(self.numbers_N[example])
        return np.random.default_rng([self.seed, probe, detail, number, sequence])

    def some(self, fitting: list[int], size: int) -> list[int]:
        """Up to `size` of these examples, each class by its share: they may lie class by class."""
        return [fitting[i] for i in stratified(self.labels_N[fitting], size)]


@torch.no_grad()
def logits(model: Classifier, examples: list[Sequences], rows: Rows) -> np.ndarray:
    """Of every example, [N, C] in float64."""
    arrays = TokenArrays.of(examples, len(examples[0]), rows.max_length)
    logits_NC = np.zeros((len(examples), model.num_classes))
    for indices in eval_batches(arrays.lengths, rows.batch_size):
        batch = arrays.batch(indices, rows.pad_to).to(rows.device)
        logits_NC[indices] = model(batch.tokens_BSL, batch.lengths_BS).double().cpu().numpy()
    return logits_NC


def share(right_N: np.ndarray) -> tuple[float, float]:
    """Share of examples that are right, and its standard error."""
    accuracy = float(right_N.mean())
    return accuracy, math.sqrt(accuracy * (1 - accuracy) / len(right_N))


def doubling(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first ... up to `last`."""
    return [first << i for i in range(max(0, (last // first).bit_length()))]


def own_floors(path: Path, data: Dataset) -> Floors | None:
    """The floors that lie there, if they are of the test examples that these data have.

    A limited split has the fingerprint of the whole and other examples.
    """
    floors = load_floors(path) if path.exists() else None
    here = data.fingerprint, data.num_examples["test"]
    there = floors and (floors.data.fingerprint, floors.data.num_examples["test"])
    return floors if there == here else None


def beside_floors(right_N: np.ndarray, rows: Rows, floors: Floors | None) -> list[Agreement]:
    """The run beside each rule, on all of the rows and on those of each class."""
    found = []
    for floor in (*floors.floors, *floors.ladder) if floors else ():
        rule_N = floor.test.correct_N[rows.numbers_N]
        for label in (None, *np.unique(rows.labels_N).tolist()):
            of_class_N = np.full(len(right_N), True) if label is None else rows.labels_N == label
            ours_N, theirs_N = right_N[of_class_N], rule_N[of_class_N]
            only_run, only_floor = int((ours_N & ~theirs_N).sum()), int((theirs_N & ~ours_N).sum())
            z, p = sign_test(only_run, only_floor)
            agreement = float((ours_N == theirs_N).mean())
            found.append(
                Agreement(floor.name, label, len(ours_N), agreement, only_run, only_floor, z, p)
            )
    return found


def windows(model: Classifier, rows: Rows) -> Iterator[Window]:
    """Accuracy by what is shown: the first, the last, or others of `size` tokens."""
    for size in doubling(SMALLEST_WINDOW, rows.longest):
        by_cut = [
            logits(model, [tuple(cut(s, size, place) for s in e) for e in rows.examples], rows)
            for place in np.linspace(0, 1, NUM_CUTS)
        ]
        rights = [logits_NC.argmax(axis=1) == rows.labels_N for logits_NC in by_cut]
        mean_N = np.mean(by_cut, axis=0).argmax(axis=1) == rows.labels_N
        yield Window(size, "first", *share(rights[0]))
        yield Window(size, "last", *share(rights[-1]))
        yield Window(size, "best", *max(map(share, rights)))
        yield Window(size, "mean", *share(mean_N))


def cut(sequence: np.ndarray, size: int, place: float) -> np.ndarray:
    """`size` tokens, from the first (place 0) to the last ones (place 1); all of a shorter one."""
    start = round(place * max(0, len(sequence) - size))
    return sequence[start : start + size]


def shuffles(model: Classifier, rows: Rows) -> Iterator[Shuffle]:
    """Accuracy after blocks have changed places, and after tokens have within blocks."""
    for block in doubling(1, rows.longest // 2):
        for kind in ("blocks", "within"):
            if kind == "within" and block == 1:
                continue  # changes nothing
            moved = [
                tuple(shuffled(sequence, block, kind, rows.draws(SHUFFLES, block, i, s))
                      for s, sequence in enumerate(example))
                for i, example in enumerate(rows.examples)
            ]  # fmt: skip
            right_N = logits(model, moved, rows).argmax(axis=1) == rows.labels_N
            yield Shuffle(block, kind, *share(right_N))


def shuffled(sequence: np.ndarray, block: int, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Whole blocks in another order, the shorter last one too; or tokens, inside each block."""
    parts = [sequence[i : i + block] for i in range(0, len(sequence), block)]
    if kind == "blocks":
        parts = [parts[i] for i in rng.permutation(len(parts))]
    else:
        parts = [rng.permutation(part) for part in parts]
    return np.concatenate([sequence[:0], *parts])


@torch.no_grad()
def influence(
    model: Classifier,
    untrained: Classifier,
    rows: Rows,
    *,
    num_values: int,
    num_replaced: int,
) -> list[Influence]:
    """How much outputs change by their distance from a replaced token, and logits by its place.

    Each example has one of its tokens replaced at a random place and, for logits, the tokens at
    the distances 0, 1, 2, 4 ... behind its first; only the first sequence of a pair. Nothing where
    no example has two tokens.
    """
    fitting = [i for i, e in enumerate(rows.examples) if len(e[0]) > 1]
    if not fitting:
        return []
    chosen = rows.some(fitting, num_replaced)
    distances = [0, *doubling(1, rows.longest - 1)]
    trained_d, untrained_d = (
        _changes_of_outputs(network, rows, chosen, distances, num_values)
        for network in (model, untrained)
    )
    plain = [rows.examples[i] for i in chosen]
    before_NC = logits(model, plain, rows)
    spread = float(before_NC.std(axis=0).mean()) or 1.0
    found = []
    for distance in distances:
        reaching = [k for k, example in enumerate(plain) if len(example[0]) > distance]
        changes_T = np.zeros(0)
        if reaching:
            replaced = [
                replace_token(plain[k], distance, num_values, rows.draws(REPLACED, 1, chosen[k], 0))
                for k in reaching
            ]
            after_NC = logits(model, replaced, rows)
            changes_T = np.abs(after_NC - before_NC[reaching]).mean(axis=1) / spread
        positions, positions_error = mean_and_error(trained_d[distance])
        by_place, by_place_error = mean_and_error(changes_T)
        found.append(Influence(
            distance, positions, positions_error, by_place, by_place_error,
            mean_and_error(untrained_d[distance])[0],
        ))  # fmt: skip
    return found


def _changes_of_outputs(
    model: Classifier, rows: Rows, chosen: list[int], distances: list[int], num_values: int
) -> dict[int, np.ndarray]:
    """By distance, of each replaced token, the change of outputs that far away; over their size.

    None of a model whose outputs are not those of tokens.
    """
    found: dict[int, list[float]] = {distance: [] for distance in distances}
    if not model.encoder.rows_are_tokens:
        chosen = []
    for start in range(0, len(chosen), rows.batch_size):
        part = chosen[start : start + rows.batch_size]
        plain: list[Sequences] = [(rows.examples[i][0],) for i in part]
        generators = [rows.draws(REPLACED, 0, i, 0) for i in part]
        places = [int(rng.integers(len(e[0]))) for rng, e in zip(generators, plain, strict=True)]
        replaced = [
            replace_token(e, place, num_values, rng)
            for e, place, rng in zip(plain, places, generators, strict=True)
        ]
        before_BLD, after_BLD = (outputs(model, examples, rows) for examples in (plain, replaced))
        change_BL = (after_BLD - before_BLD).norm(dim=2) / before_BLD.norm(dim=2).clamp(min=1e-12)
        change = change_BL.double().cpu().numpy()
        for row, (example, place) in enumerate(zip(plain, places, strict=True)):
            for distance in distances:
                sides = {place - distance, place + distance}
                seen = [change[row, t] for t in sides if 0 <= t < len(example[0])]
                if seen:
                    found[distance].append(float(np.mean(seen)))
    return {distance: np.array(values) for distance, values in found.items()}


def outputs(model: Classifier, examples: list[Sequences], rows: Rows) -> Tensor:
    """What the encoder says of each token of single sequences; [B, L, D]."""
    arrays = TokenArrays.of(examples, 1, rows.max_length)
    batch = arrays.batch(np.arange(len(examples)), rows.pad_to).to(rows.device)
    tokens_BL = batch.tokens_BSL[:, 0]
    mask_BL = torch.arange(tokens_BL.shape[1], device=rows.device) < batch.lengths_BS
    x_BLD = model.encoder(tokens_BL, mask_BL)
    return x_BLD[:, x_BLD.shape[1] - tokens_BL.shape[1] :]  # behind a class token


def replace_token(
    example: Sequences, place: int, num_values: int, rng: np.random.Generator
) -> Sequences:
    """The example with another value at one place of its first sequence."""
    first = example[0].copy()
    first[place] = (first[place].astype(int) + rng.integers(1, num_values)) % num_values
    return (first, *example[1:])


def mean_and_error(values: np.ndarray) -> tuple[float | None, float | None]:
    """Mean and standard error; None where there are too few values."""
    if not len(values):
        return None, None
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(values.mean()), error


@torch.no_grad()
def attention(model: Classifier, rows: Rows, num_examples: int) -> list[Attention]:
    """Mean distance of what each head reads, of models whose mixers can show their weights.

    Those have `attention_weights(x_BLD, mask_BL) -> [B, H, L, L]`.
    """
    layers: list[nn.Module] = [getattr(b, "mixer", b) for b in model.encoder.layers()]
    if not all(hasattr(layer, "attention_weights") for layer in layers):
        return []
    fitting = [i for i, e in enumerate(rows.examples) if 1 < len(e[0]) <= MAX_LENGTH_OF_ATTENTION]
    distances: list[list[np.ndarray]] = [[] for _ in layers]
    uniform = []
    for example in (rows.examples[i] for i in rows.some(fitting, num_examples)):
        with _inputs_of(layers) as seen:
            outputs(model, [(example[0],)], rows)
        for found, layer, (x_BLD, mask_BL) in zip(distances, layers, seen, strict=True):
            # One example alone, so padding to a multiple is cut off.
            num_rows = int(mask_BL.sum())
            weights: Any = layer.attention_weights
            weight_HLL = weights(x_BLD[:, :num_rows], mask_BL[:, :num_rows])[0]
            place_L = torch.arange(num_rows, device=x_BLD.device)
            distance_LL = (place_L - place_L[:, None]).abs().to(weight_HLL.dtype)
            found.append((weight_HLL * distance_LL).sum(dim=2).mean(dim=1).double().cpu().numpy())
        uniform.append(float(distance_LL.double().mean()))
    result = []
    for number, found in enumerate(distances, start=1):
        by_head_NH = np.stack(found) if found else np.zeros((0, 0))
        for head in range(by_head_NH.shape[1]):
            mean, error = mean_and_error(by_head_NH[:, head])
            assert mean is not None
            result.append(Attention(number, head + 1, mean, error or 0.0, float(np.mean(uniform))))
    return result


@contextlib.contextmanager
def _inputs_of(modules: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, the list gets what each of some modules is called with, in the order of the calls."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs))
        for module in dict.fromkeys(modules)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def probe(
    run: Path, *, num_examples: int, num_replaced: int, seed: int, results: Path | None
) -> tuple[Probes, Path]:
    """Every probe of a trained run, on the test split of its own data; and where results lie.

    Args:
        run: its folder.
        num_examples: of test, each class by its share.
        num_replaced: of these, in how many a token is replaced, and attention is looked at.
        seed: of cuts, shuffles and replacements.
        results: where the floors lie; None: as the run has it.

    Raises:
        ValueError: no such run, no weights in it, or the data are not the run's own.
    """
    started = time.monotonic()
    trained = TrainedModel(run)
    config, task = trained.config, trained.task
    data = prepare(task, config.paths.cache)
    state, _ = checkpoint.load_latest(run / "checkpoints")
    own = state["identity"]["data"] if state else None
    if own != data.fingerprint:
        raise ValueError(
            f"{run}: trained on other data (fingerprint {str(own)[:12]}) than task {task.name} has "
            f"now ({data.fingerprint[:12]}); probes need the run's own"
        )
    test = data.test
    numbers_N = stratified(test.labels, num_examples)
    rows = Rows(
        [tuple(test.sequence(i, s) for s in range(task.num_sequences)) for i in numbers_N.tolist()],
        numbers_N, test.labels[numbers_N], task.max_length, config.train.batch_size, trained.device,
        seed, pad_to=task.max_length if config.train.pad_to_max else None,
    )  # fmt: skip
    seed_everything(config.seed)
    untrained = make_model(config, task).to(trained.device).eval()

    stages = tqdm(total=5, unit="probe", disable=not has_bars())
    with stages:
        right_N = logits(trained.model, rows.examples, rows).argmax(axis=1) == rows.labels_N
        stages.update()
        by_window = list(windows(trained.model, rows))
        stages.update()
        by_shuffle = list(shuffles(trained.model, rows))
        stages.update()
        by_distance = influence(trained.model, untrained, rows, num_values=task.num_values,
                                num_replaced=num_replaced)  # fmt: skip
        stages.update()
        by_head = attention(trained.model, rows, num_replaced)
        stages.update()
    results = results or config.paths.results
    floors = own_floors(floors_path(results, task.name), data)
    accuracy, error = share(right_N)
    reach = trained.model.encoder.reach
    found = Probes(
        run_id=run.resolve().name, task=task.name, model=model_name(config.model),
        fingerprint=data.fingerprint, step=trained.step, seed=seed,
        reach=None if reach is None else sum(reach),
        num_examples=len(numbers_N), accuracy=accuracy, error=error,
        seconds=round(time.monotonic() - started, 1),
        floors=beside_floors(right_N, rows, floors), windows=by_window,
        shuffles=by_shuffle, influence=by_distance, attention=by_head,
    )  # fmt: skip
    return found, results
