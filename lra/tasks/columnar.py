"""Parquet and Arrow tables, from files or from the hub."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lra.tasks.beside import listing

TableRow = tuple[str, tuple[Any, ...]]  # where it stands, for messages, and its columns

SUFFIXES = (".parquet", ".arrow")
_SPLIT_NAMES = {"train": "train", "test": "test"} | dict.fromkeys(
    ("validation", "valid", "val", "dev", "eval"), "val"
)
_SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(_SPLIT_NAMES)})(?:[-_.]|$)")
_NUMBER = re.compile(r"[0-9]+")
_SHARD = re.compile(r"-([0-9]+)-of-([0-9]+)")
_PLAIN_NAME = re.compile(r"(?!.*(?:-checkpoint|[-_.](?:copy|bak|backup|old|orig)\b))[\w.,=+-]+")
_LEFTOVER = re.compile(r"(?:cache-|tmp)")
_NOT_UTF8 = re.compile(r"Invalid UTF8 sequence at string index ([0-9]+)")  # pyarrow's words
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_TIMEOUT_S = 5
_INSTALL_HUB = "run: pip install -e '.[hub]'"


class Tables(NamedTuple):
    """The files of each split in their order, and the tables beside them that are not read."""

    files: dict[str, list[Path]]
    left_out: list[str]


def find_tables(folder: Path, splits: Sequence[str] = ("train", "test")) -> Tables:
    """Parquet or Arrow files of `splits`, at most one folder down; without files if there are none.

    A file belongs to the split that its name, else the name of its folder, has as a word. The files
    of a split are those that `state.json` beside them lists, as `save_to_disk` leaves it, or else
    one file, or a set whose numbers are complete. Copies, backups and the library's own leftovers
    are not taken.

    Raises:
        ValueError: a split is missing, its files are no such set, or there are files of both kinds.
    """
    found, left_out = _sorted_out(folder, splits)
    suffixes = sorted({file.suffix for files in found.values() for file in files})
    if len(suffixes) > 1:
        raise ValueError(f"{folder} has {' and '.join(suffixes)} files; expected one kind only")
    missing = [split for split in splits if split not in found]
    if found and missing:
        hint = f" (left out: {'; '.join(left_out[:3])})" if left_out else ""
        raise ValueError(
            f"{folder} has no file of the {missing[0]} split, e.g. {missing[0]}{suffixes[0]}{hint}"
        )
    for split, files in found.items():
        listed = listed_files(files[0].parent)
        if len({file.parent for file in files}) > 1:
            fault = "lie in several folders"
        elif listed is None:
            fault = _fault([file.name for file in files])
            files.sort(key=lambda file: [int(n) for n in _NUMBER.findall(file.name)])
        else:
            fault = ""
            files.sort(key=lambda file: listed.index(file.name))
            if absent := [name for name in listed if files[0].with_name(name) not in files]:
                raise ValueError(
                    f"{files[0].with_name('state.json')}: lists {absent[0]}, which is not there"
                )
        if fault:
            raise ValueError(
                f"{folder}: the files of the {split} split {fault}: {listing(files)}; move away "
                "what is not the data set's"
            )
    return Tables(found, left_out)


def _sorted_out(folder: Path, splits: Sequence[str]) -> tuple[dict[str, list[Path]], list[str]]:
    """Tables by split, and those that belong to none or are nobody's, with the reason."""
    found: dict[str, list[Path]] = {}
    left_out = []
    known = _known_folders(folder)
    for pattern in ("*", "*/*"):
        for file in sorted(folder.glob(pattern)):
            if file.suffix not in SUFFIXES or not file.is_file():
                continue
            parts = file.relative_to(folder).parts
            listed = listed_files(file.parent)
            words = (_SPLIT.search(part) for part in reversed(parts))
            split = next((_SPLIT_NAMES[word[1]] for word in words if word), None)
            if any(part.startswith(".") for part in parts):
                reason = "hidden"
            elif len(parts) > 1 and known is not None and parts[0] not in known:
                reason = f"not listed in {folder / 'dataset_dict.json'}"
            elif listed is not None and file.name not in listed:
                reason = f"not listed in {file.parent / 'state.json'}"
            elif listed is None and _LEFTOVER.match(file.name):
                reason = "left by the package datasets"
            elif not _PLAIN_NAME.fullmatch(file.name):
                reason = "a copy or a backup, by its name"
            elif split is None or split not in splits:
                reason = "of no split that is read"
            else:
                found.setdefault(split, []).append(file)
                continue
            left_out.append(f"{file}: {reason}")
    return found, left_out


