"""Pathfinder: are two marked points joined by a dashed contour? Pixels row by row; two classes.

Task: Long Range Arena (Tay et al. 2020, section 2.2.5, arXiv:2011.04006), with grey pictures of
32 x 32; Path-X is the same with 128 x 128. Pictures after Linsley et al. 2018 (arXiv:1805.08315).
Grey values 0 to 255 are the tokens, id = value + 1: black ground is never taken for padding.

Legend: N pictures, P pixels of a picture.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lra.console import print_line
from lra.files import replacing
from lra.tasks.beside import apart, shortened, unread
from lra.tasks.generated import PACKED, GeneratedTask
from lra.tasks.pathfinder_files import (
    GENERATED,
    Index,
    Listed,
    index_level,
    read_pictures,
    write_level,
)
from lra.tasks.pathfinder_generator import PathfinderParams, generate, params_for
from lra.tasks.task import SPLITS, Example
from lra.tasks.workers import map_in_order

LEVELS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
# The release nests its folder; people flatten it.
PREFIXES = ("lra_release/lra_release", "lra_release", "", "pathfinder")

GENERATOR_VERSION = 1  # raise it when the generator's pictures change; part of the cache's name
READER_VERSION = 1  # likewise when the same files give other examples
STAND_IN_VERSION = 1  # likewise for the synthetic stand-in
GENERATOR_KEYS = ("num_train", "num_val", "num_test", "num_distractors", "generator_seed")
SPLIT_STRIDE = 1 << 40  # numbers of generated pictures between the first ones of two splits
PICTURES_PER_JOB = 256  # of a process; a kill loses the jobs that are not done


@dataclass(kw_only=True)
class Pathfinder(GeneratedTask):
    """Pathfinder from the released files, from our generator, or as a synthetic stand-in.

    The release has no splits. Test and validation are a tenth each of the listed pictures, those
    with the lowest hashes of `split_seed` and path within the level's folder; so neither the run's
    seed nor the order of files plays a part. After that, empty and damaged pictures are left out
    and named.

    Generated splits are far apart in one endless row of pictures, so that none depends on the sizes
    of the others.

    The synthetic stand-in is noise in scattered squares on black, dim or bright by class.

    Raises:
        ValueError: a setting is out of range or contradicts another; names the key.
    """

    name: ClassVar[str] = "pathfinder"
    num_classes: ClassVar[int] = 2
    num_values: ClassVar[int] = 256
    class_names: ClassVar[tuple[str, ...]] = ("apart", "joined")
    official_sizes: ClassVar[dict[str, int]] = {"train": 160_000, "val": 20_000, "test": 20_000}
    largest_split: ClassVar[int] = SPLIT_STRIDE

    resolution: Literal[32, 64, 128, 256] = 32
    max_length: int = 1024
    difficulty: Literal["easy", "intermediate", "hard"] = "hard"
    split_seed: int = 0
    num_distractors: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length != self.resolution**2:
            raise ValueError(
                f"task.max_length={self.max_length}: expected {self.resolution**2}, the pixels of "
                f"a picture with task.resolution={self.resolution}"
            )
        if not 0 <= self.split_seed < 2**63:
            raise ValueError(f"task.split_seed={self.split_seed}: expected 0 to 2**63 - 1")
        if self.num_distractors is not None and not 0 <= self.num_distractors <= 255:
            raise ValueError(
                f"task.num_distractors={self.num_distractors}: expected 0 to 255, or null for the "
                "usual"
            )

    @property
    def picture_size(self) -> tuple[int, int]:  # type: ignore[override]
        """Height and width of a picture."""
        return self.resolution, self.resolution

    @property
    def has_files(self) -> bool:
        """Whether there is a folder of this size and level."""
        return self._folder is not None

    @property
    def params(self) -> PathfinderParams:
        """What the generator draws."""
        return params_for(self.resolution, self.difficulty, self.num_distractors)

    @property
    def protocol(self) -> dict[str, Any]:
        """The level, and what else is not as usual."""
        options = {
            key: getattr(self, key)
            for key in ("resolution", "num_distractors", "split_seed")
            if getattr(self, key) != self.default(key)
        }
        return {"validation": "val", "difficulty": self.difficulty, **options}

    def deviations(self) -> list[str]:
        """How the pictures differ from the benchmark's; numbers of pictures apart."""
        if self.kind == "synthetic":
            return []
        found = [
            f"task.{key}={getattr(self, key)} (benchmark: {self.default(key)})"
            for key in ("resolution", "difficulty")
            if getattr(self, key) != self.default(key)
        ]
        usual = params_for(self.resolution, self.difficulty).num_distractors
        if self.params.num_distractors != usual:
            found.append(f"task.num_distractors={self.num_distractors} (benchmark: {usual})")
        if self.kind == "files" and (self._level / GENERATED).exists():
            found.append("files with pictures of our generator (benchmark: the release)")
        return found

    def describe_source(self) -> str:
        """The source in words, for people."""
        if self.kind == "files":
            return f"the files in {self._level.resolve()}"
        if self.kind == "synthetic":
            return f"a synthetic stand-in, seed {self.generator_seed}"
        why = f" (no {self._level_name} under {self.data_dir})" if self.source == "auto" else ""
        return f"our generator, {self.difficulty} level, seed {self.generator_seed}{why}"

    def source_files(self) -> list[Path]:
        """The metadata and the pictures that they list, in order; empty for generated data.

        Raises:
            ValueError: nothing found, an archive that is still packed, several folders, a faulty
                line of the metadata, or a picture that is listed but missing.
        """
        if self.kind != "files":
            return []
        level = self._level
        return [*self._index.metadata, *(level / row.path for row in self._index.listed)]

    def left_out(self) -> list[str]:
        """What lies beside the metadata, and in other folders of this size."""
        if self.kind != "files":
            return []
        found = [path for path in self._unread(with_root=False) if path.name not in LEVELS.values()]
        return self._index.left_out + apart(found, [self._level])

    def settings(self) -> dict[str, Any]:
        """Every setting that shapes the content.

        Raises:
            ValueError: a key is set that this source does not read.
        """
        if self.kind == "files":
            self.refuse_keys(
                GENERATOR_KEYS,
                "for generated data",
                "set task.source=generated, or to use a part of the files task.limit_train, "
                "limit_val, limit_test",
            )
            return {
                "source": "files",
                "reader": READER_VERSION,
                "resolution": self.resolution,
                "split_seed": self.split_seed,
            }
        sizes = {f"num_{split}": size for split, size in self.sizes.items()}
        self.refuse_keys(("split_seed",), "for files", "set task.generator_seed instead")
        if self.kind == "generated":
            return {
                "source": "generated",
                "generator": GENERATOR_VERSION,
                "generator_seed": self.generator_seed,
                **asdict(self.params),
                **sizes,
            }
        self.refuse_keys(("num_distractors",), "for generated data", "drop it")
        return {
            "source": "synthetic",
            "version": STAND_IN_VERSION,
            "resolution": self.resolution,
            "generator_seed": self.generator_seed,
            **sizes,
        }

    def examples(self, split: str) -> Iterator[Example]:
        """Yield the pictures of a split in a fixed order.

        Raises:
            ValueError: a picture's file is whole but not one of this task; names the line of the
                metadata and the fault.
        """
        if self.kind == "files":
            yield from self._read(split)
        elif self.kind == "generated":
            yield from self._generate(split)
        else:
            yield from self._synthetic(split)

    def decode(self, values: np.ndarray) -> str:
        """The picture in ten shades, one line a row."""
        shades = np.frombuffer(b" .:-=+*#%@", np.uint8)[values.astype(int) * 10 // 256]
        side = self.resolution
        return "\n".join(bytes(shades[i : i + side]).decode() for i in range(0, len(shades), side))

    def overlaps(self, other: Mapping[str, Any]) -> str:
        """Likewise: of files another `split_seed` has most in train; generated splits are apart."""
        try:
            theirs = self.with_keys(other)
            if {self.kind, theirs.kind} != {"files"} or theirs.split_seed == self.split_seed:
                return ""
            if theirs._level.resolve() != self._level.resolve():
                return ""
        except (AttributeError, TypeError, ValueError, OSError):
            return ""
        about = "up to" if theirs.limit_train else "about"
        return (
            f"{about} 80 % of the val and of the test examples are among those of the other "
            f"training (task.split_seed={theirs.split_seed} there, {self.split_seed} here); set as "
            "there"
        )

    # --- generated ---

    def _generate(self, split: str) -> Iterator[Example]:
        first, size = SPLITS.index(split) * SPLIT_STRIDE, self.sizes[split]
        jobs = (
            (
                self.params,
                self.generator_seed,
                first + low,
                min(PICTURES_PER_JOB, size - low),
                None if self.work_dir is None else self.work_dir / f"{split}-{low}.npy",
            )
            for low in range(0, size, PICTURES_PER_JOB)
        )
        for block in map_in_order(make_block, jobs, self.num_workers):
            for row in block:
                yield Example((row[1:],), int(row[0]))

    def _synthetic(self, split: str) -> Iterator[Example]:
        rng = np.random.default_rng([self.generator_seed, SPLITS.index(split)])
        size, squares = self.sizes[split], 8
        for label in rng.permutation(np.arange(size) % 2).tolist():
            low, high = ((40, 120), (136, 216))[label]
            noise = rng.integers(low, high, (self.resolution, self.resolution), np.uint8)
            is_lit = rng.random((squares, squares)) < 0.5
            is_lit = np.kron(is_lit, np.ones((self.resolution // squares,) * 2, bool))
            yield Example(((noise * is_lit).ravel(),), label)

    # --- files ---

    def _read(self, split: str) -> Iterator[Example]:
        rows = split_rows(self._index.listed, self.split_seed)[split]
        jobs = (
            (str(self._level), self.resolution, rows[low : low + PICTURES_PER_JOB])
            for low in range(0, len(rows), PICTURES_PER_JOB)
        )
        left_out = []
        for pictures, labels, damaged in map_in_order(read_pictures, jobs, self.num_workers):
            left_out += damaged
            for pixels, label in zip(pictures, labels, strict=True):
                yield Example((pixels,), label)
        if split == "train":
            left_out += [f"{path}: not listed in the metadata" for path in self._index.unlisted]
        if left_out:
            names = shortened(left_out)
            print_line(f"  {split}: {len(left_out)} pictures left out: {names}", sys.stderr)
        self.skipped.setdefault(split, []).extend(left_out)

    @cached_property
    def _index(self) -> Index:
        return index_level(self._level)

    @property
    def _root(self) -> Path:
        return Path(self.data_dir) if self.path is None else Path(self.path).expanduser()

    @property
    def _level_name(self) -> str:
        return f"pathfinder{self.resolution}/{LEVELS[self.difficulty]}"

    @property
    def _level(self) -> Path:
        """The folder to read.

        Raises:
            ValueError: there is none, or there are several.
        """
        if self._folder is None:
            raise ValueError(
                f"task '{self.name}': found no folder {self._level_name}; tried "
                f"{', '.join(str(tried) for tried in self._candidates())}. Set "
                "task.source=generated to make an equal set here, task.path to the folder with "
                "metadata and imgs, or get the release of Long Range Arena (lra_release.gz, see "
                f"google-research/long-range-arena) and unpack it with `tar xf lra_release.gz -C "
                f"{self.data_dir}`"
            )
        return self._folder

    def _unread(self, with_root: bool = True) -> list[Path]:
        """What is in folders of this size, whatever it is, or is called as if it were meant so."""
        own = [(self._root / prefix / self._level_name).parent for prefix in PREFIXES]
        shared = [self._root / prefix for prefix in PREFIXES]
        own.append(self._root / "pathfinder")
        if self.path is not None and with_root:
            own.append(self._root)
        names = rf"pathfinder{self.resolution}(?![0-9]).*|pathfinder\..*|curv_.*"
        if self.resolution == 128:
            names += r"|path-?x\b(?!-[0-9a-f]{12}).*"  # but not a cache
        found = unread(own, shared, f"{names}|{PACKED}")
        sides = {f"pathfinder{side}" for side in (32, 64, 128, 256)}
        return [path for path in found if path.name not in sides]

    def _candidates(self) -> list[Path]:
        nested = [self._root / prefix / self._level_name for prefix in PREFIXES]
        if self.path is None:
            return nested
        return [self._root, self._root / LEVELS[self.difficulty], *nested]

    @cached_property
    def _folder(self) -> Path | None:
        root = self._root
        is_level = self.path is not None and any(
            (root / name).is_dir() for name in ("metadata", "imgs")
        )
        if is_level:
            for level, name in LEVELS.items():
                if root.name == name and level != self.difficulty:
                    raise ValueError(
                        f"task.path={self.path} is the {level} level, but "
                        f"task.difficulty={self.difficulty}; change one of them"
                    )
            return root
        places = [folder for folder in self._candidates() if folder != root and folder.is_dir()]
        found = {folder.resolve(): folder for folder in places}
        if len(found) > 1:
            # The release has one set twice; whether they are equal is not known.
            raise ValueError(
                f"task '{self.name}': found {self._level_name} {len(found)} times: "
                f"{', '.join(str(folder) for folder in found.values())}; set task.path to the "
                "folder to use"
            )
        if not found:
            expected = f"a folder with metadata and imgs, or one that has {self._level_name}"
            self.refuse_archive(root, expected)
            self.refuse_unread(
                self._unread(), f"{self._level_name}/ with metadata and imgs (task.difficulty)"
            )
        return next(iter(found.values()), None)


@dataclass(kw_only=True)
class PathX(Pathfinder):
    """Path-X: Pathfinder with pictures of 128 x 128."""

    name: ClassVar[str] = "pathx"
    synthetic_sizes: ClassVar[dict[str, int]] = {"train": 500, "val": 50, "test": 50}

    resolution: Literal[32, 64, 128, 256] = 128
    max_length: int = 16_384


def split_rows(listed: list[Listed], seed: int) -> dict[str, list[Listed]]:
    """Cut a level's pictures into splits, see `Pathfinder`; each keeps the order of the list."""
    salt = f"{seed}\n"
    keys = [hashlib.sha256((salt + row.path).encode()).digest() for row in listed]
    order = sorted(range(len(listed)), key=keys.__getitem__)
    held = max(1, len(listed) // 10)
    parts = {"test": order[:held], "val": order[held : 2 * held], "train": order[2 * held :]}
    return {split: [listed[i] for i in sorted(part)] for split, part in parts.items()}


def make_block(
    params: PathfinderParams, seed: int, start: int, count: int, file: Path | None
) -> np.ndarray:
    """Generated pictures [N, 1 + P] (uint8), label first; kept in `file`, and taken from there."""
    if file is not None:
        kept = _load_block(file, (count, 1 + params.resolution**2))
        if kept is not None:
            return kept
    pictures = generate(params, seed, start, count)
    block = np.column_stack([pictures.labels_N, pictures.images_NRR.reshape(count, -1)])
    if file is not None:
        _save_block(file, block)
    return block


def _load_block(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """What a killed build has finished, if it has."""
    try:
        block = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return block if block.shape == shape and block.dtype == np.uint8 else None


def _save_block(file: Path, block: np.ndarray) -> None:
    """Write beside `file`, then rename: it is there whole or not at all."""
    with replacing(file) as stream:
        np.save(stream, block)


def export(
    task: Pathfinder,
    folder: Path,
    *,
    truth: Path | None = None,
    pictures_per_batch: int = 1000,
    num_workers: int = 1,
) -> Path:
    """Write a task's generated pictures in the layout of the release, below `folder`.

    Train, val and test follow each other; no batch has pictures of two of them. `truth` is a table
    to write with the places of the markers and of both ends of both target contours.

    Returns:
        The level's folder.

    Raises:
        ValueError: that folder is there already, or the task does not generate.
    """
    if task.kind != "generated":
        raise ValueError(
            f"task '{task.name}': only generated pictures are exported, but the source is "
            f"{task.describe_source()}; set task.source=generated"
        )
    if pictures_per_batch < 1:
        raise ValueError(f"pictures_per_batch={pictures_per_batch}: expected at least 1")
    level = folder / f"pathfinder{task.resolution}" / LEVELS[task.difficulty]
    batches = [
        (i * SPLIT_STRIDE + low, min(pictures_per_batch, task.sizes[split] - low))
        for i, split in enumerate(SPLITS)
        for low in range(0, task.sizes[split], pictures_per_batch)
    ]
    write_level(
        level, task.params, task.generator_seed, batches, truth=truth, num_workers=num_workers
    )
    return level
