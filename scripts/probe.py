"""How far trained runs look: beside rules, through windows, after shuffles, and token by token.

python scripts/probe.py outputs/RUN_ID
python scripts/probe.py outputs/RUN_ID outputs/OTHER --examples=500

On the test split of the run's own data. Writes <paths.results>/probes/RUN_ID.json, which
scripts/make_tables.py turns into pictures, and prints:

    beside each rule of results/floors/ (scripts/floors.py): a sign test, example by example; beside
        the rule that it is most alike, by class too
    accuracy where only the first, the last, or some other tokens are shown
    accuracy after blocks of tokens were shuffled, or tokens within blocks
    how much outputs change by their distance from a replaced token, fresh and after training
    mean distance of attention, of models that form its weights
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lra  # noqa: E402, F401  # first: it says what to do where packages are missing

# isort: split
from lra.results import probes as stored  # noqa: E402
from lra.results.markdown import Table  # noqa: E402
from lra.script import Parser, run_script  # noqa: E402


def percent(value: float, error: float | None = None) -> str:
    """A fraction in percent, with its standard error."""
    return f"{100 * value:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def small(value: float | None, error: float | None = None) -> str:
    """A change of two digits, or with as many decimals as its standard error of one digit."""
    if value is None:
        return ""
    if not error:
        return f"{value:.2g}"
    decimals = max(0, -math.floor(math.log10(float(f"{error:.0e}"))))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def report(found: stored.Probes) -> str:
    """Everything about one run, as tables."""
    reach = "" if found.reach is None else f", reach {found.reach:,} positions"
    parts = [
        f"{found.run_id}: step {found.step:,}, test accuracy "
        f"{percent(found.accuracy, found.error)} % on {found.num_examples:,} examples{reach}; "
        f"{found.seconds:.0f} s"
    ]
    overall = [a for a in found.floors if a.label is None]
    if overall:
        parts.append(Table(
            ["Rule", "Alike", "Only the run", "Only the rule", "z", "p"],
            [[a.name, percent(a.agreement), str(a.only_run), str(a.only_floor), f"{a.z:+.1f}",
              f"{a.p:.2g}"] for a in overall],
        ).markdown())  # fmt: skip
        nearest = max(overall, key=lambda a: a.agreement).name
        parts.append(Table(
            [f"Class, beside {nearest}", "Examples", "Alike", "Only the run", "Only the rule", "p"],
            [[str(a.label), f"{a.num_examples:,}", percent(a.agreement), str(a.only_run),
              str(a.only_floor), f"{a.p:.2g}"]
             for a in found.floors if a.name == nearest and a.label is not None],
        ).markdown())  # fmt: skip
    sizes = sorted({w.size for w in found.windows})
    by_place = {(w.size, w.place): percent(w.accuracy, w.error) for w in found.windows}
    places = ("first", "last", "best", "mean")
    parts.append(Table(
        ["Tokens shown", "First", "Last", "Best of five cuts", "Mean of their logits"],
        [[f"{size:,}", *(by_place[size, place] for place in places)] for size in sizes],
    ).markdown())  # fmt: skip
    blocks = sorted({s.block for s in found.shuffles})
    by_kind = {(s.block, s.kind): percent(s.accuracy, s.error) for s in found.shuffles}
    parts.append(Table(
        ["Tokens a block", "Blocks shuffled", "Shuffled within"],
        [[f"{b:,}", by_kind[b, "blocks"], by_kind.get((b, "within"), "")] for b in blocks],
    ).markdown())  # fmt: skip
    parts.append(Table(
        ["Distance", "Change of outputs", "Untrained", "Change of logits, from the first token"],
        [[f"{i.distance:,}", small(i.positions, i.positions_error), small(i.untrained),
          small(i.logits, i.logits_error)] for i in found.influence],
    ).markdown())  # fmt: skip
    if found.attention:
        parts.append(Table(
            ["Layer", "Head", "Mean distance of attention", "If it were even"],
            [[str(a.layer), str(a.head), f"{a.distance:.0f} ± {a.error:.0f}", f"{a.uniform:.0f}"]
             for a in found.attention],
        ).markdown())  # fmt: skip
    return "\n".join(parts)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", help="folders of runs, as outputs/RUN_ID")
    parser.add_argument("--examples", type=int, default=2000, help="of test (default: %(default)s)")
    parser.add_argument("--replaced", type=int, default=200,
                        help="examples with a replaced token (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="default: as each run has it")
    arguments = parser.parse_args()
    for name in ("examples", "replaced"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}={getattr(arguments, name)}: expected at least 1")
    if arguments.seed < 0:
        raise ValueError(f"--seed={arguments.seed}: expected at least 0")
    from lra.probes import probe
    from lra.training.weights import selected_path

    runs = [Path(run) for run in arguments.runs]
    for run in runs:
        selected_path(run)  # all of them before hours of the first
    for run in runs:
        found, results = probe(
            run, num_examples=arguments.examples, num_replaced=arguments.replaced,
            seed=arguments.seed, results=arguments.results,
        )  # fmt: skip
        print(report(found))
        print(f"written to {stored.save(found, results)}\n", flush=True)


if __name__ == "__main__":
    run_script(main)
