"""Curves and the final record in Weights & Biases or TensorBoard, besides a run's own files.

metrics.jsonl stays the source: each session first sends what is in it and not yet there, then what
comes. So a run that was killed, offline or logged nowhere before gets its whole curve, each step
once. Whatever fails in here is reported once and never reaches the training.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import secrets
import shlex
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lra.config import LoggerConfig, config_hash
from lra.console import first_line
from lra.files import write_atomically
from lra.values import flatten

WANDB_ID = "wandb-id.txt"  # in a run's folder
ENDED = ("completed", "at_chance", "diverged")  # no step of such a run is still to come
SUMMARY = ("status", "message", "result.", "protocol.", "speed.", "num_params", "peak_memory_bytes")
# What wandb would collect by itself. Its own variables still ask for it: WANDB_CONSOLE=wrap, or
# with a second underscore where the name has an x, WANDB__DISABLE_STATS=false.
QUIET = {
    "console": "off", "save_code": False, "disable_code": True, "disable_git": True,
    "disable_job_creation": True, "label_disable": True, "x_disable_meta": True,
    "x_disable_machine_info": True, "x_disable_stats": True, "x_save_requirements": False,
    "show_info": False, "quiet": True,
}  # fmt: skip


def check_installed(config: LoggerConfig) -> None:
    """Raise a ValueError that says what to install, if the chosen logger's package is missing."""
    spec = None if config.name == "none" else importlib.util.find_spec(config.name)
    # A mere folder of that name, such as wandb leaves behind, has no origin.
    if config.name != "none" and (spec is None or spec.origin is None):
        raise ValueError(
            f"logger={config.name}: the package {config.name} is not installed; "
            f"run: pip install -e '.[{config.name}]'"
        )


def make_logger(
    config: LoggerConfig,
    *,
    run_id: str,
    run_dir: Path,
    plain_config: dict[str, Any],
    say: Callable[[str], None],
) -> Logger:
    """The run's logger, for a `with` block; at most one process of a run may have one.

    Raises:
        ValueError: the chosen logger's package is missing.
    """
    check_installed(config)
    logger = Logger(config.name, say, config.timeout_s)
    with logger.harmless():
        if config.name == "wandb":
            logger.writer = WandbRun(config, run_id, run_dir, plain_config, say)
        elif config.name == "tensorboard":
            logger.writer = TensorboardFiles(run_dir)
        if logger.writer is not None and (run_dir / "metrics.jsonl").exists():
            for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed run
                    logger.log([json.loads(line)])
    return logger


class Logger:
    """Passes rows of metrics.jsonl on, one entry a step; does nothing without a writer."""

    def __init__(
        self, name: str, say: Callable[[str], None], timeout_s: float = LoggerConfig.timeout_s
    ) -> None:
        self.writer: WandbRun | TensorboardFiles | None = None
        self._name, self._say, self._broken = name, say, False
        # A start online and, in vain, one offline; wandb keeps to its limits if its service lives.
        self._limit_s = 2 * timeout_s + 10
        self._step = -1
        self._values: dict[str, float] = {}  # of that step, sent when the next one comes

    def log(self, rows: list[dict[str, Any]]) -> None:
        """Send rows as they stand in metrics.jsonl; steps that are there already are left out."""
        if self.writer is None or self._broken:
            return
        with self.harmless():
            for row in rows:
                step, split = row["step"], row["split"]
                if step < self.writer.next_step:
                    continue
                if step != self._step:
                    self._send()
                for name in row.keys() - {"step", "split"}:
                    key = name if name == "lr" else f"{split}/{name.removeprefix(f'{split}_')}"
                    self._values[key] = row[name]
                self._step = step

    def finish(self, record: dict[str, Any], exit_code: int) -> None:
        """Send the record and wait, within limits, until all has arrived."""
        # The last step of a run that will go on is sent then, together with its validation.
        if record["status"] in ENDED and not self._broken:
            with self.harmless():
                self._send()
        self._close(record, exit_code)

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_: object) -> None:
        self._close(None, 1)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        """Turn the first error into a message, later ones into nothing; nothing takes for ever."""
        limit = threading.Timer(self._limit_s, _kill_service)
        limit.daemon = True
        if self._name == "wandb":
            limit.start()
        try:
            yield
        except Exception as error:
            if not self._broken:
                in_vain = self._name == "wandb" and limit.finished.is_set()
                reason = f"no answer within {self._limit_s:g} s" if in_vain else first_line(error)
                self._say(f"warning: {self._name}: {reason}; the run goes on without it")
            self._broken = True
        finally:
            limit.cancel()

    def _send(self) -> None:
        if self.writer is not None and self._values:
            self.writer.write(self._step, self._values)
            self.writer.next_step = self._step + 1
            self._values = {}

    def _close(self, record: dict[str, Any] | None, exit_code: int) -> None:
        writer, self.writer = self.writer, None
        if writer is not None:
            with self.harmless():
                writer.close(record, exit_code)


