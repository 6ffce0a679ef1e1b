import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from gruppo.config.model import ModelConfig, get_kbit_device_map, get_peft_config, get_quantization_config
from gruppo.errors import ConfigError


def has(package):
    try:
        __import__(package)
    except ImportError:
        return False
    return True


needs_peft = pytest.mark.skipif(not has("peft"), reason="needs peft: pip install peft")

DEFAULTS = {
    "model_name_or_path": None,
    "model_revision": "main",
    "dtype": "float32",
    "attn_implementation": None,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_target_parameters": None,
    "lora_modules_to_save": None,
    "lora_task_type": "CAUSAL_LM",
    "use_rslora": False,
    "use_dora": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
    "bnb_4bit_quant_storage": None,
}


def test_fields_defaults_and_order():
    config = ModelConfig()
    assert {f.name: getattr(config, f.name) for f in fields(config)} == DEFAULTS
    assert [f.name for f in fields(config)] == list(DEFAULTS)
    assert all(f.metadata["help"] for f in fields(config))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        (["all-linear"], "all-linear"),
        ("all-linear", "all-linear"),
        ([r".*\.q_proj"], r".*\.q_proj"),
        (["q_proj"], ["q_proj"]),  # a string would have to match the whole path
        ("q_proj", ["q_proj"]),
        (["self_attn.q_proj"], ["self_attn.q_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
    ],
)
def test_target_modules(given, kept):
    assert ModelConfig(lora_target_modules=given).lora_target_modules == kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "exclude each other"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"dtype": "bfloat1"}, "Did you mean `bfloat16`"),
        ({"bnb_4bit_quant_type": "nf8"}, "bnb_4bit_quant_type='nf8'"),
        ({"lora_r": 0}, "lora_r=0"),
        ({"lora_dropout": 1.5}, r"lora_dropout=1\.5"),
        ({"lora_rank": 8}, "lora_rank"),
        ({"model_nam_or_path": "x"}, "Did you mean `model_name_or_path`"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)


def test_no_peft_config_unless_asked():
    assert get_peft_config(ModelConfig(lora_r=4)) is None


@needs_peft
def test_peft_config():
    config = get_peft_config(
        ModelConfig(
            use_peft=True,
            lora_r=4,
            lora_alpha=5,
            lora_dropout=0.1,
            lora_target_modules=["q_proj", "v_proj"],
            lora_target_parameters=["experts.w"],
            lora_modules_to_save=["lm_head"],
            use_rslora=True,
            use_dora=True,
        )
    )
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 5, 0.1)
    assert config.target_modules == {"q_proj", "v_proj"}
    assert (config.target_parameters, config.modules_to_save) == (["experts.w"], ["lm_head"])
    assert (config.use_rslora, config.use_dora, config.bias, config.task_type) == (True, True, "none", "CAUSAL_LM")


def test_missing_peft_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match='pip install "peft>='):
        get_peft_config(ModelConfig(use_peft=True))


def test_no_quantization_unless_asked():
    assert get_quantization_config(ModelConfig()) is None


def test_8_bit():
    config = get_quantization_config(ModelConfig(load_in_8bit=True))
    assert (config.load_in_8bit, config.load_in_4bit) == (True, False)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (torch.float32, "nf4", False, torch.uint8)),
        ({"dtype": None}, (torch.float32, "nf4", False, torch.uint8)),
        (
            {
                "dtype": "bfloat16",
                "bnb_4bit_quant_type": "fp4",
                "use_bnb_nested_quant": True,
                "bnb_4bit_quant_storage": "bfloat16",
            },
            (torch.bfloat16, "fp4", True, torch.bfloat16),
        ),
    ],
)
def test_4_bit(settings, expected):
    config = get_quantization_config(ModelConfig(load_in_4bit=True, **settings))
    got = (
        config.bnb_4bit_compute_dtype,
        config.bnb_4bit_quant_type,
        config.bnb_4bit_use_double_quant,
        config.bnb_4bit_quant_storage,
    )
    assert config.load_in_4bit
    assert got == expected


def test_4_bit_needs_a_precision():
    with pytest.raises(ConfigError, match="dtype='auto'"):
        get_quantization_config(ModelConfig(load_in_4bit=True, dtype="auto"))


def test_a_quantised_model_goes_to_the_gpu_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that scripts for earlier releases of TRL import."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert get_kbit_device_map() is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("accelerate.PartialState", lambda: SimpleNamespace(local_process_index=3))
    assert get_kbit_device_map() == {"": 3}
