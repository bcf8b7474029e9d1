"""Records to tables: rebuild everything generated in results/, or check that it is up to date.

python scripts/make_tables.py
python scripts/make_tables.py --models luna,softmax --task listops,text --out paper

Options that choose what is shown need `--out DIR`: a folder with records holds the tables of all of
them. README's results section is rewritten only with the checkout's own results/.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lra.files import check_writable, replacing  # noqa: E402
from lra.results import (  # noqa: E402
    efficiency,
    figures,
    latex,
    leaderboard,
    papers,
    probe_figures,
    records,
    report,
    rule_tables,
    tables,
)
from lra.results.floors import load_all as load_floors  # noqa: E402
from lra.results.probes import load_all as load_probes  # noqa: E402
from lra.results.published import TASKS, Published, load_published  # noqa: E402
from lra.script import run_script  # noqa: E402
from lra.speed import benchmarks  # noqa: E402
from lra.values import nearest  # noqa: E402


def generate(
    results: Path,
    out: Path,
    options: leaderboard.Options,
    chosen: Sequence[str],
    with_figures: bool,
    say: Callable[[str], None],
) -> tuple[dict[Path, bytes], list[str]]:
    """Every generated file and its content, and which records could not be read.

    Raises:
        ValueError: `results` is no results folder; nothing has a name that `options` asks for; the
            tables, `chosen` by these words of the command, do not belong in `out`.
    """
    if not any((results / name).is_dir() for name in ("runs", "benchmarks")):
        raise ValueError(
            f"--results={results}: holds no runs/; expected a results folder such as {ROOT}/results"
        )
    runs, warnings = records.load_all(results)
    bench, more = benchmarks.load_benchmarks(results)
    floors, damaged = load_floors(results)
    probes, unreadable = load_probes(results)
    more += damaged + unreadable
    published = load_published(_own_or_ours(results, "published.csv"))
    published_speed = efficiency.load_efficiency(_own_or_ours(results, "published_efficiency.csv"))
    check_names(options, runs, published)
    check_place(results, out, chosen)
    board = leaderboard.build(runs, published, options, floors)
    bench = [replace(b, cells=[c for c in b.cells if options.shows(c.model)]) for b in bench]
    published_speed = [e for e in published_speed if options.published and options.shows(e.model)]
    probed, strays = probe_figures.beside_records(probes, runs, options)
    for message in [*warnings, *more, *board.notes, *strays]:
        say(message)
    # Messages name files relative to the results folder, so that they are the same everywhere.
    skipped = [
        w.replace(f"{results}{os.sep}", "").removeprefix("skipped ") for w in warnings + more
    ]

    files: dict[str, str | bytes] = {
        "leaderboard.md": tables.markdown(board, skipped),
        "leaderboard.csv": tables.csv_text(board),
        "leaderboard.tex": latex.leaderboard(board),
    }
    titled = [("Published accuracy", tables.published_table(board.published, board.options))]
    titled = titled if board.published else []
    if (bounded := rule_tables.bounded_table(board)).rows:
        titled.insert(0, ("Without long range: rules, and models of bounded reach", bounded))
    for paper in papers.PAPERS:
        if board.published:
            titled.append((paper.title, papers.paper_table(paper, board.published, board.rows)))
        markdown = papers.paper_markdown(paper, board.published, board.rows)
        files[f"tables/{paper.name}.md"] = markdown
        files[f"tables/{paper.name}.tex"] = latex.paper_file(paper, board)
    speed = efficiency.efficiency_tables(board.rows, bench, published_speed)
    files["tables/efficiency.md"] = efficiency.efficiency_markdown(speed, published_speed)
    files["tables/efficiency.tex"] = latex.efficiency_file(board, bench, published_speed)

    missing = figures.unavailable()
    if with_figures and not missing:
        drawn = figures.draw(
            board.rows,
            bench,
            board.floors,
            board.pretrained,
            board.published,
            papers.families(published),
        )
        drawn |= probe_figures.draw(probed, floors)
        files |= {f"figures/{k}": v for k, v in drawn.items()}
    else:  # the page keeps the figures that lie there
        say(missing or "figures left as they are")
        files |= {f"figures/{p.name}": p.read_bytes() for p in out.glob("figures/*.svg")}
    last = ("figures/benchmark", "figures/influence", "figures/windows")  # from the end
    names = sorted(files, key=lambda name: ([name.startswith(kind) for kind in last], name))
    svgs = {Path(name).stem: files[name] for name in names if name.endswith(".svg")}
    pictures = {figures.caption(v) or k: v for k, v in svgs.items() if isinstance(v, bytes)}
    files["report.html"] = report.page(board, runs, pictures, titled + speed)

    contents = {out / k: v if isinstance(v, bytes) else v.encode() for k, v in files.items()}
    readme = ROOT / "README.md"
    if results.resolve() == out.resolve() == ROOT / "results" and readme.exists():
        text = tables.fill_readme(readme.read_text(encoding="utf-8"), tables.readme_section(board))
        if text is None:
            say(f"{readme}: no markers {' and '.join(tables.README_MARKERS)}; left as it is")
        else:
            contents[readme] = text.encode()
    beside = f", {len(board.pretrained)} with self-pretraining" if board.pretrained else ""
    say(f"{len(runs)} records, {len(board.rows)} rows in the main table{beside}")
    if not board.rows and not board.pretrained:
        say(f"no row, and no accuracy to draw: {_why_empty(results, runs, board)}")
    return contents, skipped


def check_names(
    options: leaderboard.Options,
    runs: Sequence[records.Record],
    published: Sequence[Published],
) -> None:
    """Refuse a task, model or recipe that neither a config nor a record or published row has.

    Raises:
        ValueError: names it, and the nearest known name.
    """
    models = [*(r.model for r in runs), *(p.model.lower() for p in published)]
    asked: list[tuple[str, Iterable[str], Iterable[str]]] = [
        ("task", options.tasks, [*TASKS, *(r.task for r in runs)]),
        ("model", options.models, models),
        ("recipe", [options.recipe] if options.recipe else [], (r.recipe for r in runs)),
    ]
    for group, names, found in asked:
        known = sorted({*found, *(p.stem for p in (ROOT / "configs" / group).glob("*.yaml"))})
        for name in names:
            if name.lower() not in map(str.lower, known):
                option = "models" if group == "model" else group
                raise ValueError(f"--{option}={name}: unknown; {nearest(name, known)}")


def check_place(results: Path, out: Path, chosen: Sequence[str]) -> None:
    """Refuse to put tables of some records where those of all records of a folder belong.

    Raises:
        ValueError: says which folder that is, and what to do.
    """
    same = out.resolve() == results.resolve()
    if chosen and same:
        raise ValueError(
            f"{' '.join(chosen)}: {results}/ holds the tables of all its records; choose a folder "
            "for these with --out DIR"
        )
    if not same and (out / "runs").exists():
        raise ValueError(f"--out={out}: holds records, so its tables are theirs; choose another")


def _why_empty(results: Path, runs: Sequence[records.Record], board: leaderboard.Board) -> str:
    reasons = [leaderboard.LEFT_OUT[why].lower() for why, _ in board.left_out]
    if reasons:
        counts = [f"{reasons.count(r)} {r}" for r in dict.fromkeys(reasons)]
        return f"none of the records counts ({', '.join(counts)})"
    return "no record is what was asked for" if runs else f"{results}/runs holds no record yet"


def _own_or_ours(results: Path, name: str) -> Path:
    """Published figures lie beside the records; a folder without them gets the project's."""
    return results / name if (results / name).exists() else ROOT / "results" / name


