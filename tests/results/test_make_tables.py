"""The command that makes every table: what it writes, where, and what it refuses."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lra.results import figures, tables
from lra.results.leaderboard import Options, build
from lra.results.papers import PAPERS
from lra.results.probes import save as save_probes
from lra.results.published import load_published
from lra.results.records import load_all, save
from tests import programs
from tests.made_up import make_probes, make_record, write_sixty

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("make_tables", ROOT / "scripts" / "make_tables.py")
assert SPEC and SPEC.loader
SCRIPT = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCRIPT)


def make_tables(
    *args: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return programs.call("scripts/make_tables.py", *args, env=env)


def test_readme_is_filled_between_its_markers_only() -> None:
    begin, end = tables.README_MARKERS
    text = f"# Title\n{begin}\nold\n{end}\nrest\n"
    assert tables.fill_readme(text, "new\n") == f"# Title\n{begin}\n\nnew\n\n{end}\nrest\n"
    for broken in ("# Title\n", f"{begin}\n", f"{end}\n{begin}\n", f"{begin}{begin}{end}"):
        assert tables.fill_readme(broken, "new\n") is None


def test_command_builds_checks_and_rebuilds_byte_for_byte(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_sixty(results)
    assert make_tables("--results", results, "--no-figures", "--check").returncode == 1
    done = make_tables("--results", results, "--no-figures")
    assert done.returncode == 0, done.stderr
    assert "half-written.json" in done.stdout and "2 duplicates ignored" in done.stdout
    generated = {
        p: p.read_bytes() for p in results.rglob("*") if p.is_file() and "runs" not in p.parts
    }
    assert len(generated) == 3 + 2 * (len(PAPERS) + 1) + 1
    assert str(tmp_path).encode() not in b"".join(generated.values())
    for path in generated:
        path.unlink()
    # Another process with another hash seed and time zone gives the same bytes.
    env = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    assert make_tables("--results", results, "--no-figures", env=env).returncode == 0
    assert all(p.read_bytes() == content for p, content in generated.items())

    # The tables are what the records say, but one of those cannot be read.
    checked = make_tables("--results", results, "--no-figures", "--check")
    assert checked.returncode == 1 and "stale" not in checked.stdout
    assert "bad record: runs" in checked.stdout and "half-written.json" in checked.stdout
    next(results.rglob("half-written.json")).unlink()
    assert make_tables("--results", results, "--no-figures").returncode == 0
    assert make_tables("--results", results, "--no-figures", "--check").returncode == 0

    (results / "leaderboard.csv").write_text("edited by hand\n")
    (results / "floors").mkdir()
    (results / "floors" / "text.json").write_text("{")
    checked = make_tables("--results", results, "--no-figures", "--check")
    assert checked.returncode == 1 and "stale: " in checked.stdout
    assert "bad record: floors" in checked.stdout and "text.json: not a JSON" in checked.stdout
    assert "leaderboard.csv" in checked.stdout and "leaderboard.tex" not in checked.stdout
    assert (results / "leaderboard.csv").read_text() == "edited by hand\n"


@pytest.mark.skipif(bool(figures.unavailable()), reason="matplotlib is missing")
def test_probes_become_pictures_of_the_page_and_a_damaged_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record()
    path = save_probes(make_probes(record), tmp_path)
    save(record, tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--results", str(tmp_path)])
    assert SCRIPT.main() == 0
    names = {p.name for p in (tmp_path / "figures").iterdir()}
    assert {
        f"{f}_listops.{kind}" for f in ("windows", "influence") for kind in ("svg", "png")
    } < names
    alts = re.findall('alt="(.*?)"', (tmp_path / "report.html").read_text())
    assert [a.split(" on ")[0] for a in alts[2:]] == [
        "Test accuracy", "Change of outputs at a distance from a replaced token"
    ]  # fmt: skip
    path.write_text("{")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--check"])
    assert SCRIPT.main() == 1
    said = capsys.readouterr().out
    assert f"bad record: probes/{path.name}: not a JSON file of probes" in said


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where `tables_of` runs as in a checkout: records, tables and README."""
    monkeypatch.setattr(SCRIPT, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    Path("README.md").write_text("{}\n\n{}\n".format(*tables.README_MARKERS))
    Path("results").mkdir()
    for name in ("published.csv", "published_efficiency.csv"):
        shutil.copy(ROOT / "results" / name, "results")
    save(make_record("listops", "luna"), Path("results"))
    save(make_record("text", "softmax", budget="reduced"), Path("results"))
    assert tables_of(monkeypatch) == 0
    return tmp_path


def tables_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """scripts/make_tables.py in this process."""
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--no-figures", *words])
    return SCRIPT.main()


def content(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_checkouts_own_records_fill_its_readme(checkout: Path) -> None:
    text = Path("README.md").read_text()
    assert "### Recipe nystromformer" in text and "| luna | 37.00 (1) |" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--task listop", "--task=listop: unknown; did you mean 'listops'"),
        ("--recipe luuna", "--recipe=luuna: unknown; did you mean 'luna'"),
        ("--models luna,sofmax", "--models=sofmax: unknown; did you mean 'softmax'"),
        ("--results result", "--results=result: holds no runs/; expected a results folder"),
        ("--results results/runs", "--results=results/runs: holds no runs/"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_written(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    before = content(checkout)
    for place in ([], ["--out", "paper"]):
        with pytest.raises(ValueError, match=re.escape(message)):
            tables_of(monkeypatch, *words.split(), *place)
    assert content(checkout) == before


@pytest.mark.parametrize(
    "words",
    ["--task listops", "--recipe luna", "--models luna", "--average five", "--min-seeds 2",
     "--include-reduced", "--no-published", "--no-params"],
)  # fmt: skip
def test_a_choice_needs_a_folder_of_its_own(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    before = content(checkout)
    for place in ([], ["--out", "results"]):
        with pytest.raises(ValueError, match=f"{words.split()[0]}: results/ holds .* --out DIR"):
            tables_of(monkeypatch, *words.split(), *place)
    assert content(checkout) == before
    assert tables_of(monkeypatch, *words.split(), "--out", "paper") == 0
    after = content(checkout)
    assert before.items() <= after.items()
    assert {p.parts[len(checkout.parts)] for p in after.keys() - before.keys()} == {"paper"}
    assert Path("paper/tables/luna.tex").exists()


def test_other_records_do_not_enter_the_checkouts_tables(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(make_record("image", "luna", data="synthetic"), Path("outputs/results"))
    Path("outputs/README.md").write_text(Path("README.md").read_text())
    before = content(checkout)
    with pytest.raises(ValueError, match="--out=results: holds records, so its tables are theirs"):
        tables_of(monkeypatch, "--results", "outputs/results", "--out", "results")
    assert content(checkout) == before
    assert tables_of(monkeypatch, "--results", "outputs/results") == 0
    assert "none of the records counts (1 synthetic data)" in capsys.readouterr().out
    assert before.items() <= content(checkout).items()
    assert "image" in Path("outputs/results/leaderboard.md").read_text()


def test_no_record_yet_is_not_a_wrong_folder(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("fresh/runs").mkdir(parents=True)
    assert tables_of(monkeypatch, "--results", "fresh") == 0
    assert "fresh/runs holds no record yet" in capsys.readouterr().out
    assert "No finished run" in Path("fresh/leaderboard.md").read_text()


def test_models_are_chosen_by_our_names_or_the_papers() -> None:
    records = [make_record(model=m) for m in ("luna", "softmax", "fastformer")]
    for names in (("softmax", "Luna"), ("transformer", "luna")):
        board = build(records, load_published(), Options(models=names))
        assert {r.model for r in board.rows} == {"luna", "softmax"}
        assert {p.model for p in board.published} == {"Luna", "Transformer"}
    assert Options(models=("luna",)).shows("luna:projection_length=16")


def test_command_works_without_matplotlib(tmp_path: Path) -> None:
    write_sixty(tmp_path / "results")
    code = ("import sys, runpy; sys.modules.update(matplotlib=None); "
            f"sys.argv = ['x', '--results', {str(tmp_path / 'results')!r}]; "
            "runpy.run_path('scripts/make_tables.py', run_name='__main__')")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "matplotlib is missing; pip install" in done.stdout
    assert (tmp_path / "results" / "leaderboard.md").exists()
    assert not (tmp_path / "results" / "figures").exists()


def test_command_names_what_is_wrong_with_a_published_file(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "published.csv").write_text(
        "model,variant,task,accuracy_percent,setting,source,source_table\nA,,listops,0.36,s,s,t\n"
    )
    done = make_tables("--results", tmp_path)
    assert (
        done.returncode == 2 and "published.csv:2" in done.stderr and "Traceback" not in done.stderr
    )


def test_records_of_eight_processes_all_enter(tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path; from lra.results.records import save; "
            "from tests.made_up import make_record; "
            "save(make_record(seed=int(sys.argv[1])), Path(sys.argv[2]))")  # fmt: skip
    processes = [programs.start("-c", code, str(seed), tmp_path, cwd=ROOT) for seed in range(8)]
    assert [p.wait(timeout=60) for p in processes] == [0] * 8
    records, warnings = load_all(tmp_path)
    assert warnings == [] and sorted(r.seed for r in records) == list(range(8))
    assert len(build(records).rows[0].cells["listops"].runs) == 8
