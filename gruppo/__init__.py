"""gruppo: critic-free reinforcement learning for language models (GRPO, RLOO and their family).

Every public name is loaded on first use, so that `import gruppo` stays cheap. Type checkers, which run nothing, see
plain imports.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gruppo.cli.parser import TrlParser as TrlParser
    from gruppo.config.grpo import GRPOConfig as GRPOConfig
    from gruppo.config.model import ModelConfig as ModelConfig
    from gruppo.config.model import get_kbit_device_map as get_kbit_device_map
    from gruppo.config.model import get_peft_config as get_peft_config
    from gruppo.config.model import get_quantization_config as get_quantization_config
    from gruppo.config.rloo import RLOOConfig as RLOOConfig
    from gruppo.config.script import DatasetMixtureConfig as DatasetMixtureConfig
    from gruppo.config.script import ScriptArguments as ScriptArguments
    from gruppo.data.chat import apply_chat_template as apply_chat_template
    from gruppo.data.chat import is_conversational as is_conversational
    from gruppo.data.chat import maybe_apply_chat_template as maybe_apply_chat_template
    from gruppo.data.chat import prepare_multimodal_messages as prepare_multimodal_messages
    from gruppo.data.mixture import get_dataset as get_dataset
    from gruppo.data.templates import add_response_schema as add_response_schema
    from gruppo.data.templates import clone_chat_template as clone_chat_template
    from gruppo.data.templates import get_training_chat_template as get_training_chat_template
    from gruppo.data.templates import supports_tool_calling as supports_tool_calling
    from gruppo.evaluation.run import evaluate as evaluate
    from gruppo.evaluation.types import Benchmark as Benchmark
    from gruppo.rewards.check import check_reward as check_reward
    from gruppo.tools.python_tool import python_tool as python_tool
    from gruppo.trainer.callbacks import BEMACallback as BEMACallback
    from gruppo.trainer.callbacks import RichProgressCallback as RichProgressCallback
    from gruppo.trainer.callbacks import SyncRefModelCallback as SyncRefModelCallback
    from gruppo.trainer.display.completion_callbacks import LogCompletionsCallback as LogCompletionsCallback
    from gruppo.trainer.display.completion_callbacks import WeaveCallback as WeaveCallback
    from gruppo.trainer.display.progress import LiveProgressCallback as LiveProgressCallback
    from gruppo.trainer.grpo import GRPOTrainer as GRPOTrainer
    from gruppo.trainer.rloo import RLOOTrainer as RLOOTrainer

    __version__: str

# Read by OpenMP when torch is loaded: threads that wait sleep instead of spinning. It costs a few per cent on an idle
# machine, but on one that is also busy with other work a step is several times as fast, or even twenty times. It has
# no effect once torch is loaded; the trainer gives advice then (trainer/processes/threads.py).
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_HOME = {
    "GRPOConfig": "gruppo.config.grpo",
    "RLOOConfig": "gruppo.config.rloo",
    "GRPOTrainer": "gruppo.trainer.grpo",
    "RLOOTrainer": "gruppo.trainer.rloo",
    "ModelConfig": "gruppo.config.model",
    "get_kbit_device_map": "gruppo.config.model",
    "get_peft_config": "gruppo.config.model",
    "get_quantization_config": "gruppo.config.model",
    "ScriptArguments": "gruppo.config.script",
    "DatasetMixtureConfig": "gruppo.config.script",
    "TrlParser": "gruppo.cli.parser",
    "get_dataset": "gruppo.data.mixture",
    "SyncRefModelCallback": "gruppo.trainer.callbacks",
    "LogCompletionsCallback": "gruppo.trainer.display.completion_callbacks",
    "RichProgressCallback": "gruppo.trainer.callbacks",
    "LiveProgressCallback": "gruppo.trainer.display.progress",
    "BEMACallback": "gruppo.trainer.callbacks",
    "WeaveCallback": "gruppo.trainer.display.completion_callbacks",
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


if not TYPE_CHECKING:  # with this function in sight, a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version("gruppo")
        if name not in _HOME:
            raise AttributeError(f"module 'gruppo' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), "__version__", *__all__]
