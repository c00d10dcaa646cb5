"""Each rule switched off is found by the rig that the table names, and the table in the docs is this list."""

from pathlib import Path

import pytest
from tests.mutants.catalogue import MUTANTS
from tests.mutants.rigs import RIGS
from tests.mutants.surgery import Mutant, mutated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mutants.md"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_rule_switched_off_is_found(mutant: Mutant) -> None:
    with mutated(mutant):
        assert RIGS[mutant.rig](mutant.seed) is not None


@pytest.mark.parametrize("rig", RIGS)
def test_the_rigs_clear_the_product(rig: str) -> None:
    """Also after the mutants: each was put back whole."""
    for seed in sorted({mutant.seed for mutant in MUTANTS if mutant.rig == rig}):
        assert RIGS[rig](seed) is None


def test_there_are_enough_of_them_and_no_two_of_a_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_the_page_lists_exactly_these() -> None:
    rows = [f"| `{mutant.name}` | `{mutant.law}` | {mutant.rig} | {mutant.seed} |" for mutant in MUTANTS]
    listed = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert listed == rows
