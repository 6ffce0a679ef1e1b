"""Names that subclasses and callbacks written for TRL 1.16 use."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gruppo.config.base import own_fields
from gruppo.errors import ConfigError
from gruppo.rewards.resolve import is_reward_model
from gruppo.trainer.books.metrics import Metrics
from gruppo.trainer.stepping import Stepping

# Settings that TRL's trainers cannot have a copy of, as TRL lacks them: a subclass may use the names for its own.
ONLY_HERE = frozenset(
    (
        *("rollout_backend", "dynamic_sampling", "max_resample_rounds", "tool_timeout", "max_parallel_tools"),
        *("reward_timeout", "reward_sample_timeout", "reward_workers", "reward_memory_gb", "reward_concurrency"),
        *("reward_retries", "reward_on_error", "max_reward_failure_rate", "worker_env", "balance_processes"),
        *("max_tokens_per_micro_batch", "packed_update", "fused_head", "fused_layers", "skip_zero_advantage"),
        *("reuse_sampling_logps", "parity_check", "record", "hub_record", "resume_allow_changes", "save_on_signal"),
        *("audit", "max_bad_updates", "process_timeout", "stop_timeout", "vllm_request_timeout", "vllm_seed_requests"),
        *("eval_benchmarks", "eval_benchmarks_dir", "eval_benchmarks_settings", "async_rollouts"),
    )
)
# Copies of a setting that transformers has too, or that has another name.
FURTHER = {"use_liger_kernel": "use_liger_kernel", "aux_loss_enabled": "router_aux_loss_coef"}
TAKE_EFFECT = frozenset(("router_aux_loss_coef",))  # read from the trainer; the others that do are properties


@cache
def _copies(config_class: type) -> dict[str, str]:
    """The settings that TRL's trainers have a copy of, by the name of the copy."""
    own = {name: name for name in own_fields(config_class) if name not in ONLY_HERE}
    names = {field.name for field in fields(config_class)}
    return own | {name: field for name, field in FURTHER.items() if field in names}


def _declared(trainer_class: type, name: str) -> Any:
    """What our classes have under a name; None if a subclass has something in front of it."""
    for cls in trainer_class.__mro__:
        if name in vars(cls):
            return vars(cls)[name] if cls.__module__.partition(".")[0] == "gruppo" else None
    return None


def _is_users(trainer_class: type, name: str) -> bool:
    """Whether a subclass defines a name itself, so that Python's own rules hold for it."""
    return any(name in vars(cls) for cls in trainer_class.__mro__) and _declared(trainer_class, name) is None


def _refuse_other(name: str, value: Any, now: Any, instead: str) -> None:
    """Raise for an attribute that is set to something else, which would change nothing."""
    if value != now:
        raise ConfigError(f"trainer.{name} = {value!r} would have no effect: {instead} instead.")


class KnownNames(Stepping):
    """The part of the trainer that exposes settings and state under TRL's names."""

    if not TYPE_CHECKING:  # for type checkers, a name that is not declared stays an error

        def __getattr__(self, name: str) -> Any:
            """A setting of the config under its own name, of which TRL's trainers keep a copy."""
            if name in vars(self):  # set before our constructor, behind a property that needs what that makes
                return vars(self)[name]
            copies = _copies(type(self.args)) if "args" in vars(self) else {}
            if name in copies:
                return getattr(self.args, copies[name])
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            """Raise for a copy of a setting that would read back changed and change nothing."""
            if "args" not in vars(self):
                return self._set_early(name, value)
            declared, copies = _declared(type(self), name), _copies(type(self.args))
            takes_effect = name in TAKE_EFFECT or getattr(declared, "fset", None) is not None
            if name not in copies or takes_effect or _is_users(type(self), name):
                return super().__setattr__(name, value)
            now = getattr(self, name)
            if value == now or (now is None and value == {}):
                return None
            raise ConfigError(
                f"trainer.{name} = {value!r} would have no effect, as this trainer reads the config: set "
                f"{copies[name]} in the {type(self.args).__name__} that the trainer is made with."
            )

    def _set_early(self, name: str, value: Any) -> None:
        """Set what a subclass sets before our constructor: it reads it back until that, like TRL's, replaces it."""
        if name == "args":
            for each in [each for each in vars(self) if self._is_replaced(each)]:
                del self.__dict__[each]
        if self._is_replaced(name):
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _is_replaced(self, name: str) -> bool:
        """Whether a name that is set before our constructor gets another value in it."""
        kind = type(self)
        known = name in _copies(self.config_class) or isinstance(_declared(kind, name), property)
        return known and not _is_users(kind, name)

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """The functions that the model can call."""
        return [] if self.toolset is None else self.toolset.functions

    @tools.setter
    def tools(self, functions: Sequence[Callable[..., Any]]) -> None:
        _refuse_other("tools", functions, self.tools, "pass `tools` to the trainer")

    @property
    def environments(self) -> Sequence[Any] | None:
        """Those of the latest rollouts."""
        return self._environments

    @environments.setter
    def environments(self, others: Sequence[Any] | None) -> None:
        _refuse_other("environments", others, self._environments, "pass `environment_factory` to the trainer")

    @property
    def pad_token_id(self) -> int:
        return int(self._tokenizer.pad_token_id)

    @property
    def generation_config(self) -> Any:
        """The sampling settings of the backend, which reads them at every generation."""
        return self.backend.config

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        self.backend.config = config

    @property
    def reward_funcs(self) -> list[Any]:
        """The reward functions; may be set to another list of the same length."""
        return list(self.rewards.runner.functions)

    @reward_funcs.setter
    def reward_funcs(self, functions: list[Any]) -> None:
        if len(functions) != len(self.rewards.runner.names):
            raise ConfigError(
                f"{len(functions)} reward functions cannot take the place of {len(self.rewards.runner.names)}: "
                "weights, metrics and tables have one entry per function. Make a new trainer."
            )
        for new, old in zip(functions, self.rewards.runner.functions, strict=True):
            if is_reward_model(new) and new is not old:
                raise ConfigError(
                    "A reward model cannot be replaced in a run: it needs a tokenizer and a device. Pass it to a new "
                    "trainer, or call it in a reward function."
                )
        self.rewards.runner.functions = list(functions)

    @property
    def reward_func_names(self) -> list[str]:
        return self.rewards.names

    @property
    def reward_processing_classes(self) -> list[Any]:
        return self.rewards.processing_classes

    @property
    def reward_weights(self) -> Tensor:
        """One for each reward; a callback may change them during a run."""
        return self.rewards.weights

    @reward_weights.setter
    def reward_weights(self, weights: Tensor) -> None:
        self.rewards.weights = weights

    @property
    def num_generations(self) -> int:
        return self.args.num_generations

    @property
    def num_generations_eval(self) -> int:
        return self.args.eval_group_size

    @property
    def num_iterations(self) -> int:
        return self.args.num_iterations

    @property
    def _metrics(self) -> dict[str, Metrics]:
        return self.metrics.values

    @property
    def _logs(self) -> dict[str, Any]:
        return self.completion_logs[self.mode].columns

    @property
    def _buffered_inputs(self) -> list[dict[str, Any]]:
        return list(self._queue)
