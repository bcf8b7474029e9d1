"""Hostile and damaged archives, missing packages, the hub without network, the download script."""

from __future__ import annotations

import gc
import gzip
import hashlib
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra.tasks import archives, columnar
from lra.tasks.archives import is_archive, read_file, tar_members
from lra.tasks.cache import cache_folder, prepare
from lra.tasks.image import Image
from lra.tasks.listops import FILES as LISTOPS_FILES
from lra.tasks.listops import ListOps
from lra.tasks.retrieval import FILES as AAN_FILES
from lra.tasks.retrieval import Retrieval
from lra.tasks.text import Text

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "get_data.sh"

Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, content: bytes = b"x", size: int | None = None, **fields: Any) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content) if size is None else size
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def pack(members: list[Member], compress: bool, format: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar archive put together block by block, so that headers may lie."""
    packed = b""
    for info, content in members:
        packed += info.tobuf(format) + content + bytes(-len(content) % 512)
    packed += bytes(1024)
    return gzip.compress(packed, mtime=0) if compress else packed


def read(archive: Path, content: bytes) -> dict[str, bytes]:
    archive.write_bytes(content)
    return dict(tar_members(archive, lambda name: name.startswith("wanted")))


LINK = {"linkname": "/etc/passwd", "size": 0}
HOSTILE: dict[str, tuple[Member, str]] = {
    "absolute": (member("/wanted"), "'/wanted' points outside"),
    "parent": (member("../wanted"), "'../wanted' points outside"),
    "parent within": (member("wanted/../../x"), "'wanted/../../x' points outside"),
    "symbolic link": (member("wanted", b"", type=tarfile.SYMTYPE, **LINK), "is a link to '/etc/pa"),
    "hard link": (member("wanted", b"", type=tarfile.LNKTYPE, **LINK), "'wanted' is a link to '/e"),
    "link not wanted": (member("other", b"", type=tarfile.SYMTYPE, **LINK), "'other' is a link"),
    "character device": (member("wanted", b"", type=tarfile.CHRTYPE), "'wanted' is neither"),
    "block device": (member("other", b"", type=tarfile.BLKTYPE), "'other' is neither"),
    "pipe": (member("wanted", b"", type=tarfile.FIFOTYPE), "'wanted' is neither"),
    "contiguous": (member("wanted", type=tarfile.CONTTYPE), "'wanted' is neither"),
    "unknown type": (member("wanted", type=b"Z"), "'wanted' is neither"),
    "sparse": (member("wanted", b"", type=tarfile.GNUTYPE_SPARSE), "'wanted' is neither"),
    "a terabyte": (member("wanted", size=1 << 40), f"'wanted' has {1 << 40} bytes"),
    "a terabyte, not wanted": (member("other", size=1 << 40), f"'other' has {1 << 40} bytes"),
    "just too large": (member("wanted", size=(64 << 20) + 1), "'wanted' has 67108865 bytes"),
    "negative": (member("wanted", b"", size=-512), "'wanted' has -512 bytes"),
    "twice": (member("wanted/a"), "'wanted/a' appears twice"),
    "twice, spelled otherwise": (member("./wanted/a"), "'./wanted/a' appears twice"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("compress", [False, True])
def test_hostile_members_are_refused_by_name(tmp_path: Path, name: str, compress: bool) -> None:
    bad, part = HOSTILE[name]
    members = [member("wanted/a"), bad, member("wanted/b")]
    with pytest.raises(ValueError) as caught:
        read(tmp_path / "packed", pack(members, compress))
    assert f"{tmp_path}/packed: " in str(caught.value)
    assert part in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_honest_archives_are_read_in_any_format(tmp_path: Path) -> None:
    long = "wanted/" + "long" * 60
    for format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for compress in (False, True):
            names = ["wanted/a", "./wanted/é", "other"]
            names += [] if format == tarfile.USTAR_FORMAT else [long]
            members = [member("wanted", b"", type=tarfile.DIRTYPE)]
            members += [member(n, n.encode() * 300) for n in names] + [member("wanted/empty", b"")]
            found = read(tmp_path / "packed", pack(members, compress, format))
            expected = {n.removeprefix("./"): n.encode() * 300 for n in names if n != "other"}
            assert found == expected | {"wanted/empty": b""}
            assert is_archive(tmp_path / "packed")


def _pax(size: int) -> bytes:
    info = tarfile.TarInfo("PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, size
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(100_000))


GOOD = pack([member("wanted/a", b"abc" * 1000), member("wanted/b", os.urandom(3000))], True)
PLAIN = gzip.decompress(GOOD)
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "a page": b"<html>403 Forbidden</html>",
    "gzip, but no tar": gzip.compress(b"hello" * 200),
    "gzip of nothing": gzip.compress(b""),
    "cut gzip": GOOD[: len(GOOD) // 2],
    "gzip without its checksum": GOOD[:-8],
    "gzip with a wrong checksum": GOOD[:-6] + bytes([GOOD[-6] ^ 1]) + GOOD[-5:],
    "gzip with rubbish within": GOOD[:200] + b"\xff" * 50 + GOOD[250:],
    "gzip with rubbish behind": GOOD + b"rubbish",
    "cut tar": PLAIN[:1500],
    "cut within a header": PLAIN[: 512 + 3072 + 100],
    "cut between two members": PLAIN[: 512 + 3072],
    "without an end": PLAIN[:-1024],
    "damaged first header": b"\x01" + PLAIN[1:],
    "damaged second header": PLAIN[:3584] + b"\x01" + PLAIN[3585:],
    "damaged second header, packed again": gzip.compress(PLAIN[:3584] + b"\x01" + PLAIN[3585:]),
    "extended header of a terabyte": _pax(1 << 40),
    "extended header of 65 MiB": _pax(65 << 20),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_archives_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="packed: not a whole tar archive"):
        read(tmp_path / "packed", DAMAGED[name])


def test_damaged_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pax = pack([member("wanted/" + "é" * 90, b"abc")] * 2, False, tarfile.PAX_FORMAT)
    for content in (PLAIN, pax):
        for _ in range(300):
            damaged = bytearray(content)
            for place in rng.integers(0, len(damaged), 3):
                damaged[place] = rng.integers(256)
            try:
                read(tmp_path / "packed", bytes(damaged))
            except ValueError as error:
                assert "packed: " in str(error)


def test_declared_sizes_take_no_memory(tmp_path: Path) -> None:
    bombs = [
        pack([member("wanted", size=1 << 36)], True),
        pack([member("x" * 200, size=1 << 36)], True),
        _pax(1 << 36),
    ]
    for content in bombs:
        gc.collect()
        tracemalloc.start()
        with pytest.raises(ValueError):
            read(tmp_path / "packed", content)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5e6


def test_the_total_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_ARCHIVE_BYTES", 100_000)
    many = [member(f"other/{i}", b"", size=0) for i in range(1000)]
    for members in ([member(f"wanted{i}", bytes(30_000)) for i in range(5)], many):
        with pytest.raises(ValueError, match=r"brings the archive over 100000 bytes; refused"):
            read(tmp_path / "packed", pack(members, True))


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ValueError, match="file: 5 bytes, expected at most 4"):
        read_file(tmp_path / "file", 4)


# --- packages that are missing, the hub without network ---


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == package else find(name, *more),
    )


def test_tables_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "pyarrow")
    (tmp_path / "imdb").mkdir()
    for split in ("train", "test"):
        (tmp_path / "imdb" / f"{split}.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"\.parquet: .*pyarrow.*pip install -e .\.\[hub\]"):
        list(Text(data_dir=tmp_path).examples("train"))


@pytest.mark.parametrize("make", [Text, Image])
def test_the_hub_without_datasets(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "datasets")
    with pytest.raises(
        ValueError, match=r"needs the package datasets; .*pip install -e .\.\[hub\]"
    ):
        list(make(data_dir=Path("none"), source="hub").examples("train"))


PROGRAM = """
import sys, time
from pathlib import Path
from lra.tasks.text import Text
started = time.monotonic()
try:
    list(Text(data_dir=Path("none"), source="hub").examples("train"))
except ValueError as error:
    print(time.monotonic() - started, error)
"""


@pytest.mark.parametrize("offline", [False, True])
def test_the_hub_without_network_fails_soon(tmp_path: Path, offline: bool) -> None:
    pytest.importorskip("datasets")
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    seconds, message = done.stdout.split(" ", 1)
    assert float(seconds) < 12  # importing the library is most of it
    for part in ("stanfordnlp/imdb", "http://127.0.0.1:9", str(tmp_path / "hf"), "source=files",
                 "HF_HUB_OFFLINE is set" if offline else "unreachable"):  # fmt: skip
        assert part in message


def test_the_hub_without_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(columnar, "_unreachable", lambda endpoint: "")
    made = {"train": datasets.Dataset.from_dict({"text": ["a"], "label": [0]})}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, revision: made)
    with pytest.raises(ValueError, match="no split test; it has train"):
        list(Text(data_dir=Path("none"), source="hub").examples("train"))


@pytest.mark.parametrize("error", [IndexError, RuntimeError])  # of "", and of a name with a script
def test_a_name_that_the_hub_has_nothing_for(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(columnar, "_unreachable", lambda endpoint: "")

    def load(name: str, revision: str | None) -> None:
        raise error("no such thing")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match="source=hub: cannot load 'x.py', .*: no such thing"):
        list(Text(data_dir=Path("none"), source="hub", hub_name="x.py").examples("train"))


@pytest.mark.parametrize("make", [Text, ListOps])
def test_no_path_is_not_the_folder_of_the_command(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task.path='': expected a path, or null for paths.data"):
        make(data_dir=tmp_path, path="")


@pytest.mark.parametrize(
    ("make", "folder", "names"),
    [(Retrieval, "aan", [*AAN_FILES.values()]), (ListOps, "listops", LISTOPS_FILES)],
)
def test_equal_copies_are_compared_once(
    make: Any, folder: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path / "data" / folder, tmp_path / "data"):
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            (place / name).write_text(f"{name}\n")
    found = cache_folder(make(data_dir=tmp_path / "data"), tmp_path / "cache")
    with monkeypatch.context() as then:
        for reader in ("filecmp.cmp", "filecmp.cmpfiles", "lra.tasks.cache.file_sha256"):
            then.setattr(reader, None)
        assert cache_folder(make(data_dir=tmp_path / "data"), tmp_path / "cache") == found
    (place / names[1]).write_text(f"{names[1][::-1]}\n")
    with pytest.raises(ValueError, match=f"differ in {names[1]}|{names[1]} differs"):
        cache_folder(make(data_dir=tmp_path / "data"), tmp_path / "cache")


def write_hub_folder(folder: Path, last: str = "c") -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(exist_ok=True)
    for split, text in (("train", last), ("test", "d")):
        texts = [f"{split} {i}" for i in range(3)] + [text]
        pq.write_table(pa.table({"text": texts, "label": [0, 1] * 2}), folder / f"{split}.parquet")
    return folder


def test_a_folder_in_place_of_the_hub_counts_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(columnar, "_unreachable", lambda endpoint: "")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = write_hub_folder(tmp_path / "reviews")

    def prepared() -> tuple[str, set[bytes]]:
        task = Text(data_dir=tmp_path, source="hub", hub_name=str(folder), max_length=20)
        data = prepare(task, tmp_path / "cache")
        assert data.meta["source"] == f"the folder {folder}" and data.meta["remarks"] == []
        splits = (data.train, data.val)
        return data.fingerprint, {bytes(s.sequence(i)) for s in splits for i in range(len(s))}

    first, texts = prepared()
    assert texts == {b"train 0", b"train 1", b"train 2", b"c"}
    for name in (".git", ".cache"):  # of the tools that fetched it
        (folder / name).mkdir()
        (folder / name / "log").write_text("today")
    assert prepared() == (first, texts)
    write_hub_folder(folder, last="another one")
    second, texts = prepared()
    assert second != first and b"another one" in texts
    (folder / "README.md").write_text("which may say what is read")
    assert prepared()[0] not in (first, second)


COMMIT, OTHER = "ab" * 20, "cd" * 20


@pytest.mark.parametrize(
    ("revision", "remark"),
    [
        (None, f"revision main may move.*: it has commit {COMMIT}; task.hub_revision={COMMIT} "),
        ("v1", f"revision v1 may move.*: it has commit {COMMIT}; task.hub_revision={COMMIT} "),
        (COMMIT, None),
    ],
)
def test_of_a_revision_that_moves_the_commit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None, remark: str | None
) -> None:
    task = of_the_hub(tmp_path, monkeypatch, revision)
    remarks = prepare(task, tmp_path / "cache").meta["remarks"]
    assert len(remarks) == (remark is not None)
    assert remark is None or re.search(remark, remarks[0])
    # Whichever commit it was, a ready cache opens without a network.
    assert cache_folder(task, tmp_path / "cache")[0].is_dir() and task.source_files() == []


def test_a_copy_of_another_commit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = of_the_hub(tmp_path, monkeypatch, OTHER)
    with pytest.raises(ValueError, match=f"hub_revision={OTHER}: .* is of commit {COMMIT}"):
        prepare(task, tmp_path / "cache")


def of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None) -> Text:
    """A task of the hub, whose data lie where the library has its copies, by their commit."""
    datasets = pytest.importorskip("datasets")
    source = write_hub_folder(tmp_path / "made")
    folder = tmp_path / "hf" / "stanfordnlp___imdb" / "plain_text" / "0.0.0" / COMMIT
    folder.mkdir(parents=True)

    def load_dataset(name: str, revision: str | None) -> Any:
        data = {}
        for split in ("train", "test"):
            file = str(folder / f"{split}.arrow")
            made = datasets.Dataset.from_parquet(
                str(source / f"{split}.parquet"), cache_dir=str(tmp_path / "parquet")
            )
            with datasets.arrow_writer.ArrowWriter(path=file, features=made.features) as writer:
                writer.write_table(made.data.table)
            data[split] = datasets.Dataset.from_file(file)
        return data

    monkeypatch.setattr(columnar, "_unreachable", lambda endpoint: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return Text(data_dir=tmp_path, source="hub", hub_revision=revision)


def test_any_answer_means_reachable() -> None:
    with serve({}) as (url, _):
        assert columnar._unreachable(url) == ""  # although it is a 404
    assert "refused" in columnar._unreachable("http://127.0.0.1:9")
    assert columnar._unreachable("nonsense") != ""


# --- the download script ---


class serve:
    """A server of some files on this machine; continues files only if asked to."""

    def __init__(self, files: dict[str, bytes], status: int = 404, ranges: bool = True) -> None:
        asked: list[tuple[str, str | None]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                wanted = self.headers["Range"]
                asked.append((self.path, wanted))
                content = files.get(self.path)
                if content is None:
                    self.send_error(status)
                    return
                first = int(wanted[6:-1]) if wanted and ranges else 0
                if first and first >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206 if wanted and ranges else 200)
                if wanted and ranges:
                    last = len(content) - 1
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("Content-Length", str(len(content) - first))
                self.end_headers()
                self.wfile.write(content[first:])

            def log_message(self, *args: Any) -> None:
                pass

        self.asked = asked
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> tuple[str, list[tuple[str, str | None]]]:
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_address[1]}", self.asked

    def __exit__(self, *args: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


TEXT = gzip.compress(os.urandom(200_000))
NAMES = {
    "text": "aclImdb_v1.tar.gz",
    "image": "cifar-10-python.tar.gz",
    "release": "lra_release.gz",
}


def get_data(
    folder: Path, what: str, url: str, md5: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment["NO_PROXY"] = "127.0.0.1"
    for name in ("TEXT", "IMAGE", "RELEASE"):
        environment[f"LRA_{name}_URL"] = url
        if md5 is not None:
            environment[f"LRA_{name}_MD5"] = md5
    return subprocess.run(
        ["bash", str(SCRIPT), str(folder), what], env=environment, capture_output=True, text=True
    )


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def get_nothing(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script in an empty folder and see that it neither asks nor writes."""
    with serve({}) as (url, asked):
        environment = os.environ | {f"LRA_{name}_URL": url for name in ("TEXT", "IMAGE", "RELEASE")}
        done = subprocess.run(
            ["bash", str(SCRIPT), *words], cwd=folder, env=environment,
            capture_output=True, text=True,
        )  # fmt: skip
    assert not asked and list(folder.iterdir()) == []
    return done


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_without_a_folder_nothing_is_fetched_and_the_sizes_are_said(
    tmp_path: Path, words: list[str]
) -> None:
    done = get_nothing(tmp_path, *words)
    assert done.returncode == 0
    for what, size in (("text", "84 MB"), ("image", "170 MB"), ("release", "8 GB")):
        assert f"{size}  {NAMES[what]}" in done.stdout
    assert "bash scripts/get_data.sh data text" in done.stdout


@pytest.mark.parametrize("word", [*NAMES, "retrieval", "all", "--list", ""])
def test_a_forgotten_folder_is_not_guessed(tmp_path: Path, word: str) -> None:
    done = get_nothing(tmp_path, word)
    assert done.returncode == 2 and f"'{word}': expected a folder first" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data", "text", "image"], "'image': expected nothing behind 'text'"),
        (["data", ""], "unknown: ''; expected text, image, release (for retrieval) or all"),
        (["data", "retrieval"], "unknown: 'retrieval'; expected text, image, release"),
    ],
)
def test_words_that_are_not_understood_fetch_nothing(
    tmp_path: Path, words: list[str], said: str
) -> None:
    done = get_nothing(tmp_path, *words)
    assert done.returncode == 2 and said in done.stderr


