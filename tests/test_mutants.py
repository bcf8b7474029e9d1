"""The list of deliberate breaks fits the code; `make test-mutants` tries them."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}: {' '.join(m.new.split())}")
def test_a_break_can_be_made_and_names_its_tests(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, "its old text is not there once: give tests/mutants.py anew"
    if mutant.file.endswith(".py"):
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    name, _, part = mutant.test.partition(" ")
    names = (ROOT / "tests" / name).read_text(encoding="utf-8")
    assert any(part in line for line in names.splitlines() if line.startswith("def test_"))
