"""The page on the algorithm says which settings make which recipe."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from gruppo.algo.recipes import RECIPES
from gruppo.config.grpo import GRPOConfig
from gruppo.config.rloo import RLOOConfig
from gruppo.trainer.grpo import GRPOTrainer
from gruppo.trainer.rloo import RLOOTrainer


def documented_settings() -> dict[str, str]:
    """The config that the page on the algorithm names for each recipe."""
    page = (Path(__file__).parents[2] / "docs/algorithm.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| `((?:GRPO|RLOO)Config)\((.*?)\)`", page, re.MULTILINE)
    return {name: f"{config}('out', use_cpu=True, bf16=False, {settings})" for name, config, settings in found}


def test_the_settings_on_the_page_make_the_recipes_of_the_table() -> None:
    settings = documented_settings()
    assert set(settings) == set(RECIPES)
    for name, text in settings.items():
        args = eval(text, {"GRPOConfig": GRPOConfig, "RLOOConfig": RLOOConfig})
        trainer = RLOOTrainer if isinstance(args, RLOOConfig) else GRPOTrainer
        made = trainer.make_recipe(SimpleNamespace(args=args))  # type: ignore[arg-type]
        has_kl = args.beta != 0
        assert (made if has_kl else replace(made, kl="none")) == RECIPES[name], name
