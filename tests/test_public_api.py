"""What `gruppo` exports: the names that scripts import, each documented, none loaded before it is used."""

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

import gruppo
import gruppo.rewards
import gruppo.trainer.utils

SCRIPT_NAMES = [
    "GRPOTrainer",
    "GRPOConfig",
    "RLOOTrainer",
    "RLOOConfig",
    "ModelConfig",
    "ScriptArguments",
    "DatasetMixtureConfig",
    "TrlParser",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "SyncRefModelCallback",
    "LogCompletionsCallback",
    "RichProgressCallback",
    "LiveProgressCallback",
    "BEMACallback",
    "WeaveCallback",
    "apply_chat_template",
    "maybe_apply_chat_template",
    "is_conversational",
    "prepare_multimodal_messages",
    "add_response_schema",
    "get_training_chat_template",
    "clone_chat_template",
    "supports_tool_calling",
    "check_reward",
    "python_tool",
    "evaluate",
    "Benchmark",
]
UTILITY_NAMES = [
    "RepeatSampler",
    "nanstd",
    "nanmin",
    "nanmax",
    "pad",
    "selective_log_softmax",
    "entropy_from_logits",
    "print_prompt_completions_sample",
    "split_tensor_dict",
    "shuffle_sequence_dict",
    "use_adapter",
    "disable_dropout_in_model",
]
REWARD_NAMES = [
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "math_answer_reward",
    "get_math_answer_reward",
    "get_tag_format_reward",
    "get_regex_reward",
    "get_length_reward",
    "check_reward",
]

MODULES = {"gruppo": SCRIPT_NAMES, "gruppo.trainer.utils": UTILITY_NAMES, "gruppo.rewards": REWARD_NAMES}


def module(name: str) -> Any:
    return sys.modules[name]


@pytest.mark.parametrize("name", MODULES)
def test_the_names_that_scripts_import(name: str) -> None:
    exported = set(module(name).__all__)
    assert exported == set(MODULES[name])
    assert all(getattr(module(name), public) is not None for public in exported)
    assert exported <= set(dir(module(name)))


@pytest.mark.parametrize(("name", "public"), [(name, public) for name, names in MODULES.items() for public in names])
def test_every_public_name_says_what_it_is(name: str, public: str) -> None:
    thing = getattr(module(name), public)
    text = inspect.getdoc(thing)
    assert text
    assert not text.startswith(f"{public}("), "the signature that dataclasses write is no documentation"
    base = inspect.getmro(thing)[1] if inspect.isclass(thing) else None
    assert base is None or text != inspect.getdoc(base), "inherited"


def test_an_unknown_name_is_an_attribute_error() -> None:
    for name in MODULES:
        with pytest.raises(AttributeError, match="GPROTrainer"):
            module(name).GPROTrainer  # noqa: B018


def test_the_version() -> None:
    assert gruppo.__version__.count(".") == 2


def test_constructors_take_arguments_in_the_known_order() -> None:
    shared = [
        *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
        *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config"),
    ]
    grpo = list(inspect.signature(gruppo.GRPOTrainer).parameters.values())
    rloo = list(inspect.signature(gruppo.RLOOTrainer).parameters.values())
    assert [p.name for p in grpo] == [*shared, "tools", "rollout_func", "environment_factory"]
    assert [p.name for p in rloo] == [*shared, "tools", "environment_factory"]
    assert [p.name for p in rloo if p.kind is p.KEYWORD_ONLY] == ["tools", "environment_factory"]
    assert [p.name for p in grpo if p.default is p.empty] == ["model"]
    assert [p.name for p in rloo if p.default is p.empty] == ["model", "reward_funcs"]


HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow", "rich")


@pytest.mark.parametrize("name", ["gruppo", "gruppo.rewards", "gruppo.cli", "gruppo.types", "gruppo.errors"])
def test_importing_loads_nothing_heavy(name: str) -> None:
    code = f"import sys, {name}; print([m for m in {HEAVY} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.parametrize(
    ("before", "first", "after"),
    [
        (None, "", "passive"),
        (None, "from gruppo.cli import main", "passive"),
        ("active", "", "active"),
        (None, "import sys, types; sys.modules['torch'] = types.ModuleType('torch')", "None"),
    ],
    ids=["script", "command line", "set by the user", "after torch"],
)
def test_threads_that_wait_sleep_if_torch_is_still_to_come(before: str | None, first: str, after: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if before is None else {"OMP_WAIT_POLICY": before}
    code = f"import os\n{first}\nimport gruppo\nprint(os.environ.get('OMP_WAIT_POLICY'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == after


def test_a_name_is_loaded_on_first_use() -> None:
    code = """
import sys, gruppo
from gruppo import ModelConfig
assert "gruppo.config.model" in sys.modules and "gruppo.trainer" not in sys.modules
assert "torch" not in sys.modules
print(ModelConfig().dtype)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "float32"
