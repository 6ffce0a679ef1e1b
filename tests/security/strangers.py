"""Malicious files. Each leaves a mark on disk if any code in it is run."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers import tiny_model, tiny_tokenizer

MODULE = """
from pathlib import Path
Path({mark!r}).write_text("run")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig):
    model_type = {model_type!r}
class Model(LlamaForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "stranger.Config",
    "AutoModel": "stranger.Model",
    "AutoModelForCausalLM": "stranger.Model",
    "AutoModelForSequenceClassification": "stranger.Model",
}
TOKENIZER_MAP = {"AutoTokenizer": ["stranger.Tokens", "stranger.Tokens"]}


class LeavesMark:
    """Unpickling it calls a function of the standard library that leaves the mark."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def torch_archive(path: Path, mark: Path) -> None:
    torch.save({"state": LeavesMark(mark)}, path)


def bare_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps({"state": LeavesMark(mark)}, protocol=2))


def old_torch_file(path: Path, mark: Path) -> None:
    torch.save({"state": LeavesMark(mark)}, path, _use_new_zipfile_serialization=False)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "archive": torch_archive,
    "pickle": bare_pickle,
    "old format": old_torch_file,
}


def model_folder(folder: Path, mark: Path, model_type: str, model: Any = None) -> Path:
    """A model and a tokenizer with custom code, of a known type (llama) or of an unknown one."""
    (model or tiny_model()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    edit(folder / "config.json", model_type=model_type, auto_map=AUTO_MAP)
    edit(folder / "tokenizer_config.json", auto_map=TOKENIZER_MAP)
    if model_type != "llama":
        edit(folder / "tokenizer_config.json", tokenizer_class="Tokens")
    (folder / "stranger.py").write_text(MODULE.format(mark=str(mark), model_type=model_type))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(mark)!r}, 'w')\ndef generate(*a, **k): ...")
    return folder


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
