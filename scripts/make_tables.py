"""Records to tables: rebuild everything generated in results/, or check that it is up to date."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lra import benchmarks, figures, leaderboard, papers, records, report, tables  # noqa: E402
from lra.files import check_writable  # noqa: E402
from lra.floors import load_all as load_floors  # noqa: E402
from lra.script import run_script  # noqa: E402


def generate(
    results: Path, options: leaderboard.Options, with_figures: bool, say: Callable[[str], None]
) -> tuple[dict[Path, bytes], list[str]]:
    """Every generated file and its content, and which records could not be read."""
    runs, warnings = records.load_all(results)
    bench, more = benchmarks.load_benchmarks(results)
    floors, damaged = load_floors(results)
    more += damaged
    published = leaderboard.load_published(_own_or_ours(results, "published.csv"))
    efficiency = papers.load_efficiency(_own_or_ours(results, "published_efficiency.csv"))
    board = leaderboard.build(runs, published, options, floors)
    for message in [*warnings, *more, *board.notes]:
        say(message)
    # Messages name files relative to the results folder, so that they are the same everywhere.
    skipped = [
        w.replace(f"{results}{os.sep}", "").removeprefix("skipped ") for w in warnings + more
    ]

    files: dict[str, str | bytes] = {
        "leaderboard.md": tables.markdown(board, skipped),
        "leaderboard.csv": tables.csv_text(board),
        "leaderboard.tex": tables.latex(board),
    }
    titled = [("Published accuracy", tables.published_table(board.published, board.options))]
    titled = titled if board.published else []
    for paper in papers.PAPERS:
        table = papers.paper_table(paper, board.published, board.rows)
        if board.published:
            titled.append((paper.title, table))
        markdown = papers.paper_markdown(paper, board.published, board.rows)
        files[f"tables/{paper.name}.md"] = markdown
        files[f"tables/{paper.name}.tex"] = papers.latex_tables([(paper.title, table)])
    speed = papers.efficiency_tables(board.rows, bench, efficiency if options.published else [])
    files["tables/efficiency.md"] = papers.efficiency_markdown(speed, efficiency)
    files["tables/efficiency.tex"] = papers.latex_tables(speed)

    missing = figures.unavailable()
    if with_figures and not missing:
        files |= {
            f"figures/{k}": v for k, v in figures.draw(board.rows, bench, board.floors).items()
        }
    else:  # the page keeps the figures that lie there
        say(missing or "figures left as they are")
        files |= {f"figures/{p.name}": p.read_bytes() for p in results.glob("figures/*.svg")}
    names = sorted(files, key=lambda name: ("benchmark" in name, name))
    svgs = {Path(name).stem: files[name] for name in names if name.endswith(".svg")}
    pictures = {figures.caption(v) or k: v for k, v in svgs.items() if isinstance(v, bytes)}
    files["report.html"] = report.page(board, runs, pictures, titled + speed)

    contents = {results / k: v if isinstance(v, bytes) else v.encode() for k, v in files.items()}
    readme = results.resolve().parent / "README.md"
    if readme.exists():
        text = tables.fill_readme(readme.read_text(encoding="utf-8"), tables.results_section(board))
        if text is None:
            say(f"{readme}: no markers {' and '.join(tables.README_MARKERS)}; left as it is")
        else:
            contents[readme] = text.encode()
    say(f"{len(runs)} records, {len(board.rows)} rows in the main table")
    return contents, skipped


def _own_or_ours(results: Path, name: str) -> Path:
    """Published figures lie beside the records; a folder without them gets the project's."""
    return results / name if (results / name).exists() else ROOT / "results" / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR",
                        help="where runs/ lies and tables go (default: results)")  # fmt: skip
    parser.add_argument("--recipe", help="only this recipe")
    parser.add_argument("--task", action="append", metavar="TASK",
                        help="only this task; may be given several times")  # fmt: skip
    parser.add_argument("--average", choices=("five", "six", "both"), default="both")
    parser.add_argument("--min-seeds", type=int, default=1, help="leave out cells with fewer")
    parser.add_argument("--include-reduced", action="store_true",
                        help="runs with a reduced budget in the main table, marked")  # fmt: skip
    parser.add_argument("--no-published", action="store_true", help="leave out published rows")
    parser.add_argument("--no-figures", action="store_true", help="leave figures as they are")
    parser.add_argument("--check", action="store_true",
                        help="write nothing; exit 1 for a stale file or bad record")  # fmt: skip
    args = parser.parse_args()
    options = leaderboard.Options(
        recipe=args.recipe, tasks=tuple(args.task or ()), average=args.average,
        min_seeds=args.min_seeds, include_reduced=args.include_reduced,
        published=not args.no_published,
    )  # fmt: skip
    files, skipped = generate(args.results, options, not args.no_figures, print)
    stale = [path for path, content in files.items()
             if not path.exists() or path.read_bytes() != content]  # fmt: skip
    if args.check:
        for path in stale:
            print(f"stale: {path}; the same command without --check writes it")
        for complaint in skipped:
            print(f"bad record: {complaint}")
        return 1 if stale or skipped else 0
    if stale:
        check_writable(args.results, "--results")
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(files[path])
        temporary.replace(path)
    print(f"{len(stale)} of {len(files)} files were stale, all are up to date in {args.results}/")
    return 0


if __name__ == "__main__":
    run_script(main)
