import json

import pytest
from datasets import Dataset

from gruppo.config.script import DatasetConfig, DatasetMixtureConfig
from gruppo.data.mixture import _rows_to_keep, get_dataset
from gruppo.errors import ConfigError, DataError


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files: a.jsonl with 10 rows and b.jsonl with 4."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (("a", 10), ("b", 4)):
        lines = [json.dumps({"prompt": f"{name}{i}", "answer": i}) for i in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def mixture(files, fractions=(None, None), columns=None, **kwargs):
    datasets = [
        DatasetConfig(path="json", data_files=str(files / f"{name}.jsonl"), fraction=fraction, columns=columns)
        for name, fraction in zip("ab", fractions, strict=True)
    ]
    return DatasetMixtureConfig(datasets=datasets, **kwargs)


@pytest.mark.parametrize(
    ("fractions", "counts"),
    [
        ((0.5, 0.5), [4, 4]),
        ((1, 1), [4, 4]),
        ((0.75, 0.25), [10, 3]),
        ((0.2, 0.1), [8, 4]),
        ((0.9, 0.1), [10, 1]),
        ((0.99, 0.01), [10, 0]),
        ((0.7, 0.3), [9, 4]),
        ((3, 2), [6, 4]),
        ((0, 1), [0, 4]),
    ],
)
def test_rows_to_keep(fractions, counts):
    assert _rows_to_keep([10, 4], list(fractions)) == counts


def test_without_fractions_all_rows_are_joined_in_order(files):
    data = get_dataset(mixture(files))
    assert list(data) == ["train"]
    assert list(data["train"]["prompt"]) == [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(4)]
    assert data["train"].column_names == ["prompt", "answer"]


def test_fractions_keep_the_first_rows(files):
    data = get_dataset(mixture(files, (3, 1), columns=["prompt"]))["train"]
    assert list(data["prompt"]) == [f"a{i}" for i in range(10)] + ["b0", "b1", "b2"]
    assert data.column_names == ["prompt"]


@pytest.mark.parametrize(("size", "rows"), [(0.5, 7), (3, 3), (3.0, 3)])
def test_test_split_is_the_same_every_time(files, size, rows):
    first, second = (get_dataset(mixture(files, test_split_size=size)) for _ in range(2))
    assert len(first["test"]) == rows
    assert list(first["test"]["prompt"]) == list(second["test"]["prompt"])
    prompts = list(first["test"]["prompt"]) + list(first["train"]["prompt"])
    assert sorted(prompts) == sorted([f"a{i}" for i in range(10)] + [f"b{i}" for i in range(4)])


def test_streaming(files):
    data = get_dataset(mixture(files, streaming=True, columns=["prompt"]))["train"]
    assert not hasattr(data, "__len__")
    assert [row["prompt"] for row in data] == [f"a{i}" for i in range(10)] + [f"b{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("fractions", "options", "message"),
    [
        ((None, 1), {}, r"not for \['json'\]"),
        ((0, 0), {}, "every `fraction` is 0"),
        ((0.5, 0.5), {"streaming": True}, "set streaming=False"),
        ((None, None), {"streaming": True, "test_split_size": 0.5}, r"test_split_size=0\.5 cannot split"),
    ],
)
def test_mixtures_that_cannot_work(files, fractions, options, message):
    with pytest.raises(ConfigError, match=message):
        get_dataset(mixture(files, fractions, **options))


def test_empty_mixtures(monkeypatch):
    with pytest.raises(ConfigError, match="`datasets` is empty"):
        get_dataset(DatasetMixtureConfig())
    monkeypatch.setattr(
        "datasets.load_dataset", lambda path, **_: Dataset.from_dict({"prompt": [path] * (path == "a")})
    )
    entries = [DatasetConfig(path="a", fraction=1), DatasetConfig(path="b", fraction=1)]
    with pytest.raises(DataError, match=r"\['b'\] has no rows"):
        get_dataset(DatasetMixtureConfig(datasets=entries))
