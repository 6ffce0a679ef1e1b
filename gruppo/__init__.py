"""gruppo: critic-free reinforcement learning for language models (GRPO, RLOO and their family).

Every public name is loaded on first use, so that `import gruppo` stays cheap.
"""

from importlib import import_module
from importlib.metadata import version as _version
from typing import Any

_HOME = {
    "GRPOConfig": "gruppo.config.grpo",
    "RLOOConfig": "gruppo.config.rloo",
    "GRPOTrainer": "gruppo.trainer.grpo",
    "RLOOTrainer": "gruppo.trainer.rloo",
    "ModelConfig": "gruppo.config.model",
    "get_peft_config": "gruppo.config.model",
    "get_quantization_config": "gruppo.config.model",
    "ScriptArguments": "gruppo.config.script",
    "DatasetMixtureConfig": "gruppo.config.script",
    "TrlParser": "gruppo.cli.parser",
    "get_dataset": "gruppo.data.mixture",
    "SyncRefModelCallback": "gruppo.trainer.callbacks",
    "LogCompletionsCallback": "gruppo.trainer.completion_callbacks",
    "RichProgressCallback": "gruppo.trainer.callbacks",
    "LiveProgressCallback": "gruppo.trainer.progress",
    "BEMACallback": "gruppo.trainer.callbacks",
    "WeaveCallback": "gruppo.trainer.completion_callbacks",
    "apply_chat_template": "gruppo.data.chat",
    "maybe_apply_chat_template": "gruppo.data.chat",
    "is_conversational": "gruppo.data.chat",
    "prepare_multimodal_messages": "gruppo.data.chat",
    "add_response_schema": "gruppo.data.templates",
    "get_training_chat_template": "gruppo.data.templates",
    "clone_chat_template": "gruppo.data.templates",
    "supports_tool_calling": "gruppo.data.templates",
    "check_reward": "gruppo.rewards.check",
    "python_tool": "gruppo.tools.python_tool",
    "evaluate": "gruppo.evaluation.run",
    "Benchmark": "gruppo.evaluation.types",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version("gruppo")
    if name not in _HOME:
        raise AttributeError(f"module 'gruppo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), "__version__", *__all__]
