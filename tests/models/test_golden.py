"""The models equal the authors' own numbers: outputs and every gradient, in float64 and float32.

`pytest tests/models/test_golden.py --golden-dir DIR` checks every file of a folder and the folders
in it. Without the option they are those below `../shared/` beside the repository where they exist,
else the few files kept in tests/golden/.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.golden import (
    fastformer,
    linear,
    linformer,
    lru,
    luna,
    mega,
    nystromformer,
    patterns,
    performer,
    reformer,
    s4d,
    s5,
    sinkhorn,
    softmax,
    synthesizer,
)
from tests.golden.case import Adapter, Case, Difference, compare

HERE = Path(__file__).parents[1]
UNITS: dict[str, dict[str, Adapter]] = {
    "softmax": softmax.UNITS,
    "luna": luna.UNITS,
    "nystrom": nystromformer.UNITS,
    "fastformer": fastformer.UNITS,
    "s4d": s4d.UNITS,
    "lru": lru.UNITS,
    "s5": s5.UNITS,
    "mega": mega.UNITS,
    "linear": linear.UNITS,
    "performer": performer.UNITS,
    "linformer": linformer.UNITS,
    "local": patterns.LOCAL_UNITS,
    "longformer": patterns.LONGFORMER_UNITS,
    "bigbird": patterns.BIGBIRD_UNITS,
    "sparse": patterns.SPARSE_UNITS,
    "synthesizer": synthesizer.UNITS,
    "sinkhorn": sinkhorn.UNITS,
    "reformer": reformer.UNITS,
}
# Files of faults that no option has and no published number depends on, by their stem, with why.
LEFT_OUT = patterns.LEFT_OUT | synthesizer.LEFT_OUT | sinkhorn.LEFT_OUT
FOLDERS = ("golden", "golden_more")  # beside the repository


def golden_dirs(config: pytest.Config) -> list[Path]:
    chosen = config.getoption("--golden-dir")
    if chosen is not None:
        return [Path(chosen)]
    beside = [HERE.parent.parent / "shared" / name for name in FOLDERS]
    return [folder for folder in beside if folder.is_dir()] or [HERE / "golden"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        # A folder without files becomes one test, which fails on opening it.
        paths = [
            path
            for folder in golden_dirs(metafunc.config)
            for path in sorted(folder.rglob("*.npz")) or [folder]
        ]
        metafunc.parametrize("path", paths, ids=[path.stem for path in paths])


def find_adapter(case: Case) -> Adapter:
    """The adapter of a case.

    Raises:
        ValueError: no adapter knows the case's family and unit.
    """
    units = UNITS.get(case.family, {})
    if case.unit not in units:
        raise ValueError(
            f"{case.path.name}: unknown unit {case.unit!r} of family {case.family!r}; families are "
            f"{sorted(UNITS)}, units of this one {sorted(units)}"
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
    if path.stem in LEFT_OUT:
        record_property("golden", f"{path.stem:45} left out: {LEFT_OUT[path.stem]}")
        pytest.skip(f"left out: {LEFT_OUT[path.stem]}")
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


# The check itself must fail where it should.

SAMPLE = HERE / "golden" / "luna_causal_elu_untied.npz"


@pytest.mark.parametrize("key", ["out/attn", "grad_param/k_proj.weight", "grad_in/query"])
def test_a_number_changed_a_little_is_found(key: str) -> None:
    case = Case.load(SAMPLE, torch.float64)
    case.arrays[key].flat[3] += 1e-6
    assert [d.name for d in compare(case, find_adapter(case)) if not d.passed] == [key]


def test_a_parameter_changed_a_little_is_found() -> None:
    case = Case.load(SAMPLE, torch.float64)
    with torch.no_grad():
        case.params["v_proj.weight"][0, 0] += 1e-6
    failed = {d.name for d in compare(case, find_adapter(case)) if not d.passed}
    assert {"out/attn", "mid/attn_incremental"} <= failed


def test_a_gradient_where_none_may_be_is_found() -> None:
    case = replace(Case.load(SAMPLE, torch.float64), without_gradient=["param/q_proj.weight"])
    del case.arrays["grad_param/q_proj.weight"]
    failed = [d.name for d in compare(case, find_adapter(case)) if not d.passed]
    assert failed == ["grad_param/q_proj.weight"]


def test_unknown_units_files_and_folders_fail(tmp_path: Path) -> None:
    case = Case.load(SAMPLE, torch.float64)
    for changed in (replace(case, unit="Other"), replace(case, family="other")):
        with pytest.raises(ValueError, match="unknown unit"):
            find_adapter(changed)
    broken = tmp_path / "broken.npz"
    broken.write_bytes(SAMPLE.read_bytes()[:1000])
    with pytest.raises(ValueError, match="broken.npz: expected an npz file"):
        Case.load(broken, torch.float64)
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(pytest.fail.Exception, match="no golden files"):
            test_golden(folder, torch.float64, None)


def test_every_family_has_a_file_kept_here() -> None:
    families = {Case.load(path, torch.float64).family for path in HERE.glob("golden/*.npz")}
    assert families == set(UNITS)
