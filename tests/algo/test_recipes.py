import re
from pathlib import Path

import pytest

from gruppo.algo.objectives import OBJECTIVES
from gruppo.algo.ratios import LEVELS
from gruppo.algo.recipes import LOSS_TYPES, RECIPES, Recipe
from gruppo.algo.reduce import REDUCTIONS

DOC = Path(__file__).parents[2] / "docs" / "algorithm.md"

TABLE = {
    "grpo": Recipe("group", "group", "token", "clip", "loss", "sequence"),
    "dr_grpo": Recipe("group", "none", "token", "clip", "none", "constant"),
    "bnpo": Recipe("group", "group", "token", "clip", "none", "micro_batch"),
    "dapo": Recipe("group", "group", "token", "clip", "none", "tokens"),
    "gspo": Recipe("group", "group", "sequence_mean", "clip", "none", "sequence"),
    "luspo": Recipe("group", "group", "sequence_mean", "clip", "none", "length_weighted"),
    "cispo": Recipe("group", "group", "token", "cispo", "none", "tokens"),
    "sapo": Recipe("group", "group", "token", "sapo", "none", "sequence"),
    "vespo": Recipe("group", "group", "token", "vespo", "none", "tokens"),
    "rloo": Recipe("leave_one_out", "none", "sequence_sum", "clip", "reward", "rows"),
}


def test_the_table():
    assert RECIPES == TABLE


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_cell_names_something_that_exists(recipe):
    assert recipe.ratio in LEVELS
    assert recipe.objective in OBJECTIVES
    assert recipe.reduction in REDUCTIONS


def test_loss_types():
    assert LOSS_TYPES == {
        "grpo": ("clip", "sequence"),
        "dr_grpo": ("clip", "constant"),
        "dapo": ("clip", "tokens"),
        "bnpo": ("clip", "micro_batch"),
        "cispo": ("cispo", "tokens"),
        "sapo": ("sapo", "sequence"),
        "luspo": ("clip", "length_weighted"),
        "vespo": ("vespo", "tokens"),
    }


def test_the_documented_table_is_this_table():
    rows = {}
    for line in DOC.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0] in RECIPES:
            rows[cells[0]] = Recipe(*cells[1:])
    assert rows == RECIPES


def test_every_file_the_document_names_exists():
    named = set(re.findall(r"`(gruppo/algo/\w+\.py)`", DOC.read_text(encoding="utf-8")))
    assert len(named) >= 10
    assert all((DOC.parents[1] / name).is_file() for name in named)
