"""The page on the algorithm says which settings make which recipe."""

import re
from pathlib import Path
from types import SimpleNamespace

from gruppo.algo.recipes import RECIPES
from gruppo.config.grpo import GRPOConfig
from gruppo.config.recipe import recipe_of
from gruppo.config.rloo import RLOOConfig
from gruppo.trainer.grpo import GRPOTrainer
from gruppo.trainer.rloo import RLOOTrainer


def documented_settings() -> dict[str, str]:
    """The config that the page on the algorithm names for each recipe."""
    page = (Path(__file__).parents[2] / "docs/algorithm.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \| `((?:GRPO|RLOO)Config)\((.*?)\)`", page, re.MULTILINE)
    return {name: f"{config}('out', use_cpu=True, bf16=False, {settings})" for name, config, settings in found}


def test_the_settings_on_the_page_make_the_recipes_of_the_table() -> None:
    settings = documented_settings()
    assert set(settings) == set(RECIPES)
    for name, text in settings.items():
        args = eval(text, {"GRPOConfig": GRPOConfig, "RLOOConfig": RLOOConfig})
        trainer = RLOOTrainer if isinstance(args, RLOOConfig) else GRPOTrainer
        made = trainer.make_recipe(SimpleNamespace(args=args))  # type: ignore[arg-type]
        assert made == RECIPES[name], name


def test_a_kl_is_there_if_beta_is_not_0() -> None:
    for config, beta, kl in [
        *((GRPOConfig, 0.0, "none"), (GRPOConfig, 0.1, "loss")),
        *((RLOOConfig, 0.0, "none"), (RLOOConfig, 0.1, "reward")),
    ]:
        assert recipe_of(config("out", use_cpu=True, bf16=False, beta=beta)).kl == kl
