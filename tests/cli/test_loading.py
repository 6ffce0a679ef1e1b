"""From words to objects: rewards, tools, rows."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from gruppo.cli.loading import (
    load_adapter,
    load_datasets,
    load_named,
    load_reward,
    load_rewards,
    load_rows,
    load_tools,
)
from gruppo.cli.recipe import RunFile
from gruppo.errors import ConfigError, DataError


def test_rewards_by_name(home: Path) -> None:
    from gruppo.rewards import accuracy_reward

    own, here = home / "own.py", Path.cwd()
    assert load_reward("accuracy_reward", here) is accuracy_reward
    assert load_reward("gruppo.rewards:accuracy_reward", here) is accuracy_reward
    assert load_reward("gruppo.rewards.accuracy_reward", here) is accuracy_reward, "a dotted path, as in TRL"
    assert load_reward("a/reward-model", here) == "a/reward-model"
    assert load_reward({f"{own}:make": {"by": 3}}, here)(["x", "y"]) == [3, 3]
    assert load_reward(json.dumps({f"{own}:make": {"by": 4}}), here)(["x"]) == [4], "on a line it is JSON"
    assert load_reward("own.py:brevity", home) is load_reward(f"{own}:brevity", here), "beside the recipe; run once"
    assert load_reward("get_soft_overlong_punishment", here).max_completion_len == 1280, "TRL's"
    punishment = {"get_soft_overlong_punishment": {"max_completion_len": 8, "soft_punish_cache": 4}}
    assert load_reward(punishment, here)(completion_ids=[[1] * 8]) == [-1.0]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("acuracy_reward", "no shipped reward 'acuracy_reward'. Did you mean `accuracy_reward`"),
        ("get_length_reward", "creates a reward: give it arguments"),
        ({"get_length_reward": {"lenght": 3}}, "get_length_reward cannot be created: .*lenght"),
        ("own.py:brevty", "has no `brevty`. Did you mean `brevity`"),
        ("gruppo.nowhere:x", "cannot be imported"),
        ("none.py:x", "There is no file"),
        ('{"a": ', "is not JSON"),
        (3, "write `module:name`"),
    ],
)
def test_rewards_that_are_not_there(entry: Any, message: str, home: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(entry, home)


def test_files_of_one_name_do_not_hide_each_other(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text(f"where = {folder!r}\n")
    found = [load_named(f"{tmp_path / folder}/same_name.py:where", tmp_path) for folder in ("one", "two")]
    assert found == ["one", "two"]


def test_tools_and_environments(recipe: Any, home: Path) -> None:
    run = RunFile.read(recipe(tools=[f"{home}/own.py:add"], environment_factory={"game": "builtins:dict"}))
    found = load_tools(run)
    assert found["tools"][0](1, 2) == 3
    assert found["environment_factory"] == {"game": dict}
    assert load_tools(RunFile.read(recipe(rollout_func=f"{home}/own.py:ask"))).keys() == {"rollout_func"}
    assert load_tools(RunFile.read(recipe())) == {}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same two rows in every form, and a third in a second file."""
    folder = tmp_path_factory.mktemp("files")
    rows = Dataset.from_list([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}])
    rows.to_json(folder / "rows.jsonl")
    rows.to_csv(folder / "rows.csv")
    rows.to_parquet(folder / "rows.parquet")
    rows.to_json(folder / "rows.jsonl.gz", compression="gzip")
    rows.select([0]).to_json(folder / "rows2.jsonl")
    rows.save_to_disk(folder / "saved")
    (folder / "plain").mkdir()
    rows.to_json(folder / "plain" / "train.jsonl")
    rows.select([1]).to_json(folder / "plain" / "test.jsonl")
    return folder


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("rows.jsonl", 2), ("rows.csv", 2), ("rows.parquet", 2), ("rows.jsonl.gz", 2)),
        *(("rows*.jsonl", 3), ("saved", 2), ("plain", 2)),
    ],
)
def test_rows_in_files_globs_and_folders(name: str, count: int, files: Path, recipe: Any) -> None:
    train, evaluation = load_datasets(RunFile.read(recipe(dataset=str(files / name))))
    assert (len(train), evaluation) == (count, None)
    assert train[0]["prompt"] == "a"


def test_a_file_is_looked_for_beside_the_recipe(recipe: Any) -> None:
    path = recipe(dataset="near.jsonl")
    (path.parent / "near.jsonl").write_text('{"prompt": "x"}\n')
    assert load_datasets(RunFile.read(path))[0]["prompt"][:] == ["x"]


def test_rows_to_evaluate_on(files: Path, recipe: Any) -> None:
    def both(**changes: Any) -> tuple[int, int]:
        train, evaluation = load_datasets(RunFile.read(recipe(eval_strategy="steps", eval_steps=1, **changes)))
        return len(train), len(evaluation)

    assert both(dataset=str(files / "plain")) == (2, 1), "its own split"
    assert both(dataset=str(files / "rows.csv"), eval_dataset=str(files / "rows2.jsonl")) == (2, 1)
    assert both(dataset=str(files / "rows*.jsonl"), test_split_size=1) == (2, 1), "set aside"
    mixture = [{"path": str(files / "rows.csv")}, {"path": str(files / "rows2.jsonl")}]
    assert both(dataset=mixture, test_split_size=1) == (2, 1)


def test_a_name_on_the_hub(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load_dataset(**words: Any) -> Dataset:
        asked.append({key: value for key, value in words.items() if value is not None})
        return Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    about = {"dataset": "openai/gsm8k", "dataset_config": "main", "eval_strategy": "epoch"}
    train, evaluation = load_datasets(RunFile.read(recipe(**about)))
    assert [(each["path"], each["name"], each["split"]) for each in asked] == [
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "main", "test"),
    ]
    assert len(train) == len(evaluation) == 1


