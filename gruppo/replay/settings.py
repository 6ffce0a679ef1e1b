"""The settings of a replay: those of the run, with some of them changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gruppo.algo.loss import LossSettings
from gruppo.algo.recipes import RECIPES, Recipe
from gruppo.config.grpo import GRPOConfig
from gruppo.config.hints import nearest
from gruppo.config.objective import GRPOObjectiveConfig, RLOOObjectiveConfig
from gruppo.config.recipe import loss_settings_of, recipe_of, settings_of_recipe
from gruppo.config.rloo import RLOOConfig
from gruppo.config.vllm import VLLMCorrectionConfig
from gruppo.errors import ConfigError, DataError

__all__ = ["CHANGEABLE", "Settings"]

TRAINERS: dict[str, Any] = {"grpo": GRPOConfig, "rloo": RLOOConfig}
_MIXINS: tuple[Any, ...] = (GRPOObjectiveConfig, RLOOObjectiveConfig, VLLMCorrectionConfig)

# The settings that can be changed for recorded rollouts. All other settings determined the rollouts themselves.
CHANGEABLE = {*(f.name for mixin in _MIXINS for f in fields(mixin)), "entropy_coef", "max_completion_length"}
# The clip widths of each recipe in the table of docs/algorithm.md; sapo and vespo have none.
CLIPS: dict[str, dict[str, float | None]] = {
    **{name: {"epsilon": 0.2, "epsilon_high": None} for name in ("grpo", "dr_grpo", "bnpo", "luspo", "rloo")},
    "dapo": {"epsilon": 0.2, "epsilon_high": 0.28},
    "gspo": {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"epsilon_high": 5.0},  # the cap of the ratio itself; there is no lower clip
}
# The changeable settings that advantages depend on.
OF_ADVANTAGES = {
    *("trainer", "scale_rewards", "multi_objective_aggregation", "reward_weights", "normalize_advantages"),
    *("reward_clip_range", "beta"),
}


@dataclass(frozen=True)
class Settings:
    """A recipe and its hyperparameters, with which a run is replayed.

    Example, the settings of the run with another reduction:
        Settings.of(run.config, {"loss_type": "dr_grpo"})
    """

    config: Any
    recipe: Recipe
    trainer: str
    changes: Mapping[str, Any]  # what differs from the run
    recorded: Mapping[str, Any]  # the settings of the run
    named: str | None = None  # the name of the recipe, if `changes` named one

    @classmethod
    def of(cls, recorded: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> "Settings":
        """The settings of a run with changes, which may include `recipe` and `trainer`."""
        own = "grpo" if "loss_type" in recorded else "rloo"
        named = (changes or {}).get("recipe")
        asked = _expanded(dict(changes or {}), own)
        trainer = asked.pop("trainer", own)
        config_class = TRAINERS[trainer]
        takes = {f.name for f in fields(config_class)} & CHANGEABLE
        for name in asked:
            if name not in takes:
                raise ConfigError(_refusal(name, takes, config_class))
        group = recorded.get("num_generations")
        if not isinstance(group, int) or group < 1:
            raise DataError(f"The run's config.yaml has num_generations={group!r}: its groups are unknown.")
        values = {name: recorded[name] for name in takes if name in recorded} | asked
        if recorded.get("use_vllm") or recorded.get("rollout_backend") == "vllm":
            values["use_vllm"] = True
        config = config_class(
            output_dir="replay",
            use_cpu=True,
            bf16=False,
            report_to="none",
            num_generations=group,
            per_device_train_batch_size=group,
            **values,
        )
        changed = {name: getattr(config, name) for name in asked}
        changed = {name: value for name, value in changed.items() if value != recorded.get(name)}
        changed |= {} if trainer == own else {"trainer": trainer}
        return cls(config, recipe_of(config), trainer, changed, recorded, named)

    @property
    def name(self) -> str:
        """A description of the difference to the run's settings."""
        if self.named is None:
            return _listed(self.changes) or "as recorded"
        widths = {name: getattr(self.config, name) for name in CLIPS.get(self.named, ())}
        shown = {**self.changes, **{name: value for name, value in widths.items() if value is not None}}
        return f"recipe={self.named}" + (f": {_listed(shown)}" if shown else "")

    @property
    def warning(self) -> str | None:
        """A caveat about these settings for the report, or None."""
        cap = self.config.upper_clip
        if self.recipe.objective != "cispo" or cap >= 1:
            return None
        return (
            f"CISPO takes epsilon_high={cap:g} as the cap of the ratio itself: every gradient is scaled down to it. "
            "Set epsilon_high to about 5."
        )

    @property
    def group_size(self) -> int:
        return int(self.config.num_generations)

    @property
    def changes_advantages(self) -> bool:
        return bool(OF_ADVANTAGES & set(self.changes))

    def weights(self, names: Sequence[str]) -> Tensor:
        """The weight of each reward, (R,)."""
        given = self.config.reward_weights
        if given is not None and len(given) != len(names):
            raise ConfigError(
                f"reward_weights={given!r} has {len(given)} entries for the {len(names)} rewards of the run: "
                f"{', '.join(names)}."
            )
        return torch.tensor(given or [1.0] * len(names), dtype=torch.float32)

    def loss_settings(self, recorded: Mapping[str, float]) -> LossSettings:
        """The loss settings of an update: recorded values, which callbacks may have changed, unless changed here."""
        config, changes = self.config, {*self.changes, *CLIPS.get(self.named or "", ())}
        return loss_settings_of(
            config,
            self.recipe,
            beta=float(config.beta if "beta" in changes else recorded["beta"]),
            epsilon_low=float(config.epsilon if "epsilon" in changes else recorded["epsilon_low"]),
            epsilon_high=float(
                config.upper_clip if {"epsilon", "epsilon_high"} & changes else recorded["epsilon_high"]
            ),
        )

    @property
    def entropy_share(self) -> float:
        """The share of tokens, by highest entropy, that the loss keeps."""
        return float(getattr(self.config, "top_entropy_quantile", 1.0))

    @property
    def corrects_sampler(self) -> bool:
        return self.config.samples_with_vllm and getattr(self.config, "vllm_importance_sampling_correction", False)


def _expanded(changes: dict[str, Any], own: str) -> dict[str, Any]:
    """The changes, with `recipe` replaced by the settings of that recipe."""
    if "recipe" in changes:
        name = changes.pop("recipe")
        if not isinstance(name, str) or name not in RECIPES:
            raise ConfigError(f"recipe={name!r} is not one of {', '.join(RECIPES)}.{nearest(str(name), RECIPES)}")
        changes = settings_of_recipe(name) | CLIPS.get(name, {}) | changes
    trainer = changes.get("trainer", own)
    if not isinstance(trainer, str) or trainer not in TRAINERS:
        raise ConfigError(f"trainer={trainer!r} is not one of {', '.join(TRAINERS)}.")
    return changes


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _refusal(name: str, takes: set[str], config_class: Any) -> str:
    if name in {f.name for f in fields(config_class)}:
        return (
            f"`{name}` affected the rollouts or the steps between them: a replay cannot change it. It can "
            f"change recipe, trainer, {', '.join(sorted(takes))}."
        )
    others = [kind for kind, other in TRAINERS.items() if name in {f.name for f in fields(other)} & CHANGEABLE]
    if others:
        return f"`{name}` is a setting of trainer={others[0]}; set that too."
    return f"There is no setting `{name}`.{nearest(name, [*takes, 'recipe', 'trainer'])}"
