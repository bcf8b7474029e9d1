"""Records to tables: `python scripts/make_tables.py` rebuilds everything generated in results/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lra import leaderboard, records, tables  # noqa: E402
from lra.task import write_atomically


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    parser.add_argument("--recipe", help="only this recipe")
    parser.add_argument("--task", action="append", choices=leaderboard.TASKS,
                        help="only this task; may be given several times")  # fmt: skip
    parser.add_argument("--average", choices=("five", "six", "both"), default="both")
    parser.add_argument("--min-seeds", type=int, default=1, help="leave out cells with fewer")
    parser.add_argument("--include-reduced", action="store_true",
                        help="show runs with a reduced budget in the main table, marked")  # fmt: skip
    parser.add_argument("--no-published", action="store_true", help="leave out published rows")
    args = parser.parse_args()
    try:
        options = leaderboard.Options(
            recipe=args.recipe, tasks=tuple(args.task or leaderboard.TASKS), average=args.average,
            min_seeds=args.min_seeds, include_reduced=args.include_reduced,
            published=not args.no_published,
        )  # fmt: skip
        runs, warnings = records.load_all(args.results)
        own = args.results / "published.csv"
        published = leaderboard.load_published(
            own if own.exists() else ROOT / "results/published.csv"
        )
    except (ValueError, OSError) as error:
        print(f"make_tables: {error}", file=sys.stderr)
        return 1
    board = leaderboard.build(runs, published, options)
    for message in [*warnings, *board.notes]:
        print(message, file=sys.stderr)
    texts = {
        "leaderboard.md": tables.markdown(board),
        "leaderboard.csv": tables.csv_text(board),
    }
    for name, text in texts.items():
        write_atomically(args.results / name, text)
    print(f"{len(runs)} records, {len(board.rows)} rows: {', '.join(texts)} in {args.results}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