class WandbRun:
    """The run in Weights & Biases, under its own name; kept offline if the service is not there."""

    def __init__(
        self,
        config: LoggerConfig,
        run_id: str,
        run_dir: Path,
        plain_config: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read by the import
        import wandb

        settings: dict[str, Any] = {
            name: value
            for name, value in QUIET.items()
            if "WANDB_" + name.removeprefix("x").upper() not in os.environ
        } | {"init_timeout": config.timeout_s, "finish_timeout": config.timeout_s}

        wandb_id = wandb_id_of(run_dir, run_id)

        def start(mode: Any) -> Any:
            return wandb.init(
                project=config.project, entity=config.entity, id=wandb_id, name=run_id, mode=mode,
                group=config.group or config_hash(plain_config), config=plain_config, dir=run_dir,
                resume="allow", reinit="create_new",
                settings=wandb.Settings(finish_timeout_raises=True, **settings),
            )  # fmt: skip

        self._say, self._folder = say, run_dir / "wandb"
        logs = list(self._folder.glob(f"*run-*-{wandb_id}/run-{wandb_id}.wandb"))
        self._offline_logs = [log for log in logs if log.parent.name.startswith("offline")]
        self._online = config.mode == "online" and wandb.setup().settings.mode in ("online", "run")
        if self._online:
            try:
                if not wandb.login(prompt=False, verify=False):
                    raise ValueError("no API key (set WANDB_API_KEY, or run `wandb login`)")
                self._run = start("online")
                self.next_step = self._run.starting_step
                say(f"wandb    {self._run.url}")
            except Exception as error:
                say(f"warning: wandb: {first_line(error)}; the run is kept offline")
                self._online = False
                _stop_service()  # in which a failed start still holds the run's id
        if not self._online:
            self._run = start("offline")
            steps = (
                r.history.step.num for log in logs for r in records(log) if r.HasField("history")
            )
            self.next_step = 1 + max(steps, default=-1)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step, commit=True)

    def close(self, record: dict[str, Any] | None, exit_code: int) -> None:
        try:
            if record is not None:
                path = Path(self._run.dir) / "record.json"
                path.write_text(json.dumps(record), encoding="utf-8")
                self._run.save(str(path), base_path=self._run.dir, policy="now")
                flat = {k: v for k, v in flatten(record).items() if k.startswith(SUMMARY)}
                flat.pop("result.test.correct", None)  # long, and in the file
                self._run.summary.update({k.replace(".", "/"): v for k, v in flat.items()})
            self._run.finish(exit_code)
        except Exception:
            if self._online:
                folder = shlex.quote(str(Path(self._run.dir).parent))
                self._say(f"wandb    to upload the rest: wandb sync --include-online {folder}")
            _stop_service()  # a broken one would fail the next run of this process as well
            raise
        if self._online:
            for log in self._offline_logs:  # sent again in whole, so `wandb sync` has to skip it
                log.with_suffix(".wandb.synced").touch()
        else:
            self._say(f"wandb    to upload the run: wandb sync {shlex.quote(str(self._folder))}")


def wandb_id_of(run_dir: Path, run_id: str) -> str:
    """The id in Weights & Biases of what is trained in this folder, drawn at its first start.

    The run's own id would not do: trained once more in another folder, or by someone else, the run
    would be taken for the first one going on, whose steps are all there already.
    """
    path = run_dir / WANDB_ID
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8").strip()
    # A folder that an earlier version logged from goes on under the id that it has there.
    is_earlier = any((run_dir / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb"))
    wandb_id = run_id if is_earlier else f"{run_id}-{secrets.token_hex(4)}"
    write_atomically(path, wandb_id + "\n")
    return wandb_id


class TensorboardFiles:
    """Event files in the run's folder; each session writes the whole curve again."""

    next_step = 0

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop what earlier sessions wrote from this step on.
        self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=0, flush_secs=15)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self, record: dict[str, Any] | None, exit_code: int) -> None:
        if record is not None:
            text = f"```json\n{json.dumps(record, indent=1)}\n```"
            self._events.add_text("record", text, self.next_step)
        self._events.close()


def records(log: Path) -> Iterator[Any]:
    """Protobuf records in one of wandb's own logs (*.wandb), as far as they got to disk.

    The format is LevelDB's: after 7 bytes, fragments of records within blocks of 32 KiB, each
    behind its checksum, length and type (1 whole, 2 first, 3 middle, 4 last).
    """
    protobuf: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, at, message = log.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if at % 32768 > 32768 - 7:  # no room for a fragment
            at += -at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        message += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind == 0 or at > len(content):
            return
        if kind in (1, 4):
            yield protobuf.Record.FromString(message)
            message = b""


def _stop_service() -> None:
    import wandb

    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()


def _kill_service() -> None:
    """End wandb's service process at once; whoever waits for its answer gets an error."""
    with contextlib.suppress(Exception):  # there may be none, and these names are wandb's own
        setup: Any = importlib.import_module("wandb.sdk.wandb_setup")
        setup._singleton._connection._proc._process.kill()
