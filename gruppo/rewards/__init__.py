"""Shipped rewards. Each is a callable over lists, like a user's own reward function.

accuracy_reward                 1 if the mathematical answer equals the solution (needs math-verify)
reasoning_accuracy_reward       the same, on the text after the reasoning
think_format_reward             1 if the text begins with one <think>…</think> block
get_cosine_scaled_reward        accuracy, scaled by length
get_repetition_penalty_reward   a penalty on repeated n-grams
get_soft_overlong_punishment    a penalty that grows towards the length limit
math_answer_reward              1 if the final answer is right, by the rules of gruppo.grading
get_math_answer_reward          the same, with the rules of one data set
get_tag_format_reward           1 if tags occur once each, in order
get_regex_reward                1 if a pattern matches
get_length_reward               1 for a length as desired, less the further it is off

check_reward(fn, rows) tests a reward on right, wrong, odd and hostile completions before it is used in a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gruppo.rewards.accuracy import accuracy_reward as accuracy_reward
    from gruppo.rewards.accuracy import reasoning_accuracy_reward as reasoning_accuracy_reward
    from gruppo.rewards.check import check_reward as check_reward
    from gruppo.rewards.format import think_format_reward as think_format_reward
    from gruppo.rewards.math_answer import get_math_answer_reward as get_math_answer_reward
    from gruppo.rewards.math_answer import math_answer_reward as math_answer_reward
    from gruppo.rewards.shaping import get_cosine_scaled_reward as get_cosine_scaled_reward
    from gruppo.rewards.shaping import get_repetition_penalty_reward as get_repetition_penalty_reward
    from gruppo.rewards.shaping import get_soft_overlong_punishment as get_soft_overlong_punishment
    from gruppo.rewards.text import get_length_reward as get_length_reward
    from gruppo.rewards.text import get_regex_reward as get_regex_reward
    from gruppo.rewards.text import get_tag_format_reward as get_tag_format_reward

_MODULES = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "accuracy",
    "think_format_reward": "format",
    "get_cosine_scaled_reward": "shaping",
    "get_repetition_penalty_reward": "shaping",
    "get_soft_overlong_punishment": "shaping",
    "math_answer_reward": "math_answer",
    "get_math_answer_reward": "math_answer",
    "get_tag_format_reward": "text",
    "get_regex_reward": "text",
    "get_length_reward": "text",
    "check_reward": "check",
}

__all__ = sorted(_MODULES)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
