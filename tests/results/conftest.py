"""What several tests of results look at."""

from __future__ import annotations

import pytest

from lra.results.leaderboard import Board, build
from tests.made_up import sixty_records


@pytest.fixture(scope="module")
def board() -> Board:
    """The leaderboard of sixty made-up records."""
    return build(sixty_records().values())
