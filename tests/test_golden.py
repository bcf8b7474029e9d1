"""The models equal the authors' own numbers: outputs and every gradient, in float64 and float32.

`pytest tests/test_golden.py --golden-dir DIR` checks every file of a folder. Without the option it
is `../shared/golden` beside the repository where that exists, else the few files kept here.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.golden.case import Adapter, Case, Difference, compare

HERE = Path(__file__).parent
FAMILIES = {
    "softmax": "softmax",
    "luna": "luna",
    "nystrom": "nystromformer",
    "fastformer": "fastformer",
}


def golden_dir(config: pytest.Config) -> Path:
    chosen = config.getoption("--golden-dir")
    if chosen is not None:
        return Path(chosen)
    beside = HERE.parent.parent / "shared" / "golden"
    return beside if beside.is_dir() else HERE / "golden"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        folder = golden_dir(metafunc.config)
        # A folder without files becomes one test, which fails on opening it.
        paths = sorted(folder.glob("*.npz")) or [folder]
        metafunc.parametrize("path", paths, ids=[path.stem for path in paths])


def find_adapter(case: Case) -> Adapter:
    """The adapter of a case.

    Raises:
        ValueError: no adapter knows the case's family and unit.
    """
    units: dict[str, Adapter] = {}
    if case.family in FAMILIES:
        units = importlib.import_module(f"tests.golden.{FAMILIES[case.family]}").UNITS
    if case.unit not in units:
        raise ValueError(
            f"{case.path.name}: unknown unit {case.unit!r} of family {case.family!r}; families are "
            f"{sorted(FAMILIES)}, units of this one {sorted(units)}"
        )
    return units[case.unit]


def worst(differences: list[Difference]) -> str:
    if not differences:
        return "none in the file"
    largest = max(differences, key=lambda difference: difference.relative)
    absolute = max(difference.absolute for difference in differences)
    return f"abs {absolute:.1e} rel {largest.relative:.1e} ({largest.name})"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_golden(path: Path, dtype: torch.dtype, record_property) -> None:
    if path.is_dir() or not path.exists():
        pytest.fail(f"{path}: no golden files (*.npz) in this folder")
    case = Case.load(path, dtype)
    differences = compare(case, find_adapter(case))
    outputs = [d for d in differences if not d.name.startswith("grad_")]
    gradients = [d for d in differences if d.name.startswith("grad_")]
    name = str(dtype).removeprefix("torch.")
    record_property(
        "golden", f"{path.stem:45} {name}  out {worst(outputs)}  grad {worst(gradients)}"
    )
    assert outputs, f"{path}: nothing compared"
    failed = [d for d in differences if not d.passed]
    assert not failed, "\n".join(
        f"{d.name}: {d.relative:.2e} over the tolerance {d.tolerance:.0e}" for d in failed
    )
