"""Which settings a replay takes, and what it says about others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gruppo import GRPOConfig, RLOOConfig
from gruppo.algo.recipes import RECIPES
from gruppo.config.recipe import recipe_of, settings_of_recipe
from gruppo.errors import ConfigError, DataError
from gruppo.replay.settings import Settings
from tests.helpers import base_args

ROOT = Path(__file__).parents[2]
GRPO = GRPOConfig(**base_args("unused", beta=0.1, epsilon_high=0.28)).to_dict()
RLOO = RLOOConfig(**base_args("unused")).to_dict()
THEN = {"beta": 0.3, "epsilon_low": 0.11, "epsilon_high": 0.12}


def test_as_recorded() -> None:
    settings = Settings.of(GRPO)
    assert settings.name == "as recorded"
    assert settings.changes == {}
    assert (settings.trainer, settings.group_size) == ("grpo", 2)
    loss = settings.loss_settings(THEN)
    assert (loss.beta, loss.epsilon_low, loss.epsilon_high) == (0.3, 0.11, 0.12), "as callbacks had made them"


def test_changes_count_over_what_was() -> None:
    settings = Settings.of(GRPO, {"loss_type": "dr_grpo", "epsilon": 0.5, "beta": 0.1})
    assert settings.changes == {"loss_type": "dr_grpo", "epsilon": 0.5}, "beta is what it was"
    loss = settings.loss_settings(THEN)
    assert (loss.reduction, loss.epsilon_low, loss.epsilon_high) == ("constant", 0.5, 0.28)
    assert loss.beta == 0.3


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("recorded", [GRPO, RLOO], ids=["grpo", "rloo"])
def test_recipes_by_name(name: str, recorded: dict[str, Any]) -> None:
    settings = Settings.of(recorded, {"recipe": name})
    wanted = RECIPES[name]
    found = settings.recipe
    assert (found.advantage, found.scale, found.ratio) == (wanted.advantage, wanted.scale, wanted.ratio)
    assert (found.objective, found.reduction) == (wanted.objective, wanted.reduction)
    assert recipe_of(settings.config) == found
    assert settings_of_recipe(name)["trainer"] == ("rloo" if name == "rloo" else "grpo")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("grpo", 0.2, 0.2), ("dapo", 0.2, 0.28), ("gspo", 3e-4, 4e-4), ("cispo", None, 5.0), ("rloo", 0.2, 0.2)],
)
def test_a_recipe_brings_its_clip_widths(name: str, low: float | None, high: float) -> None:
    """As the files in recipes/ have them, whatever the run had, and whatever callbacks had made of that."""
    settings = Settings.of(GRPO, {"recipe": name, "beta": 0})
    loss = settings.loss_settings(THEN)
    assert loss.epsilon_high == high
    assert low is None or loss.epsilon_low == low
    assert settings.name.startswith(f"recipe={name}: ")
    assert (f"epsilon={low}" if low is not None else f"epsilon_high={high}") in settings.name
    assert settings.warning is None
    written = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert float(written.get("epsilon_high", written["epsilon"] if low is not None else None)) == high
    given = Settings.of(GRPO, {"recipe": name, "epsilon_high": 7.0})
    assert given.loss_settings(THEN).epsilon_high == 7.0, "what is given counts"
    assert "epsilon_high=7.0" in given.name


def test_recipes_that_do_not_clip_leave_the_widths_alone() -> None:
    assert Settings.of(GRPO, {"recipe": "sapo"}).loss_settings(THEN).epsilon_high == 0.12
    assert Settings.of(GRPO, {"recipe": "sapo"}).name == "recipe=sapo: loss_type=sapo"


def test_a_cap_that_is_meant_as_a_width() -> None:
    said = Settings.of(GRPO, {"loss_type": "cispo"}).warning
    assert said is not None
    assert "CISPO takes epsilon_high=0.28 as the cap" in said
    assert Settings.of(GRPO, {"loss_type": "cispo", "epsilon_high": 5.0}).warning is None
    assert Settings.of(GRPO).warning is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losstype": "grpo"}, "Did you mean `loss_type`"),
        ({"recipe": "dapoo"}, "Did you mean `dapo`"),
        ({"recipe": ["a"]}, "recipe=\\['a'\\] is not one of grpo"),
        ({"trainer": "ppo"}, "not one of grpo, rloo"),
        ({"trainer": ["a"]}, "trainer=\\['a'\\] is not one of grpo, rloo"),
        ({"learning_rate": 1.0}, "a replay cannot change it"),
        ({"num_generations": 4}, "a replay cannot change it"),
        ({"normalize_advantages": True}, "a setting of trainer=rloo"),
        ({"loss_type": "gspo"}, "importance_sampling_level='sequence'"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"trainer": "rloo", "loss_type": "grpo"}, "a setting of trainer=grpo"),
    ],
)
def test_what_cannot_be_set(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.of(GRPO, changes)


def test_a_record_without_groups() -> None:
    with pytest.raises(DataError, match="num_generations"):
        Settings.of({name: value for name, value in GRPO.items() if name != "num_generations"})


def test_weights_are_one_for_each_reward() -> None:
    settings = Settings.of(GRPO, {"reward_weights": [1.0, 2.0]})
    assert settings.weights(["a", "b"]).tolist() == [1.0, 2.0]
    assert Settings.of(GRPO).weights(["a"]).tolist() == [1.0]
    with pytest.raises(ConfigError, match="2 entries for the 1 rewards of the run: a"):
        settings.weights(["a"])
