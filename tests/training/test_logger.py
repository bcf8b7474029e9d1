"""Weights & Biases and TensorBoard: every step once, whatever happens, and never in the way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lra.cli import compose_config, typed
from lra.config import LoggerConfig, config_hash
from lra.job import EXIT_CODES
from lra.training.logger import WANDB_ID, Logger, check_installed, make_logger, records
from tests.test_sweep import BAD, GOOD, found, sweep

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789" * 4  # wandb wants 40 characters
RUN_ID = "toy-softmax-seed0-0123abcd"
CONFIG = {"seed": 0, "train": {"lr": 0.1, "num_steps": 20}}
RECORD = {
    "run_id": RUN_ID, "status": "completed", "num_params": 7, "curve": [{"step": 4}],
    "result": {"step": 4, "test": {"accuracy": 0.5, "correct": "AAAA"}},
}  # fmt: skip
OFFLINE = LoggerConfig(name="wandb", mode="offline")


def train_row(step: int) -> dict[str, Any]:
    return {"split": "train", "step": step, "loss": 1 / step, "accuracy": 0.25, "lr": step / 100}


def val_row(step: int) -> dict[str, Any]:
    return {"split": "val", "step": step, "train_loss": 2.0, "val_accuracy": 0.5, "val_loss": 3.0,
            "lr": step / 100}  # fmt: skip


class Job:
    """Does what the trainer does: rows to metrics.jsonl, then to the logger."""

    def __init__(
        self, run_dir: Path, config: LoggerConfig, run_id: str = RUN_ID, **options: Any
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.metrics = run_dir / "metrics.jsonl"
        self.said: list[str] = []
        self.logger = make_logger(
            config, run_id=run_id, run_dir=run_dir, say=self.said.append,
            **({"plain_config": CONFIG} | options),
        )  # fmt: skip

    def train(self, first: int, last: int, eval_every: int = 4) -> None:
        kept = self.metrics.read_text().splitlines(True) if self.metrics.exists() else []
        self.metrics.write_text("".join(k for k in kept if json.loads(k)["step"] < first))
        for step in range(first, last + 1):
            self.write(train_row(step))
            if step % eval_every == 0:
                self.write(val_row(step))

    def write(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.logger.log([row])

    def run(self, first: int, last: int, status: str = "completed") -> None:
        with self.logger:
            self.train(first, last)
            self.logger.finish(RECORD | {"status": status}, 0)


def service_pids() -> list[int]:
    """wandb's service processes that this process has started and not ended."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            name, state, parent = re.findall(r"\((.*)\) (\S) (\d+)", path.read_text())[0]
            if name.startswith("wandb-core") and state != "Z" and int(parent) == os.getpid():
                pids.append(int(path.parent.name))
    return pids


def stop_service() -> None:
    """End wandb's service process, which writes the last part of its logs then."""
    if "wandb" in sys.modules:
        with contextlib.suppress(Exception, SystemExit):
            sys.modules["wandb"].teardown()
    wait_for(lambda: not service_pids())


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """wandb without anyone's login or settings; its processes end with the test."""
    module = pytest.importorskip("wandb")
    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    stop_service()  # which forgets what was read from the environment before
    yield module
    stop_service()


def logs(run_dir: Path) -> list[Path]:
    """wandb's own logs of a run, complete and in order of start."""
    stop_service()
    return sorted((run_dir / "wandb").glob("*run-2*/run-*.wandb"))


def curve(run_dir: Path) -> list[tuple[int, dict[str, Any]]]:
    """Steps and values in wandb's own logs of a run, in order of start."""
    rows = []
    for log in logs(run_dir):
        for record in records(log):
            if record.HasField("history"):
                items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json)
                         for i in record.history.item}  # fmt: skip
                rows.append((record.history.step.num, items))
    return rows


def run_record(log: Path) -> Any:
    return next(r.run for r in records(log) if r.HasField("run"))


def each_step_once(rows: list[tuple[int, dict[str, Any]]], last: int = 20) -> bool:
    whole = all(
        values["train/loss"] == pytest.approx(1 / step)
        and ("val/loss" in values) == (step % 4 == 0)
        for step, values in rows
    )
    return whole and [step for step, _ in rows] == list(range(1, last + 1))