def listed_files(folder: Path) -> list[str] | None:
    """The data files that the `state.json` of a data set on disk lists; None without one.

    Raises:
        ValueError: damaged, or it selects rows by files of indices.
    """
    path = folder / "state.json"
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_text())
        names = [entry["filename"] for entry in state["_data_files"]]
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"_data_files={names}")
        if indices := state.get("_indices_files") or state.get("_indices_data_files"):
            raise ValueError(f"{indices} choose rows; save it again after flatten_indices()")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: not what save_to_disk writes ({type(error).__name__}: {error}); save the "
            "data set again"
        ) from None
    return names


def _known_folders(folder: Path) -> list[str] | None:
    """The splits that the `dataset_dict.json` of a folder lists; None without one."""
    path = folder / "dataset_dict.json"
    if not path.is_file():
        return None
    try:
        return [str(name) for name in json.loads(path.read_text())["splits"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not what save_to_disk writes ({type(error).__name__}: {error}); save the "
            "data set again"
        ) from None


def _fault(names: list[str]) -> str:
    """Why files are not all of one set, empty if they are."""
    shards = [(int(m[1]), int(m[2])) for name in names if (m := _SHARD.search(name))]
    if shards:
        total = shards[0][1]
        is_whole = sorted(shards) == [(i, total) for i in range(total)]
        return "" if is_whole and len(names) == total else f"are not {total} parts of one set"
    if len(names) == 1:
        return ""
    if len({_NUMBER.sub("#", name) for name in names}) == 1:
        numbers = [[int(n) for n in _NUMBER.findall(name)] for name in names]
        for column in zip(*numbers, strict=True):
            if sorted(column) in ([*range(len(names))], [*range(1, 1 + len(names))]):
                return ""
    return "are not one set of numbered files"


def table_rows(file: Path, columns: Sequence[tuple[str, ...]]) -> Iterator[TableRow]:
    """Yield the rows of a Parquet or Arrow file; a column is given by its possible names.

    Text comes as its UTF-8 bytes, of whatever type the column is.

    Raises:
        ValueError: pyarrow is missing, or the file is damaged or lacks a column; names the file,
            and the row where a text is not UTF-8 or a value is none that Python has.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file}: reading it needs the package pyarrow; {_INSTALL_HUB}")
    import pyarrow as pa
    import pyarrow.parquet as pq

    def batches() -> Iterator[Any]:
        if file.suffix == ".parquet":
            yield from pq.ParquetFile(file).iter_batches(batch_size=1024)
            return
        with pa.memory_map(str(file)) as mapped:
            try:
                reader = pa.ipc.open_stream(mapped)
            except pa.ArrowInvalid:  # the other of Arrow's two formats
                reader = pa.ipc.open_file(mapped)
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from reader

    def checked() -> Iterator[Any]:
        row = 0
        for batch in batches():
            batch.validate()
            for column, values in zip(batch.schema.names, batch.columns, strict=True):
                # Nothing of a mapped file is checked yet: a wrong offset would read beyond it.
                try:
                    values.validate(full=True)
                except pa.ArrowInvalid as error:
                    if "UTF8" not in str(error):
                        raise
                    # Within a record or a dictionary, it counts otherwise.
                    place = _NOT_UTF8.fullmatch(str(error))
                    last = row + batch.num_rows - 1
                    rows = f"row {row + int(place[1])}" if place else f"rows {row} to {last}"
                    raise ValueError(
                        f"{file}, {rows}: text that is not UTF-8 in the column {column}"
                    ) from None
            row += batch.num_rows
            yield batch

    try:
        yield from arrow_rows(checked(), str(file), columns)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: the name of a column is not UTF-8 ({error})") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a whole {file.suffix[1:]} file ({error})") from None


def arrow_rows(
    batches: Iterable[Any], name: str, columns: Sequence[tuple[str, ...]]
) -> Iterator[TableRow]:
    """The rows of pyarrow record batches or tables, see `table_rows`; `name` is for messages."""
    row = 0
    for batch in batches:
        known = batch.schema.names
        chosen = []
        for names in columns:
            present = [column for column in names if column in known]
            if not present:
                raise ValueError(
                    f"{name}: no column {' or '.join(names)}; it has {', '.join(known)}"
                )
            listed = _as_list(_plain(batch.column(present[0])), name, row, present[0])
            if names_ := _class_names(batch.schema, present[0]):
                is_known = [type(v) is int and 0 <= v < len(names_) for v in listed]
                listed = [names_[v] if k else v for v, k in zip(listed, is_known, strict=True)]
            chosen.append(listed)
        for values in zip(*chosen, strict=True):
            yield f"{name}, row {row}", values
            row += 1


def _as_list(values: Any, name: str, first_row: int, column: str) -> list[Any]:
    """A column's values as Python's own; the others are for the message.

    Raises:
        ValueError: one is none that Python has, such as a day beyond its calendar; names the row.
    """
    try:
        return values.to_pylist()
    except (ValueError, OverflowError):
        for row, value in enumerate(values, start=first_row):
            try:
                value.as_py()
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{name}, row {row}: column {column}: {error}") from None
        raise


def _plain(values: Any) -> Any:
    """A column without its encodings, text as bytes."""
    import pyarrow as pa

    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array(map(_plain, values.chunks)) if values.num_chunks else values
    if isinstance(values, pa.ExtensionArray):
        return _plain(values.storage)
    if pa.types.is_dictionary(values.type):
        return _plain(values.dictionary).take(values.indices)
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return values.cast(pa.large_binary()) if any(is_(values.type) for is_ in is_text) else values


def _class_names(schema: Any, column: str) -> list[bytes] | None:
    """What the numbers of a column stand for, if the package datasets has said so in words."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
        if all(name == str(i) for i, name in enumerate(names)):
            return None
        return [name.encode() for name in names]
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def class_of(where: str, value: Any, names: Sequence[tuple[str, ...]]) -> int:
    """The class that a table's value stands for: its number, its name, or yes or no of two classes.

    `names` are the spellings of each class; `where` is for messages.

    Raises:
        ValueError: none of these.
    """
    is_number = isinstance(value, int | float) and (type(value) is not bool or len(names) == 2)
    if is_number and value in range(len(names)):  # 1.0 and, of two classes, true are class 1
        return int(value)
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
        for number, spellings in enumerate(names):
            if value.strip().lower() in (str(number), *spellings):
                return number
    words = ", ".join(spellings[0] for spellings in names if spellings)
    raise ValueError(
        f"{where}: label {value!r:.60}, expected 0 to {len(names) - 1}"
        f"{f' or one of {words}' if words else ''}"
    )


def is_commit(revision: str | None) -> bool:
    """Whether a revision of the hub is a commit in full, which never stands for other data."""
    return _COMMIT.fullmatch(revision or "") is not None


def hub_tables(name: str, revision: str | None) -> tuple[dict[str, Iterator[Any]], str | None]:
    """Pyarrow tables of `train` and `test` of a data set of the Hugging Face hub, and its commit.

    The commit is None where the library does not say which it took, as for a local folder. When the
    hub cannot be reached, the library takes its latest local copy, whatever the revision (issue
    7928 of huggingface/datasets).

    Raises:
        ValueError: `datasets` is missing, there is neither hub nor copy, the copy is of another
            commit than `revision`, or a split is missing.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"task.source=hub needs the package datasets; {_INSTALL_HUB}")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    state = "reachable"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        state = "not asked, since HF_HUB_OFFLINE is set"
    elif fault := _unreachable(endpoint):
        # Read by the library when imported; without it, it retries for half a minute.
        os.environ["HF_HUB_OFFLINE"] = "1"
        state = f"unreachable: {fault}"
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        data = datasets.load_dataset(name, revision=revision)
    # The library has an IndexError for an empty name, a RuntimeError for one of its own scripts.
    except (
        OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError
    ) as error:  # fmt: skip
        raise ValueError(
            f"task.source=hub: cannot load '{name}', revision {revision or 'main'}: {error}. "
            f"Tried {endpoint} ({state}) and the local copies in {HF_HUB_CACHE} and "
            f"{datasets.config.HF_DATASETS_CACHE}; without network use task.source=files"
        ) from None
    if missing := sorted({"train", "test"} - set(data)):
        raise ValueError(
            f"task.source=hub: '{name}' has no split {' and no '.join(missing)}; "
            f"it has {', '.join(data)}"
        )
    commit = _commit(data["train"])
    if is_commit(revision) and commit not in (None, revision):
        raise ValueError(
            f"task.hub_revision={revision}: the local copy of '{name}' is of commit {commit}, and "
            f"{endpoint} is {state}; fetch that revision where there is a network, or set "
            f"task.hub_revision={commit}"
        )
    tables = {
        split: data[split].with_format("arrow").iter(batch_size=1024) for split in ("train", "test")
    }
    return tables, commit


def _commit(data: Any) -> str | None:
    """The commit of the hub that a data set is of: the library calls its copy's folder so."""
    names = {Path(file["filename"]).parent.name for file in data.cache_files}
    name = names.pop() if len(names) == 1 else None
    return name if is_commit(name) else None


def _unreachable(endpoint: str) -> str:
    """Why a server cannot be reached, empty if it answers at all."""
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return ""
