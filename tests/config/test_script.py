from dataclasses import MISSING, fields

import pytest

from gruppo.config.script import (
    DatasetConfig,
    DatasetMixtureConfig,
    GRPOScriptArguments,
    RLOOScriptArguments,
    ScriptArguments,
)
from gruppo.errors import ConfigError

DATASET = {
    "dataset_name": None,
    "dataset_config": None,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_streaming": False,
    "ignore_bias_buffers": False,
}
REWARDS = {"reward_model_name_or_path": None, "reward_funcs": None}
ONE = {
    "path": MISSING,
    "name": None,
    "data_dir": None,
    "data_files": None,
    "split": "train",
    "columns": None,
    "fraction": None,
}


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (ScriptArguments, DATASET),
        (GRPOScriptArguments, DATASET | REWARDS),
        (RLOOScriptArguments, DATASET | REWARDS),
        (DatasetConfig, ONE),
        (DatasetMixtureConfig, {"datasets": list, "streaming": False, "test_split_size": None}),
    ],
)
def test_fields_defaults_and_help(config, defaults):
    got = {f.name: f.default_factory if f.default_factory is not MISSING else f.default for f in fields(config)}
    assert got == defaults
    assert list(got) == list(defaults)
    assert all(f.metadata["help"] for f in fields(config))


def test_datasets_come_as_mappings_paths_or_configs():
    config = DatasetMixtureConfig(datasets=[{"path": "a", "fraction": 0.5}, "b", DatasetConfig("c", split="test")])
    assert config.datasets == [DatasetConfig("a", fraction=0.5), DatasetConfig("b"), DatasetConfig("c", split="test")]
    assert DatasetMixtureConfig().datasets == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a", "fracton": 0.5}, r"datasets\[1\] has no field `fracton`. Did you mean `fraction`"),
        ({"name": "a"}, r"datasets\[1\]=\{'name': 'a'\} has no `path`"),
        (7, r"datasets\[1\]=7 must be a mapping"),
        ({"path": "a", "fraction": -1}, "fraction=-1"),
        ({"path": "a", "fraction": float("nan")}, "fraction=nan"),
    ],
)
def test_bad_datasets(entry, message):
    with pytest.raises(ConfigError, match=message):
        DatasetMixtureConfig(datasets=["fine", entry])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScriptArguments(dataset_nam="x"), "Did you mean `dataset_name`"),
        (lambda: GRPOScriptArguments(reward_func=["x"]), "Did you mean `reward_funcs`"),
        (lambda: DatasetMixtureConfig(dataset=["x"]), "Did you mean `datasets`"),
    ],
)
def test_unknown_fields_name_the_nearest(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