def test_nothing_is_logged_by_default(tmp_path: Path) -> None:
    assert typed(compose_config([])).logger == LoggerConfig(name="none")
    Job(tmp_path, LoggerConfig()).run(1, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["none", "wandb", "tensorboard"])
def test_the_settings_in_configs_are_complete(name: str) -> None:
    logger = typed(compose_config([f"logger={name}"])).logger
    assert logger == LoggerConfig(name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wait_has_an_end(seconds: float) -> None:
    with pytest.raises(ValueError, match="logger.timeout_s="):
        LoggerConfig(timeout_s=seconds)


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
@pytest.mark.parametrize("folder_in_the_way", [False, True])
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, folder_in_the_way: bool
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if folder_in_the_way:
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"^logger={name}: .*pip install -e '.\[{name}\]'"):
        check_installed(LoggerConfig(name=name))  # type: ignore[arg-type]


def test_an_offline_run_holds_curve_config_and_record(wandb: Any, tmp_path: Path) -> None:
    job = Job(tmp_path, OFFLINE)
    print("a line on the console")
    job.run(1, 20)
    (log,) = logs(tmp_path)
    assert each_step_once(curve(tmp_path)) and log.parent.name.startswith("offline-run-")
    assert curve(tmp_path)[3][1].keys() >= {"val/accuracy", "val/loss", "val/train_loss", "lr"}
    run = run_record(log)
    assert (run.display_name, run.project, run.run_group) == (RUN_ID, "lra", config_hash(CONFIG))
    assert re.fullmatch(f"{RUN_ID}-[0-9a-f]{{8}}", run.run_id)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["train"] == CONFIG["train"] and config["seed"] == 0
    files = log.parent / "files"
    assert json.loads((files / "record.json").read_text()) == RECORD
    # No code, requirements, console or description of the machine.
    assert {p.name for p in files.iterdir()} <= {"record.json", "config.yaml", "wandb-summary.json"}
    kinds = {record.WhichOneof("record_type") for record in records(log)}
    assert not kinds & {"output", "output_raw", "stats", "environment"}
    assert not run.HasField("git")
    items = [i for r in records(log) if r.HasField("summary") for i in r.summary.update]
    summary = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
    assert summary["result/test/accuracy"] == 0.5 and summary["status"] == "completed"
    assert not any("correct" in key for key in summary)
    assert job.said == [f"wandb    to upload the run: wandb sync {tmp_path / 'wandb'}"]