def test_a_stream(files: Path, recipe: Any) -> None:
    train, _ = load_datasets(RunFile.read(recipe(dataset=str(files / "rows.jsonl"), dataset_streaming=True)))
    assert [row["prompt"] for row in train] == ["a", "b"]


def test_rows_are_changed_by_a_function(home: Path, recipe: Any) -> None:
    path = recipe(dataset="questions.jsonl", dataset_map=f"{home}/own.py:ask")
    (path.parent / "questions.jsonl").write_text('{"question": "2+2?"}\n')
    train, _ = load_datasets(RunFile.read(path))
    assert train[0] == {"question": "2+2?", "prompt": [{"role": "user", "content": "2+2?"}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'prompt': row['quest']}", r"own\d+.py:change failed with KeyError: 'quest', for ..question': '2"),
        ("row['prompt'] = 'x'", r"own\d+.py:change returned None; it must return the new row"),
    ],
)
def test_a_function_that_does_not_change_rows_is_named(body: str, message: str, home: Path, recipe: Any) -> None:
    file = home / f"own{len(body)}.py"  # modules stay loaded under their names
    file.write_text(f"def change(row):\n    {body}\n")
    path = recipe(dataset="questions.jsonl", dataset_map=f"{file}:change")
    (path.parent / "questions.jsonl").write_text('{"question": "2+2?"}\n')
    with pytest.raises(DataError, match=message):
        load_datasets(RunFile.read(path))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": "none.jsonl"}, DataError, "There is no file none.jsonl"),
        ({"dataset": "no-one/nothing"}, DataError, "no-one/nothing cannot be loaded.*hub needs the network"),
        ({"dataset": "rows.csv", "eval_strategy": "epoch"}, ConfigError, "no split to evaluate on"),
        ({"eval_dataset": "rows.csv"}, ConfigError, "nothing is evaluated: set eval_strategy"),
        (
            {"dataset": "saved", "dataset_train_split": "train", "datasets": [{"path": "a", "x": 1}]},
            ConfigError,
            "`x`",
        ),
    ],
)
def test_rows_that_cannot_be_had(
    changes: dict[str, Any], error: type[Exception], message: str, files: Path, recipe: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(files)
    with pytest.raises(error, match=message):
        load_datasets(RunFile.read(recipe(**changes)))


def test_adapters_in_two_ways(recipe: Any) -> None:
    assert load_adapter(RunFile.read(recipe())) is None
    assert load_adapter(RunFile.read(recipe(peft={"r": 4, "target_modules": "all-linear"}))).r == 4
    assert load_adapter(RunFile.read(recipe(use_peft=True, lora_r=2))).r == 2
    for changes, message in [
        ({"peft": {"lora_alfa": 4}}, "LoraConfig has no field `lora_alfa`. Did you mean `lora_alpha`"),
        ({"peft": {"r": 4}, "use_peft": True}, "both ask for an adapter"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_adapter(RunFile.read(recipe(**changes)))


def test_a_reward_model_comes_before_the_functions(recipe: Any) -> None:
    run = RunFile.read(recipe(reward_model_name_or_path="owner/model", rewards=["think_format_reward"]))
    first, second = load_rewards(run)
    assert (first, second.__name__) == ("owner/model", "think_format_reward")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(:\n", "SyntaxError: .*See .*edited.py:1"),
        ("\nscore = undefined\n", "NameError: name 'undefined' is not defined. See .*edited.py:2"),
        ("import no_such_module\n", "No module named 'no_such_module'. See .*edited.py:1"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3. See .*edited.py:2"),
    ],
)
def test_code_that_cannot_run(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text(text)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"edited.py cannot be imported: {message}"):
            load_reward(f"{file}:score", tmp_path)
    assert getattr(sys.modules.get("edited"), "__file__", None) != str(file)
    file.write_text("def score(completions, **_):\n    return [4.5 for _ in completions]\n")
    assert load_reward(f"{file}:score", tmp_path)(["x"]) == [4.5], "mended in the same process"


@pytest.mark.parametrize("entry", ["edited.py", "/some/where/edited.py"])
def test_a_file_without_the_name_of_a_function(entry: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"name the function in it: {entry}:NAME"):
        load_reward(entry, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.jsonl", "", "The dataset .*empty.jsonl has no rows"),
        ("header.csv", "prompt,answer\n", "The dataset .*header.csv has no rows"),
        ("broken.jsonl", '{"prompt": "a', r"broken.jsonl cannot be loaded: .*\(.*JSON parse error"),
    ],
)
def test_files_that_hold_nothing(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(name, tmp_path)


def test_splits_of_files(files: Path, recipe: Any) -> None:
    def rows(**changes: Any) -> list[int]:
        return load_datasets(RunFile.read(recipe(dataset=str(files / "rows.jsonl"), **changes)))[0]["n"][:]

    assert rows(dataset_train_split="train[1:]") == [2]
    with pytest.raises(ConfigError, match=r"rows\.jsonl has no split 'validation': files have the split `train` only"):
        rows(dataset_train_split="validation")
    evaluated = {"eval_dataset": str(files / "rows.csv"), "eval_strategy": "steps", "eval_steps": 1}
    run = RunFile.read(recipe(dataset=str(files / "rows.jsonl"), dataset_test_split="test[:1]", **evaluated))
    assert load_datasets(run)[1]["n"][:] == [1]
