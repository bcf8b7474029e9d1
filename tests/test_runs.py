"""Runs whose record is here already: made in their own folder, or come along from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra import runs
from lra.results import records
from lra.results.leaderboard import Board, build
from lra.results.records import Record
from lra.results.report import content
from lra.results.tables import markdown
from tests.made_up import make_record
from tests.test_job import run
from tests.toy import Toy


def paths(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "results/runs/toy/softmax").glob("*.json"))


def page_runs(board: Board, found: list[Record]) -> list[dict[str, Any]]:
    """The page's runs by field; it makes the links to the records' files from the ids."""
    shown = content(board, found, [])
    return [
        {k: shown["pool"][v] if k in shown["pooled"] else v
         for k, v in zip(shown["fields"], line, strict=True)}
        for line in shown["runs"]
    ]  # fmt: skip


def came_along(folder: Path, **changes: Any) -> tuple[Record, Path]:
    """A record of the toy run as a fresh clone has it: no folder of the run, another day."""
    made = run(folder, paths={"outputs": str(folder / "elsewhere")})
    path = records.record_path(folder / "results", made.task, made.model, made.run_id)
    values = json.loads(made.to_json())
    values |= {"started_at": "2020-01-02T03:04:05Z", "finished_at": "2020-01-02T04:04:05Z"}
    path.write_text(json.dumps(values | changes))
    shutil.rmtree(folder / "elsewhere")
    return records.load(path), path


def test_a_record_that_came_along_stops_nothing_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped, path = came_along(tmp_path)
    before, run_id = path.read_bytes(), shipped.run_id
    capsys.readouterr()
    own = run(tmp_path)
    out = capsys.readouterr().out
    assert path.read_bytes() == before
    assert paths(tmp_path) == [f"{run_id}.2.json", f"{run_id}.json"]
    head, _, end = out.partition("step ")
    assert "this very run is recorded already" in head and "2020-01-02" in head
    assert shipped.result
    assert f"{path} (test {100 * shipped.result.test.accuracy:.2f} %" in head
    assert f"record to {path.with_name(f'{run_id}.2.json')}" in head
    assert f"against  {path}: the same in each of the 20 test examples and at every eval" in end
    assert own.run_id == run_id and (tmp_path / "outputs" / run_id / "checkpoints").is_dir()

    # Made here: finished, for good.
    assert run(tmp_path) == own and "nothing to do" in capsys.readouterr().out
    assert paths(tmp_path) == [f"{run_id}.2.json", f"{run_id}.json"]

    # Tables count the newer and list the older; together they are one seed.
    both, _ = records.load_all(tmp_path / "results")
    board = build(both)
    (row,) = board.rows
    assert row.cells["toy"].runs == (own,) and board.left_out == [("duplicate", shipped)]
    assert "### Older run of a setting and seed" in markdown(board)
    pages = {run["id"]: run["outcome"] for run in page_runs(board, both)}
    assert pages == {run_id: "Older run of a setting and seed", f"{run_id}.2": "In the table"}


def test_a_run_finished_with_other_results_claims_no_record_here(tmp_path: Path) -> None:
    shipped, path = came_along(tmp_path)
    before = path.read_bytes()
    other = run(tmp_path, paths={"results": str(tmp_path / "mine")})
    assert (tmp_path / f"mine/runs/toy/softmax/{other.run_id}.json").exists()
    own = run(tmp_path)  # goes on from its last state, at its end
    assert own.result == shipped.result and own != shipped
    assert paths(tmp_path) == [f"{shipped.run_id}.2.json", path.name]
    assert path.read_bytes() == before


def test_without_its_folder_a_run_trains_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(tmp_path)
    shutil.rmtree(tmp_path / "outputs")
    capsys.readouterr()
    run(tmp_path)
    assert "its folder is gone" in capsys.readouterr().out
    assert paths(tmp_path) == [f"{first.run_id}.2.json", f"{first.run_id}.json"]


def test_a_folder_of_an_earlier_version_means_the_first_record(tmp_path: Path) -> None:
    first = run(tmp_path)
    status = tmp_path / "outputs" / first.run_id / "status.json"
    values = json.loads(status.read_text())
    del values["record"], values["recorded"]
    status.write_text(json.dumps(values))
    assert run(tmp_path) == first and len(paths(tmp_path)) == 1


@pytest.mark.parametrize("content", ["", "[]", "{", '{"record": "../x.json", "started_at": "x"}',
                                     '{"record": 3, "started_at": "x"}'])  # fmt: skip
def test_a_status_that_cannot_be_read_claims_nothing(tmp_path: Path, content: str) -> None:
    first = run(tmp_path)
    (tmp_path / "outputs" / first.run_id / "status.json").write_text(content)
    assert run(tmp_path).result == first.result  # goes on from its last state, at its end
    assert len(paths(tmp_path)) == 2


def test_the_number_is_kept_over_interruptions(tmp_path: Path) -> None:
    shipped, path = came_along(tmp_path)
    before = path.read_bytes()
    second = f"{shipped.run_id}.2.json"
    for _ in range(2):
        assert run(tmp_path, train={"time_limit": 1e-9}).status == "interrupted"
        assert paths(tmp_path) == [second, path.name]
    # A killed session has only said that it began.
    folder = tmp_path / "outputs" / shipped.run_id
    status = json.loads((folder / "status.json").read_text())
    killed = status | {"status": "running", "started_at": "2021-01-01T00:00:00Z"}
    (folder / "status.json").write_text(json.dumps(killed))
    own = run(tmp_path)
    assert own.status in ("completed", "at_chance") and own.result == shipped.result
    assert paths(tmp_path) == [second, path.name] and path.read_bytes() == before


def test_a_place_that_is_taken_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as by the same run with another paths.outputs, or by an update of the repository."""
    path = tmp_path / "results/runs/toy/softmax/x"
    free = records.free_path

    def races(first: Path) -> Path:
        nonlocal path
        path = free(first)
        if not first.exists():
            first.write_text("other")
        return path

    monkeypatch.setattr(records, "free_path", races)
    own = run(tmp_path)
    assert (path.with_name(f"{own.run_id}.json")).read_text() == "other"
    assert records.load(path.with_name(f"{own.run_id}.2.json")) == own
    monkeypatch.undo()
    assert run(tmp_path) == own