def _names(texts: list[str] | None) -> tuple[str, ...]:
    """Names of an option that is given several times, or once with commas."""
    return tuple(dict.fromkeys(n.strip() for text in texts or () for n in text.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR",
                        help="where runs/ lies (default: results)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where tables go (default: beside runs/)")  # fmt: skip
    parser.add_argument("--no-figures", action="store_true", help="leave figures as they are")
    parser.add_argument("--check", action="store_true",
                        help="write nothing; exit 1 for a stale file or bad record")  # fmt: skip
    shown = parser.add_argument_group("what is shown (with --out)")
    shown.add_argument("--recipe", help="only this recipe")
    shown.add_argument("--task", action="append", metavar="TASK,...", help="only these tasks")
    shown.add_argument("--models", action="append", metavar="MODEL,...",
                       help="only these models, measured and published")  # fmt: skip
    shown.add_argument("--average", choices=("five", "six", "both"), default="both")
    shown.add_argument("--min-seeds", type=int, default=1, help="leave out cells with fewer")
    shown.add_argument("--include-reduced", action="store_true",
                       help="runs with a reduced budget in the main table, marked")  # fmt: skip
    shown.add_argument("--no-published", action="store_true", help="leave out published rows")
    shown.add_argument("--no-params", action="store_true", help="leave out parameter counts")
    args = parser.parse_args()
    options = leaderboard.Options(
        recipe=args.recipe, tasks=_names(args.task), models=_names(args.models),
        average=args.average, min_seeds=args.min_seeds, include_reduced=args.include_reduced,
        published=not args.no_published, params=not args.no_params,
    )  # fmt: skip
    chosen = [a.option_strings[0] for a in shown._group_actions
              if getattr(args, a.dest) != a.default]  # fmt: skip
    out = args.out or args.results
    files, skipped = generate(args.results, out, options, chosen, not args.no_figures, print)
    stale = [path for path, content in files.items()
             if not path.exists() or path.read_bytes() != content]  # fmt: skip
    if args.check:
        for path in stale:
            print(f"stale: {path}; the same command without --check writes it")
        for complaint in skipped:
            print(f"bad record: {complaint}")
        return 1 if stale or skipped else 0
    if stale:
        check_writable(out, "--out")
    for path in stale:
        with replacing(path) as file:
            file.write(files[path])
    print(f"{len(stale)} of {len(files)} files were stale, all are up to date in {out}/")
    return 0


if __name__ == "__main__":
    run_script(main)