def test_what_wandb_collects_can_be_asked_for(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_CONSOLE", "wrap")
    job = Job(tmp_path, OFFLINE)
    print("a line on the console")
    job.run(1, 4)
    (log,) = logs(tmp_path)
    kinds = {record.WhichOneof("record_type") for record in records(log)}
    assert kinds & {"output", "output_raw"}


def test_two_jobs_in_one_process_are_two_runs(wandb: Any, tmp_path: Path) -> None:
    Job(tmp_path / "never ended", OFFLINE, "c").train(1, 3)
    with pytest.raises(RuntimeError, match="the first job"):  # noqa: PT012, SIM117
        with (first := Job(tmp_path / "a", OFFLINE, "a")).logger:
            first.train(1, 3)
            raise RuntimeError("the first job")
    second = Job(tmp_path / "b", OFFLINE, "b", plain_config=CONFIG | {"seed": 1})
    second.run(1, 20)
    codes, seeds = [], []
    for name in ("a", "b"):
        (log,) = logs(tmp_path / name)
        assert run_record(log).display_name == name
        seeds += [
            json.loads(c.value_json) for c in run_record(log).config.update if c.key == "seed"
        ]
        codes += [r.exit.exit_code for r in records(log) if r.HasField("exit")]
    assert seeds == [0, 1] and codes == [1, 0]
    assert each_step_once(curve(tmp_path / "b"))


@pytest.mark.parametrize("end", ["interrupted", "killed"])
def test_a_resumed_offline_run_has_each_step_once(wandb: Any, tmp_path: Path, end: str) -> None:
    if end == "interrupted":
        Job(tmp_path, OFFLINE).run(1, 12, "interrupted")
    else:
        code = (
            "import os, pathlib; from tests.training.test_logger import *; "
            f"job = Job(pathlib.Path({str(tmp_path)!r}), OFFLINE); job.train(1, 12); "
            "os.kill(os.getpid(), 9)"
        )
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -9
    Job(tmp_path, OFFLINE).run(11, 20)
    assert len(logs(tmp_path)) == 2 and each_step_once(curve(tmp_path))


def test_the_validation_of_an_interrupted_step_is_not_lost(wandb: Any, tmp_path: Path) -> None:
    first = Job(tmp_path, OFFLINE)
    with first.logger:
        first.train(1, 3)
        first.write(train_row(4))
        first.logger.finish(RECORD | {"status": "interrupted"}, 75)
    second = Job(tmp_path, OFFLINE)
    second.write(val_row(4))
    second.run(5, 20)
    assert each_step_once(curve(tmp_path))


def test_a_run_that_was_logged_nowhere_before_is_sent_whole(wandb: Any, tmp_path: Path) -> None:
    Job(tmp_path, LoggerConfig()).train(1, 12)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "st')  # killed while writing
    job = Job(tmp_path, OFFLINE)
    (tmp_path / "metrics.jsonl").write_text("")
    job.run(13, 20)
    assert each_step_once(curve(tmp_path))


def test_a_long_log_is_read_back_whole(wandb: Any, tmp_path: Path) -> None:
    job = Job(tmp_path, OFFLINE)
    with job.logger:
        job.logger.log([train_row(step) for step in range(1, 1501)])
        job.logger.finish(RECORD, 0)
    (log,) = logs(tmp_path)
    assert log.stat().st_size > 5 * 32768  # so that entries lie across blocks
    assert [step for step, _ in curve(tmp_path)] == list(range(1, 1501))


def test_a_log_is_read_as_far_as_it_got_to_disk(wandb: Any, tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    def fragment(content: bytes, kind: int) -> bytes:
        return struct.pack("<IHB", 0, len(content), kind) + content

    def entry(step: int, size: int) -> bytes:
        record = Record()
        record.history.step.num = step
        item = record.history.item.add(key="x", value_json="1" * (size // 2))
        item.value_json += "1" * (size - record.ByteSize())
        item.value_json = item.value_json[
            record.ByteSize() - size :
        ]  # lengths may take a byte more
        assert record.ByteSize() == size
        return record.SerializeToString()

    block, log = 32768, tmp_path / "run-x.wandb"
    first = entry(1, block - 7 - 7 - 3)  # leaves 3 bytes, too few for a fragment
    second = entry(2, 2 * block)
    pieces = [second[: block - 7], second[block - 7 : 2 * (block - 7)], second[2 * (block - 7) :]]
    content = b":W&B\0\0\0" + fragment(first, 1) + bytes(3)
    content += b"".join(map(fragment, pieces, (2, 3, 4))) + fragment(entry(3, 50), 1)
    log.write_bytes(content)
    assert [r.history.step.num for r in records(log)] == [1, 2, 3]
    for cut in (1, 49, 53, 60, 80):  # the third or the end of the second is not whole
        log.write_bytes(content[:-cut])
        assert [r.history.step.num for r in records(log)] == ([1, 2] if cut <= 57 else [1])
    log.write_bytes(content + bytes(100))  # room that was set aside, not yet written
    assert [r.history.step.num for r in records(log)] == [1, 2, 3]


SCRIPT = """
import pathlib, sys, time
from tests.training.test_logger import *
start = time.monotonic()
job = Job(pathlib.Path(sys.argv[1]), LoggerConfig(name="wandb", timeout_s=2))
job.run(1, 20)
print(*job.said, f"took {time.monotonic() - start:.1f} s", sep="\\n")
"""


@pytest.mark.parametrize(
    "network",
    ["refused", pytest.param("silent", marks=pytest.mark.slow), "no key", "bad key", "WANDB_MODE"],
)
def test_without_key_or_network_a_run_is_kept_offline(
    wandb: Any, tmp_path: Path, network: str
) -> None:
    env = os.environ | {"WANDB_API_KEY": "short" if network == "bad key" else KEY}
    env |= {"WANDB_MODE": "offline"} if network == "WANDB_MODE" else {}
    if network == "no key":
        del env["WANDB_API_KEY"]
    with contextlib.ExitStack() as stack:
        if network == "silent":  # takes connections, never answers
            import socket

            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=50))
            env["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        master, terminal = os.openpty()  # where wandb would ask for a key
        stack.callback(os.close, master)
        stack.callback(os.close, terminal)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, env=env, text=True,
            stdin=terminal, stdout=subprocess.PIPE, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0 and each_step_once(curve(tmp_path))
    reasons = {"no key": "no API key", "bad key": "API key must have", "WANDB_MODE": ""}
    reason = reasons.get(network, "Failed to get resume status")
    assert ("the run is kept offline" in done.stdout) == (network != "WANDB_MODE")
    assert reason in done.stdout and f"wandb sync {tmp_path / 'wandb'}" in done.stdout
    took = re.search(r"took ([0-9.]+) s", done.stdout)
    assert took and float(took[1]) < 20, done.stdout


def test_trouble_is_told_once_and_goes_no_further(tmp_path: Path) -> None:
    class Failing:
        next_step, closed = 0, 0

        def write(self, step: int, values: dict[str, float]) -> None:
            raise OSError(28, "No space left on device")

        def close(self, record: dict[str, Any] | None, exit_code: int) -> None:
            self.closed += 1
            raise OSError("still none")

    said: list[str] = []
    writer: Any = Failing()
    with Logger("wandb", said.append) as logger:
        logger.writer = writer
        for step in range(1, 5):
            logger.log([train_row(step)])
        logger.finish(RECORD, 0)
    assert writer.closed == 1
    assert said == [
        "warning: wandb: [Errno 28] No space left on device; the run goes on without it"
    ]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for the process in /proc")
def test_a_dead_service_harms_neither_the_run_nor_the_next(wandb: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "a", OFFLINE, "a")
    with job.logger:
        job.train(1, 3)
        (pid,) = service_pids()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not service_pids())
        job.train(4, 20)
        job.logger.finish(RECORD, 0)
    warnings = [line for line in job.said if line.startswith("warning")]
    assert len(warnings) == 1 and "the run goes on without it" in warnings[0]
    Job(tmp_path / "b", OFFLINE, "b").run(1, 20)
    assert each_step_once(curve(tmp_path / "b"))


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for the process in /proc")
def test_a_service_that_does_not_answer_is_not_waited_for_for_ever(
    wandb: Any, tmp_path: Path
) -> None:
    job = Job(tmp_path / "a", OFFLINE, "a")
    job.logger._limit_s = 1.0
    with job.logger:
        job.train(1, 3)
        (pid,) = service_pids()
        os.kill(pid, signal.SIGSTOP)
        job.logger.finish(RECORD, 0)
    assert not service_pids()
    (warning,) = [line for line in job.said if line.startswith("warning")]
    assert warning == "warning: wandb: no answer within 1 s; the run goes on without it"


class Service(ThreadingHTTPServer):
    """As much of the Weights & Biases service as a run and `wandb sync` talk to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.histories: dict[str, list[dict[str, Any]]] = {}  # by the run's id
        self.created: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        self.exit_code: int | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def curve(self, wandb_id: str = "") -> list[tuple[int, dict[str, Any]]]:
        """Of a run, or of the only one."""
        if not wandb_id:
            (wandb_id,) = self.created
        return [(row["_step"], row) for row in self.histories[wandb_id]]

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Connections that wandb drops are no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_PUT(self) -> None:
        self.server.files[self.path.removeprefix("/upload/")] = self._body()
        self._reply({})

    def do_POST(self) -> None:
        body, server = json.loads(self._body() or b"{}"), self.server
        if self.path.endswith("/file_stream"):
            part = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            rows = [json.loads(line) for line in part["content"]]
            history = server.histories.setdefault(self.path.split("/")[-2], [])
            history[part["offset"] : part["offset"] + len(rows)] = rows
            server.exit_code = body.get("exitcode", server.exit_code)
            return self._reply({})
        given = body.get("variables") or {}
        project = {"id": "p", "name": "lra", "entity": {"id": "e", "name": "me"}}
        wandb_id = str(given.get("name"))
        history = server.histories.get(wandb_id, [])
        bucket = {"id": wandb_id, "name": wandb_id, "displayName": given.get("displayName"),
                  "historyLineCount": len(history), "project": project}  # fmt: skip
        operation = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
        name = operation[1] if operation else ""
        data: dict[str, Any] = {}
        if name == "UpsertBucket":
            server.created.setdefault(wandb_id, given)
            data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        elif name == "RunResumeStatus":
            tail = json.dumps([json.dumps(row) for row in history[-1:]])
            bucket |= {"config": "{}", "wandbConfig": '{"t":1}', "summaryMetrics": "{}", "tags": [],
                       "historyTail": tail, "eventsTail": "[]", "eventsLineCount": 0,
                       "logLineCount": 0}  # fmt: skip
            data = {"model": project | {"bucket": bucket if wandb_id in server.created else None}}
        elif name == "CreateRunFiles":
            data = {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": [
                {"name": f, "uploadUrl": f"{server.url}/upload/{f}"} for f in given["files"]
            ]}}  # fmt: skip
        return self._reply({"data": data})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def service(wandb: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    server = Service()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield server
    server.stop()


ONLINE = LoggerConfig(name="wandb", timeout_s=3, project="lra", group="seeds")


def sync(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_an_online_run_goes_on_where_the_service_is(
    service: Service, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    first = Job(tmp_path, ONLINE)
    first.run(1, 12, "interrupted")
    assert [step for step, _ in service.curve()] == list(range(1, 12))  # the last one is held back
    second = Job(tmp_path, ONLINE)
    second.run(11, 20)
    assert each_step_once(service.curve()) and service.exit_code == 0
    ((wandb_id, created),) = service.created.items()
    names = created["displayName"], created["project"], created["groupName"]
    assert names == (RUN_ID, "lra", "seeds")
    assert json.loads(created["config"])["train"]["value"] == CONFIG["train"]
    assert json.loads(service.files["record.json"]) == RECORD
    assert service.files.keys() <= {"record.json", "wandb-summary.json", "config.yaml"}
    assert json.loads(service.files["wandb-summary.json"])["result/test/accuracy"] == 0.5
    assert first.said == second.said == [f"wandb    {service.url}/me/lra/runs/{wandb_id}"]
    assert "less than the current step" not in capfd.readouterr().err


def test_a_run_trained_once_more_elsewhere_is_one_of_its_own(
    service: Service, tmp_path: Path
) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        Job(folder, ONLINE).run(1, 20)
        Job(folder, ONLINE).run(21, 24)
    assert [given["displayName"] for given in service.created.values()] == [RUN_ID] * 2
    assert all(each_step_once(service.curve(wandb_id), 24) for wandb_id in service.created)


def test_a_folder_that_was_logged_under_the_id_of_the_run_goes_on_there(
    service: Service, tmp_path: Path
) -> None:
    path = tmp_path / WANDB_ID
    path.write_text(RUN_ID)
    Job(tmp_path, ONLINE).run(1, 12, "interrupted")
    path.unlink()  # earlier versions had no such file
    Job(tmp_path, ONLINE).run(11, 20)
    assert [*service.created] == [RUN_ID] and each_step_once(service.curve())


def test_offline_parts_are_uploaded_as_one_run(service: Service, tmp_path: Path) -> None:
    Job(tmp_path, OFFLINE).run(1, 12, "interrupted")
    Job(tmp_path, OFFLINE).run(11, 20)
    assert not service.histories
    sync(tmp_path / "wandb")
    assert each_step_once(service.curve()) and json.loads(service.files["record.json"]) == RECORD


@pytest.mark.parametrize(
    "network", ["offline", pytest.param("unreachable", marks=pytest.mark.slow)]
)
def test_each_job_of_a_sweep_is_a_run_with_its_whole_curve_also_without_network(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str
) -> None:
    """Two jobs in one process of run.py, the first of which fails; wandb reads its files back."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    mode = ["logger.mode=offline"] if network == "offline" else []
    words = [*BAD, "logger=wandb", "logger.timeout_s=3", *mode, "seed=1,0"]
    code, out, err = sweep(tmp_path, *words, timeout=120)
    assert code == 1 and "RuntimeError: injected" in out, err
    assert out.count("warning: wandb: ") == out.count("the run is kept offline") == 2 * (not mode)
    by_seed = found(tmp_path, "trouble")
    assert by_seed[1].status == "failed" and by_seed[0].status in GOOD
    server = Service()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    try:
        for seed, record in by_seed.items():
            assert (record.speed["wall_time_s"] or 0) < 20  # waits have an end
            run_dir = tmp_path / "outputs" / record.run_id
            assert f"wandb sync {Path('outputs') / record.run_id / 'wandb'}" in out
            # A start that did not reach the service leaves a folder too, without a curve.
            (log,) = [log for log in logs(run_dir) if "offline-run-" in str(log)]
            config = {c.key: json.loads(c.value_json) for c in run_record(log).config.update}
            assert (run_record(log).display_name, config["seed"]) == (record.run_id, seed)
            (code,) = [r.exit.exit_code for r in records(log) if r.HasField("exit")]
            assert code == EXIT_CODES[record.status]
            path = run_dir / "metrics.jsonl"
            written = map(json.loads, path.read_text().splitlines() if path.exists() else [])
            wanted = [(row["step"], row["loss"]) for row in written if row["split"] == "train"]
            ours = [(step, v["train/loss"]) for step, v in curve(run_dir)]
            server.histories, server.created = {}, {}
            sync(run_dir / "wandb")
            theirs = [(step, row["train/loss"]) for step, row in server.curve()]
            assert ours == theirs == wanted and len(wanted) == (8 if seed == 0 else 0)
            assert [c["displayName"] for c in server.created.values()] == [record.run_id]
            assert json.loads(server.files["record.json"]) == json.loads(record.to_json())
    finally:
        server.stop()


def test_a_run_begun_offline_is_whole_online(service: Service, tmp_path: Path) -> None:
    Job(tmp_path, OFFLINE).run(1, 12, "interrupted")
    Job(tmp_path, ONLINE).run(11, 20)
    assert "No runs to sync" in sync(tmp_path / "wandb")
    assert each_step_once(service.curve())


def test_a_network_that_dies_later_costs_nothing_but_a_wait(
    service: Service, tmp_path: Path
) -> None:
    job = Job(tmp_path, ONLINE)
    with job.logger:
        job.train(1, 10)
        service.stop()
        start = time.monotonic()
        job.train(11, 20)
        assert time.monotonic() - start < 2
        job.logger.finish(RECORD, 0)
        assert time.monotonic() - start < 12
    (log,) = logs(tmp_path)
    assert job.said[1:] == [
        f"wandb    to upload the rest: wandb sync --include-online {log.parent}",
        "warning: wandb: Timed out finishing run.; the run goes on without it",
    ]
    assert each_step_once(curve(tmp_path))


def tensorboard_curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


@pytest.mark.parametrize("end", ["interrupted", "killed"])
def test_tensorboard_events_have_each_step_once(tmp_path: Path, end: str) -> None:
    pytest.importorskip("tensorboard")
    config = LoggerConfig(name="tensorboard")
    first = Job(tmp_path, config)
    if end == "interrupted":
        first.run(1, 12, "interrupted")
    else:  # what was in its queue does not reach the disk
        first.train(1, 12)
    Job(tmp_path, config).run(11, 20)
    curves = tensorboard_curves(tmp_path)
    steps = list(range(1, 21))
    assert [step for step, _ in curves["train/loss"]] == steps
    assert [v for _, v in curves["train/loss"]] == pytest.approx([1 / step for step in steps])
    assert [step for step, _ in curves["val/accuracy"]] == [4, 8, 12, 16, 20]
    assert curves.keys() == {"train/loss", "train/accuracy", "lr", "val/loss", "val/accuracy",
                             "val/train_loss"}  # fmt: skip