def test_saving_beside_others_never_replaces_one(tmp_path: Path) -> None:
    record = make_record()
    threads = [threading.Thread(target=records.save_beside, args=(record, tmp_path))
               for _ in range(8)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = records.record_path(tmp_path, record.task, record.model, record.run_id)
    found = records.siblings(first)
    assert [records.load(p).number for p in found] == list(range(1, 9))
    assert not list(tmp_path.rglob("*.tmp"))
    found[2].unlink()
    assert records.save_beside(record, tmp_path) == found[2]


@pytest.mark.parametrize("text, says", [
    ("{", "not a JSON record"), ('{"schema_version": 99}', "schema_version=99")
])  # fmt: skip
def test_a_damaged_record_that_was_not_made_here_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    shipped, path = came_along(tmp_path)
    path.write_text(text)
    capsys.readouterr()
    run(tmp_path)
    out = capsys.readouterr().out
    assert says in out and "it stays as it is" in out and path.read_text() == text
    assert paths(tmp_path) == [f"{shipped.run_id}.2.json", path.name]


def test_records_on_other_data_or_without_a_result_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped, path = came_along(tmp_path)
    monkeypatch.setattr(Toy, "settings", lambda self: {"changed": True})
    capsys.readouterr()
    run(tmp_path)
    out = capsys.readouterr().out
    assert ", on other data)" in out
    assert f"made on other data (fingerprint {shipped.data['fingerprint'][:12]}, here " in out
    assert paths(tmp_path) == [f"{shipped.run_id}.2.json", path.name]
    stopped = dataclasses.replace(shipped, status="interrupted", result=None)
    assert "it ended as interrupted" in runs.likeness(shipped, stopped)


def right_of(record: Record) -> records.SplitResult:
    assert record.result
    return record.result.test


def test_how_far_two_trainings_are_apart_and_whether_that_is_noise() -> None:
    rng = np.random.default_rng(0)
    right = rng.random(2000) < 0.4

    def made(correct: np.ndarray, **fields: Any) -> Record:
        return make_record(accuracy=float(correct.mean()), correct=correct, **fields)

    flipped = right.copy()
    flipped[:40] ^= True
    gained, lost = int((flipped & ~right).sum()), int((right & ~flipped).sum())
    text = runs.likeness(made(flipped), made(right))
    assert f"{100 * (flipped.mean() - right.mean()):+.2f} points: {gained} of 2,000 test" in text
    assert f"only here, {lost} only there" in text and text.endswith("within noise")
    better = right.copy()
    better[np.flatnonzero(~right)[:90]] = True
    text = runs.likeness(made(better), made(right))
    assert "+4.50 points" in text and text.endswith("more than noise over test examples")
    other = make_record().environment | {"torch": "2.9.0"}
    text = runs.likeness(made(better), made(right, environment=other))
    assert text.endswith("; made on Some CPU, float32, 4 threads, torch 2.9.0, here Some CPU, "
                         "float32, 4 threads, torch 2.13.0")  # fmt: skip
    for bits in (None, "####", "AAAA"):
        damaged = made(right)
        test = dataclasses.replace(right_of(damaged), correct=bits)
        result = dataclasses.replace(damaged.result, test=test)  # type: ignore[type-var]
        damaged = dataclasses.replace(damaged, result=result)
        assert runs.likeness(made(better), damaged) == (
            "+4.50 points; which examples were right is not known of both"
        )
    same = made(right, curve=[])
    assert runs.likeness(made(right), same).endswith("though not at every evaluation on the way")


def test_a_command_that_does_nothing_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file, not a folder")
    with pytest.raises(OSError, match="not writable"):
        run(tmp_path)
    assert not list((tmp_path / "outputs").iterdir())


def test_a_process_that_comes_while_the_folder_is_removed_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = Path.rmdir

    def meet(folder: Path) -> None:
        (folder / "run.lock").touch()  # of the other process
        remove(folder)

    monkeypatch.setattr(Path, "rmdir", meet)
    with pytest.raises(ValueError, match="refused"), runs.locked(tmp_path / "run"):
        raise ValueError("refused")
    assert (tmp_path / "run" / "run.lock").exists()


def test_a_folder_that_is_moved_away_meanwhile_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="refused"), runs.locked(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "away")
        raise ValueError("refused")