def test_without_curl_the_reason_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [shutil.which("bash") or "", str(SCRIPT), "data"], env={"PATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "curl is not installed" in done.stderr


@pytest.mark.parametrize("what", NAMES)
def test_a_download_comes_whole_and_once(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "new folder"
    with serve({f"/{NAMES[what]}": TEXT}) as (url, asked):
        done = get_data(folder, what, url, md5(TEXT))
        assert done.returncode == 0, done.stderr
        assert [file.name for file in folder.iterdir()] == [NAMES[what]]
        assert (folder / NAMES[what]).read_bytes() == TEXT
        again = get_data(folder, what, url, md5(TEXT))
    assert again.returncode == 0
    assert "already there" in again.stdout
    assert len(asked) == 1


def test_a_partial_file_is_continued(tmp_path: Path) -> None:
    (tmp_path / "aclImdb_v1.tar.gz.part").write_bytes(TEXT[:70_000])
    with serve({"/aclImdb_v1.tar.gz": TEXT}) as (url, asked):
        done = get_data(tmp_path, "text", url, md5(TEXT))
    assert done.returncode == 0, done.stderr
    assert asked == [("/aclImdb_v1.tar.gz", "bytes=70000-")]
    assert (tmp_path / "aclImdb_v1.tar.gz").read_bytes() == TEXT
    assert not (tmp_path / "aclImdb_v1.tar.gz.part").exists()


def test_a_server_that_cannot_continue_sends_all_again(tmp_path: Path) -> None:
    (tmp_path / "aclImdb_v1.tar.gz.part").write_bytes(TEXT[:70_000])
    with serve({"/aclImdb_v1.tar.gz": TEXT}, ranges=False) as (url, asked):
        done = get_data(tmp_path, "text", url, md5(TEXT))
    assert done.returncode == 0, done.stderr
    assert asked[-1] == ("/aclImdb_v1.tar.gz", None)
    assert (tmp_path / "aclImdb_v1.tar.gz").read_bytes() == TEXT


def test_a_whole_partial_file_is_only_renamed(tmp_path: Path) -> None:
    (tmp_path / "aclImdb_v1.tar.gz.part").write_bytes(TEXT)
    with serve({"/aclImdb_v1.tar.gz": TEXT}) as (url, asked):
        done = get_data(tmp_path, "text", url, md5(TEXT))
    assert done.returncode == 0, done.stderr
    assert asked == []
    assert [file.name for file in tmp_path.iterdir()] == ["aclImdb_v1.tar.gz"]


@pytest.mark.parametrize(
    ("what", "part", "times"),
    [
        ("release", TEXT, 1),  # no checksum is known, but the server has nothing to add
        ("release", TEXT + b"more", 2),
        ("release", bytes(len(TEXT)), 2),
        ("text", TEXT + b"more", 2),
    ],
)
def test_a_partial_file_that_cannot_go_on_is_no_dead_end(
    tmp_path: Path, what: str, part: bytes, times: int
) -> None:
    (tmp_path / f"{NAMES[what]}.part").write_bytes(part)
    with serve({f"/{NAMES[what]}": TEXT}) as (url, asked):
        done = get_data(tmp_path, what, url, md5(TEXT) if what == "text" else None)
    assert done.returncode == 0, done.stderr
    assert len(asked) == times
    assert [file.name for file in tmp_path.iterdir()] == [NAMES[what]]
    assert (tmp_path / NAMES[what]).read_bytes() == TEXT


@pytest.mark.parametrize("part", [b"", b"from another file"])
def test_a_wrong_checksum_is_refused_and_kept_aside(tmp_path: Path, part: bytes) -> None:
    if part:
        (tmp_path / "aclImdb_v1.tar.gz.part").write_bytes(part)
    with serve({"/aclImdb_v1.tar.gz": TEXT}) as (url, _):
        done = get_data(tmp_path, "text", url, None if not part else md5(TEXT))
        assert done.returncode == 1
        expected = md5(TEXT) if part else "7c2ac02c03563afcf9b574c7e56c153a"
        assert f"expected {expected}" in done.stderr
        assert [file.name for file in tmp_path.iterdir()] == ["aclImdb_v1.tar.gz.bad"]
        again = get_data(tmp_path, "text", url, md5(TEXT))  # starts anew
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "aclImdb_v1.tar.gz").read_bytes() == TEXT


def test_a_file_with_a_wrong_checksum_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"mine")
    done = get_data(tmp_path, "image", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "wrong checksum" in done.stderr
    assert (tmp_path / "cifar-10-python.tar.gz").read_bytes() == b"mine"


def test_a_refused_release_says_what_to_do(tmp_path: Path) -> None:
    with serve({}, status=403) as (url, _):
        done = get_data(tmp_path, "release", url)
    assert done.returncode == 1
    for part in ("403", "tsv_data", "LRA_RELEASE_URL", f"tar -xzf lra_release.gz -C {tmp_path}",
                 "task.source=synthetic"):  # fmt: skip
        assert part in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_release_that_is_a_page_is_refused(tmp_path: Path) -> None:
    with serve({"/lra_release.gz": b"<html>sign in</html>"}) as (url, _):
        done = get_data(tmp_path, "release", url)
    assert done.returncode == 1 and "no gzip file, it begins with 3c68, expected" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["lra_release.gz.bad"]


def test_one_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    files = {f"/{NAMES['image']}": TEXT, f"/{NAMES['release']}": TEXT}
    with serve(files) as (url, _):
        done = get_data(tmp_path, "all", url, md5(TEXT))
    assert done.returncode == 1
    assert "aclImdb_v1.tar.gz: download failed" in done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {NAMES["image"], NAMES["release"]}


def test_a_killed_download_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    started = threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(TEXT)))
            self.end_headers()
            self.wfile.write(TEXT[:100_000])
            self.wfile.flush()
            started.set()
            time.sleep(1)  # then hangs up in the middle

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    environment = os.environ | {"LRA_TEXT_URL": url, "NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(
        ["bash", str(SCRIPT), str(tmp_path), "text"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert started.wait(20)
    part = tmp_path / "aclImdb_v1.tar.gz.part"
    deadline = time.monotonic() + 10
    while not part.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    process.wait()
    server.shutdown()
    server.server_close()
    assert [file.name for file in tmp_path.iterdir()] == [part.name]
    with serve({"/aclImdb_v1.tar.gz": TEXT}) as (url, _):
        assert get_data(tmp_path, "text", url, md5(TEXT)).returncode == 0
    assert (tmp_path / "aclImdb_v1.tar.gz").read_bytes() == TEXT


def test_a_download_that_stalls_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "curl").write_text('#!/bin/sh\necho "$@" >> "$0.asked"\nexit 33\n')
    (tmp_path / "curl").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(SCRIPT), str(tmp_path / "data"), "text"], env=environment,
                   capture_output=True)  # fmt: skip
    asked = (tmp_path / "curl.asked").read_text().splitlines()
    assert len(asked) == 2  # once to continue, once anew
    for line in asked:
        assert "--connect-timeout 20 --speed-limit 1 --speed-time 60 " in line


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    done = get_data(tmp_path, "listops", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "expected text, image, release (for retrieval) or all" in done.stderr


def test_messages_and_script_name_the_same_addresses() -> None:
    script = SCRIPT.read_text()
    for task in (Text, Image):
        address = re.search(r"https://\S+?\.tar\.gz", task.remedy)
        assert address
        folder, name = address[0].rsplit("/", 1)
        assert folder in script
        assert name in script
