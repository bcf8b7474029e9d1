"""Tables for papers: what they hold, how they are set, and that LaTeX takes them."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from lra.results import efficiency, latex, papers, typeset
from lra.results.leaderboard import Board, Options, build
from lra.results.published import TASKS, load_published
from lra.speed.benchmarks import Benchmark
from lra.values import fill
from tests.made_up import benchmark_values, make_record, sixty_records

ROOT = Path(__file__).resolve().parents[2]
EVIL = "a|b <i>_x_</i> & $100% {c}\\\n[d](e) ~^# 中 \u0142"
LUNA, NYSTROMFORMER = papers.PAPERS[1:3]


def rows(tex: str) -> list[list[str]]:
    """Cells of every line of a tabular, titles included."""
    lines = [line.removesuffix(r" \\") for line in tex.splitlines() if line.endswith(r" \\")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)&", line)] for line in lines]


def full_board() -> Board:
    """All tasks in two recipes, three seeds, marks, and settings with long names."""
    records = [
        make_record(
            task,
            model,
            seed,
            recipe=recipe,
            data="generated",
            overrides=keys,
            apples_to_apples=False,
            why_not=[f"220,000 parameters, +{percent} % over softmax"],
        )  # fmt: skip
        for task, percent in zip(TASKS, (12.8, 12.3, 13, 14, 15, 15), strict=True)
        for seed in range(3)
        for recipe in ("luna", "nystromformer")
        for model, keys in (
            ("softmax", {}),
            ("luna", {"model.projection_length": 16}),
            ("luna", {"model.projection_length": 128, "train.lr": 0.5, "shape.num_heads": 4}),
        )
    ]
    return build([*records, make_record(model=EVIL)], load_published())


def files(board: Board) -> dict[str, str]:
    benchmarks = [
        fill(Benchmark, benchmark_values(device) | {"name": device}) for device in ("cpu", "cuda")
    ]
    published = efficiency.load_efficiency(ROOT / "results" / "published_efficiency.csv")
    found = {paper.name: latex.paper_file(paper, board) for paper in papers.PAPERS}
    found["efficiency"] = latex.efficiency_file(board, benchmarks, published)
    return found | {"leaderboard": latex.leaderboard(board)}


def test_one_record_gives_this_very_table() -> None:
    board = build([make_record(seed=s, accuracy=0.37 + s / 100) for s in range(2)])
    tex = latex.leaderboard(board)
    assert tex.startswith(typeset.HEAD) and tex.endswith(typeset.TAIL)
    assert tex.removeprefix(typeset.HEAD).removesuffix(typeset.TAIL).strip() == "\n".join([
        r"\begin{table}",
        r"\centering",
        r"\setlength{\abovecaptionskip}{0pt}\setlength{\belowcaptionskip}{6pt}",
        r"\caption{Test accuracy in percent, recipe \texttt{nystromformer}. Mean $\pm$ sample "
        r"standard deviation over 2 seeds.}",
        r"\label{tab:leaderboard-nystromformer}",
        r"\small\setlength{\tabcolsep}{4pt}",
        r"\begin{tabular}{@{}lr@{\,}lr@{}}",
        r"\toprule",
        r"Model & \multicolumn{2}{c}{ListOps} & Params (k) \\",
        r"\midrule",
        r"Luna & 37.50 & $\pm$ 0.71 & 200.0 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ])  # fmt: skip


def test_marks_are_notes_and_the_best_is_bold() -> None:
    records = [make_record(seed=s, accuracy=0.38, data="generated") for s in range(2)]
    records += [make_record(model="softmax", seed=s, accuracy=0.28) for s in range(2)]
    records.append(make_record("image", "softmax", status="at_chance"))
    tex = latex.leaderboard(build(records))
    assert rows(tex)[1:] == [
        ["Luna", r"\textbf{38.00}", r"$\pm$ 0.00\textsuperscript{g}", "", "200.0"],
        ["Transformer", "28.00", r"$\pm$ 0.00", "FAIL", "200.0"],
    ]
    assert "\\textsuperscript{g}~data from this project's generator" in tex
    assert "over 2 seeds. FAIL: not above chance. Bold: " in tex


def test_seeds_are_told_in_the_cells_where_their_number_differs() -> None:
    records = [make_record(seed=s) for s in range(3)]
    records += [make_record("text", seed=s) for s in range(2)] + [make_record("image")]
    tex = latex.leaderboard(build(records))
    assert "over seeds, their number in brackets; numbers without it are of one seed" in tex
    assert [c for c in rows(tex)[1] if "(" in c] == [r"$\pm$ 0.00 (3)", r"$\pm$ 0.00 (2)"]


def test_seeds_that_failed_are_counted() -> None:
    failed = [make_record("text", seed=s, status="at_chance") for s in range(3)]
    tex = latex.leaderboard(build(failed))
    assert "FAIL: not above chance, in none of 3 seeds." in tex and "ne seed each" not in tex
    tex = latex.leaderboard(build([make_record(), *failed]))
    assert "Numbers are of one seed each. FAIL: not above chance, in none of 3 seeds." in tex
    tex = latex.leaderboard(build([make_record(), failed[0]]))
    assert "One seed each. FAIL: not above chance." in tex


@pytest.mark.parametrize(
    ("text", "rounded"),
    [("37.51", "37.5"), ("999.6", "1000"), ("99.97", "100"), ("123.0", "123"), ("0.5", "0.500"),
     ("1,234", "1,234"), ("-", "-")],
)  # fmt: skip
def test_a_speed_has_three_digits_and_no_power_of_ten(text: str, rounded: str) -> None:
    assert latex._rounded(text) == rounded


def test_columns_and_models_are_chosen() -> None:
    records = list(sixty_records().values())
    options = Options(models=("luna", "softmax"), tasks=("text", "listops"), params=False)
    board = build(records, load_published(), options)
    tex = latex.leaderboard(board)
    assert {row[0] for row in rows(tex)} == {"Model", "Luna", "Transformer"}
    assert [row for row in rows(tex) if row[0] == "Model"][-1] == [
        "Model", "Variant", r"\multicolumn{2}{c}{Text}", r"\multicolumn{2}{c}{ListOps}",
    ]  # fmt: skip
    tex = latex.paper_file(LUNA, board)
    assert rows(tex)[0][1:] == ["ListOps", r"\multicolumn{2}{c}{Text}"]  # as the paper has them
    assert not any("Linformer" in row[0] for row in rows(tex))


def test_a_models_name_is_that_of_its_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {p.stem: latex.model_title(p.stem) for p in (ROOT / "configs/model").glob("*.yaml")}
    assert shown.items() >= {
        "luna": "Luna", "nystromformer": "Nyströmformer", "fastformer": "Fastformer",
        "softmax": "Transformer",
    }.items()  # fmt: skip
    assert latex.model_title("luna:projection_length=16") == "Luna (projection length 16)"
    assert latex.model_title("Nystromformer") == "Nyströmformer"  # as papers write it
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (gated,) = re.findall(r"^```yaml\n(# Gated.*?)^```$", text, re.M | re.S)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/gated.yaml").write_text(gated)
    (tmp_path / "model/plain.yaml").write_text("_target_: models.plain.Plain\n")
    monkeypatch.setattr(latex, "CONFIGS", tmp_path)
    latex._titles.cache_clear()
    assert [latex.model_title(m) for m in ("gated", "plain")] == ["Gated average", "plain"]
    latex._titles.cache_clear()


def test_a_papers_rows_stand_with_ours_and_the_difference() -> None:
    tex = latex.paper_file(NYSTROMFORMER, full_board())
    names = [row[0] for row in rows(tex)]
    at = names.index(r"Transformer\textsuperscript{1}")
    assert names[at + 1 : at + 3] == [r"\quad measured", r"\quad difference"]
    assert rows(tex)[at][1] == "37.10" and rows(tex)[at + 1][1] == "37.00"
    assert rows(tex)[at + 2][1] == "$-$0.10"
    assert r"\textsuperscript{1}~standard self-attention" in tex
    assert "Below the line: without a counterpart in the paper." in tex
    assert any("projection length 16" in name for name in names)
    assert r"12.3 to 15.0 \% more parameters than the softmax Transformer" in tex
    assert "Linformer (k=256)" in names and "arXiv" not in "".join(map("".join, rows(tex)))


def test_misprints_and_other_sources_are_notes() -> None:
    board = build([], load_published())
    tex = latex.paper_file(LUNA, board)
    assert r"\textsuperscript{1}~LRA paper (Tay et al. 2021; arXiv 2011.04006), Table 1" in tex
    (own,) = [row for row in rows(tex) if row[0] == r"Transformer\textsuperscript{2}"]
    assert own[6:8] == ["59.24", r"\textsuperscript{3}"]
    assert r"\textsuperscript{3}~as printed; the row's cells give 59.25" in tex


def test_rows_that_read_real_pixels_say_so_in_a_papers_table() -> None:
    s4 = next(p for p in papers.PAPERS if p.name == "s4")
    tex = latex.paper_file(s4, build([], load_published()))
    (number,) = set(re.findall(r"superscript{(\d)}~real pixels", tex))  # in each of its floats
    names = [row[0] for row in rows(tex) if re.search(rf"[{{,]{number}[,}}]", row[0])]
    shown = [name.partition("\\")[0] for name in names]
    assert shown == ["S4-v1", "S4-v2", "S4D-LegS", "S4D-Inv", "S4D-Lin"]


def test_names_cannot_break_latex() -> None:
    tex = latex.leaderboard(build([make_record(model=EVIL)]))
    assert (
        r"a\textbar{}b \textless{}i\textgreater{}\_x\_\textless{}/i\textgreater{} \& \$100\% "
        r"\{c\}\textbackslash{} {[}d](e) \textasciitilde{}\textasciicircum{}\# U+4E2D "
        "\u0142"
    ) in tex


def test_a_wide_table_is_set_in_panels_and_a_long_one_in_several_floats() -> None:
    numbers = [("37.58", r"$\pm$ 0.21")] * 60
    heads = [typeset.Column("Model", [(f"Model {i}", "") for i in range(60)])]
    columns = [typeset.Column(f"Task {i}", numbers) for i in range(9)]
    tex = typeset.Float("x", "Caption.", heads, columns, [("a", "note")]).latex()
    assert tex.count(r"\begin{table*}") == tex.count(r"\caption{Caption.") > 1
    labels = re.findall(r"\\label{(.*)}", tex)
    assert len(set(labels)) == len(labels) and labels[:2] == ["tab:x", "tab:x-2"]
    (first, *_) = tex.split(r"\end{table*}")
    assert first.count(r"\begin{tabular}") == 2 and first.count(r"\midrule") == 2
    assert sorted(row[0] for row in rows(tex)).count("Model 0") == 2  # once a panel
    narrow = typeset.Float("y", "Caption.", heads[:1], columns[:1], [])
    assert r"\begin{table}" in narrow.latex()


def test_a_group_of_columns_stays_together() -> None:
    groups = ["a"] * 4 + ["b"] * 10
    columns = [typeset.Column(str(i), [("1.00", "")], group) for i, group in enumerate(groups)]
    panels = typeset._panels(columns, 300.0, 10)
    assert [[c.group for c in panel] for panel in panels] == [["a"] * 4, ["b"] * 10]


def test_speeds_are_set_by_mode_with_ratios_and_growth() -> None:
    tex = files(build([make_record()]))["efficiency"]
    assert "Training by length of the input (Some Device, float32, batch 8, 4 threads)" in tex
    assert r"\multicolumn{7}{c}{Steps per second (times softmax)}" in tex
    assert any(row[:5] == ["Luna", "10", "(1.00)", "5", "(2.00)"] for row in rows(tex))
    assert "tokens per second" not in tex.lower()
    assert "(ListOps, recipe nystromformer, batch 32, max. length 2000, Some CPU" in tex


def test_no_row_gives_a_file_without_a_table() -> None:
    for tex in (latex.leaderboard(build([])), latex.paper_file(LUNA, build([]))):
        assert "No finished run" in tex and r"\begin{table" not in tex


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
@pytest.mark.parametrize("source", ["committed", "full", "sixty", "empty"])
def test_latex_takes_every_file_alone_and_in_an_article(tmp_path: Path, source: str) -> None:
    """No error, nothing more than 3 pt too wide, nothing too long for a page."""
    made = {"full": full_board(), "empty": build([]), "sixty": build(sixty_records().values())}
    if source == "committed":
        results = ROOT / "results"
        found = {p.stem: p.read_text("utf-8") for p in results.rglob("*.tex")}
        assert len(found) == 2 + len(papers.PAPERS)
    else:
        found = files(made[source])
    for name, text in found.items():
        (tmp_path / f"{name}.tex").write_text(text, encoding="utf-8")
        compile_latex(tmp_path / f"{name}.tex")
        for options in ("10pt", "11pt", "12pt", "11pt,twocolumn"):
            whole = tmp_path / f"article-{name}.tex"
            whole.write_text(
                rf"\documentclass[{options}]{{article}}\usepackage{{booktabs}}\begin{{document}}"
                rf"Text. \input{{{name}}} More text.\end{{document}}"
            )
            compile_latex(whole)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
@pytest.mark.parametrize("options", ["10pt,twocolumn", "11pt,twocolumn", "11pt", "12pt"])
def test_tables_of_any_width_fit(tmp_path: Path, options: str) -> None:
    floats = []
    for count, long, tail in product(range(1, 10), range(1, 12, 2), ("", r"$\pm$ 0.21")):
        heads = [typeset.Column("Model", [("Longformer " * long, "")])]
        columns = [typeset.Column("Task", [("37.58", tail)])] * count
        floats.append(typeset.Float(f"{count}-{long}-{len(tail)}", "A.", heads, columns, []))
    tables = "\\clearpage".join(f.latex() for f in floats)
    path = tmp_path / "widths.tex"
    path.write_text(
        rf"\documentclass[{options}]{{article}}\usepackage{{booktabs}}\begin{{document}}"
        rf"{tables}\end{{document}}"
    )
    compile_latex(path)


def compile_latex(path: Path) -> None:
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, timeout=120)
    log = path.with_suffix(".log").read_text(encoding="latin-1")
    assert done.returncode == 0, log[-3000:]
    wide = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", log)]
    assert max(wide, default=0) < 3, (path.name, wide)
    assert "Float too large" not in log, (path.name, re.findall("Float too large.*", log))
    assert "Missing character" not in log and "multiply defined" not in log
