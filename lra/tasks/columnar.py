"""Parquet and Arrow tables, from files or from the hub."""

from __future__ import annotations

import importlib.util
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

TableRow = tuple[str, tuple[Any, ...]]  # where it stands, for messages, and its columns

_SPLIT = re.compile(r"(?:^|[-_.])(train|test)(?:[-_.]|$)")
_HUB_TIMEOUT_S = 5
_INSTALL_HUB = "run: pip install 'lra-harness[hub]'"


def table_files(folder: Path) -> dict[str, list[Path]]:
    """Parquet or Arrow files of `train` and `test`, at most one folder down; empty without any.

    A file belongs to the split that its name, else the name of its folder, has as a word.

    Raises:
        ValueError: one of the two splits is missing, or there are files of both kinds.
    """
    found: dict[str, list[Path]] = {}
    for pattern in ("*", "*/*"):
        for file in sorted(folder.glob(pattern)):
            if file.suffix not in (".parquet", ".arrow") or file.name.startswith("."):
                continue
            for part in reversed(file.relative_to(folder).parts):
                if word := _SPLIT.search(part):
                    found.setdefault(word[1], []).append(file)
                    break
    suffixes = sorted({file.suffix for files in found.values() for file in files})
    if len(suffixes) > 1:
        raise ValueError(f"{folder} has {' and '.join(suffixes)} files; expected one kind only")
    if len(found) == 1:
        missing = "test" if "train" in found else "train"
        raise ValueError(
            f"{folder} has no file of the {missing} split, e.g. {missing}{suffixes[0]}"
        )
    return found


def table_rows(file: Path, columns: Sequence[tuple[str, ...]]) -> Iterator[TableRow]:
    """Yield the rows of a Parquet or Arrow file; a column is given by its possible names.

    Text comes as its UTF-8 bytes.

    Raises:
        ValueError: pyarrow is missing, or the file is damaged or lacks a column; names the file.
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

    try:
        yield from arrow_rows(batches(), str(file), columns)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a whole {file.suffix[1:]} file ({error})") from None


def arrow_rows(
    batches: Iterable[Any], name: str, columns: Sequence[tuple[str, ...]]
) -> Iterator[TableRow]:
    """The rows of pyarrow record batches or tables, see `table_rows`; `name` is for messages."""
    import pyarrow as pa

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
            values = batch.column(present[0])
            if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
                values = values.cast(pa.large_binary())
            chosen.append(values.to_pylist())
        for values in zip(*chosen, strict=True):
            yield f"{name}, row {row}", values
            row += 1


def hub_tables(name: str, revision: str | None) -> dict[str, Iterator[Any]]:
    """Pyarrow tables of `train` and `test` of a data set of the Hugging Face hub.

    A local copy is taken when the hub cannot be reached.

    Raises:
        ValueError: `datasets` is missing, there is neither hub nor copy, or a split is missing.
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
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
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
    return {
        split: data[split].with_format("arrow").iter(batch_size=1024) for split in ("train", "test")
    }


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
