"""What tasks share that have a generator of ours and read the released files where they lie."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from lra.tasks.archives import is_archive
from lra.tasks.beside import listing
from lra.tasks.task import SPLITS, Task, check_path

ARCHIVES = ("lra_release", "lra_release.gz", "lra_release.tar", "lra_release.tar.gz")
PACKED = r"lra_release.*\.(?:zip|7z|rar|part)"  # the release in forms that are not unpacked here


@dataclass(kw_only=True)
class GeneratedTask(Task):
    """A task from files, from a generator, or as a synthetic stand-in.

    `source=auto` takes files if there are any under `data_dir` (or at `path`), else generates; the
    printed source and the record's `kind` say which.

    Raises:
        ValueError: a setting is out of range or contradicts another; names the key.
    """

    synthetic_sizes: ClassVar[dict[str, int]] = {"train": 2_000, "val": 200, "test": 200}
    largest_split: ClassVar[int] = 2**63

    source: Literal["auto", "files", "generated", "synthetic"] = "auto"
    path: str | None = None
    num_train: int | None = None
    num_val: int | None = None
    num_test: int | None = None
    generator_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.path, self.source)
        for key in ("num_train", "num_val", "num_test"):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= self.largest_split:
                raise ValueError(
                    f"task.{key}={value}: expected 1 to {self.largest_split}, or null for the usual"
                )
        if not 0 <= self.generator_seed < 2**63:
            raise ValueError(f"task.generator_seed={self.generator_seed}: expected 0 to 2**63 - 1")

    @property
    def kind(self) -> Literal["files", "generated", "synthetic"]:
        """`source` with `auto` decided: files where there are any, else generated."""
        if self.source != "auto":
            return self.source
        return "files" if self.path is not None or self.has_files else "generated"

    @property
    @abstractmethod
    def has_files(self) -> bool:
        """Whether there is a trace of the released files."""

    @property
    def sizes(self) -> dict[str, int]:
        """Examples per split that are made, unless files are read."""
        usual = self.synthetic_sizes if self.kind == "synthetic" else self.official_sizes
        return {split: getattr(self, f"num_{split}") or usual[split] for split in SPLITS}

    def refuse_keys(self, keys: tuple[str, ...], purpose: str, remedy: str) -> None:
        """Refuse keys that the source does not read, unless they stand at their defaults.

        Raises:
            ValueError: names the first such key.
        """
        for key in keys:
            if getattr(self, key) != self.default(key):
                raise ValueError(
                    f"task.{key}={getattr(self, key)} is {purpose}, but the source is "
                    f"{self.describe_source()}; {remedy}"
                )

    def default(self, key: str) -> Any:
        """The default of a setting."""
        return next(field.default for field in fields(self) if field.name == key)

    def refuse_archive(self, root: Path, expected: str) -> None:
        """Raise if the release lies there packed, or if `root` is some other file.

        Raises:
            ValueError: names the file, and the command that unpacks it or what was `expected`.
        """
        folders = (root, root / "lra_release")
        for file in [root, *(folder / name for folder in folders for name in ARCHIVES)]:
            if is_archive(file):
                # The archive's own folder is called lra_release; a file of that name is in its way.
                rename = f"mv {file} {file}.tar && " if file.name == "lra_release" else ""
                packed = f"{file}.tar" if rename else file
                raise ValueError(
                    f"task '{self.name}': {file} is an archive; unpack it with "
                    f"`{rename}tar xf {packed} -C {file.parent}`, or set task.source=generated"
                )
        if root.is_file():
            raise ValueError(f"task.path={self.path}: expected {expected}")

    def refuse_unread(self, found: list[Path], expected: str) -> None:
        """Raise if there are files that were meant for this task and cannot be read.

        Raises:
            ValueError: names them, and what was `expected`.
        """
        if found:
            raise ValueError(
                f"task '{self.name}': {listing(found)} cannot be read; expected {expected}. "
                "Convert or move that, or set task.source=generated to leave it aside"
            )
