"""Prompts that are too long are found before a run begins, without tokenising the others."""

from typing import Any

import pytest
from datasets import Dataset

from gruppo import GRPOTrainer
from gruppo.data import lengths
from gruppo.data.lengths import check_every_prompt
from gruppo.data.prompts import PromptEncoder
from gruppo.errors import DataError
from tests.helpers import chats, prompts, tiny_tokenizer
from tests.trainer.runs import make

CONTEXT = 128


def dataset(count: int, **others: Any) -> Dataset:
    """Rows of the prompt `a`, and others by their place, as in row7="b"."""
    changed = {int(place.removeprefix("row")): prompt for place, prompt in others.items()}
    return Dataset.from_list([{"prompt": changed.get(i, "a")} for i in range(count)])


def conversations(count: int, long: int, text: str = "b" * 200) -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text if i == long else "a"}]} for i in range(count)]
    )


class Counting(PromptEncoder):
    """Notes the prompts it tokenises."""

    def __init__(self, **settings: Any):
        super().__init__(tiny_tokenizer(), **({"context_length": CONTEXT} | settings))
        self.tokenised: list[Any] = []

    def token_ids(self, prompts: Any, tools: Any = None) -> list[list[int]]:
        self.tokenised += prompts
        return super().token_ids(prompts, tools)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (dataset(2000, row1501="b" * CONTEXT), "^Row 1501: A prompt has 128 tokens, which leaves no room"),
        (dataset(600, row7="b" * 300, row9="é" * 150), "^Row 7: A prompt has 300 tokens.* Other invalid rows: 9.$"),
        (
            dataset(600, **{f"row{i}": "b" * 300 for i in range(300, 500)}),
            "^Row 300: .* Other invalid rows: 301, 302, 303, 304, 305 and more.$",
        ),
        (conversations(900, 899), "^Row 899: A prompt has 203 tokens"),
        (dataset(900, row899=""), "^Row 899: A row has an empty `prompt`"),
    ],
    ids=["one", "two", "many", "conversation", "empty"],
)
def test_the_rows_are_named(rows: Dataset, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_every_prompt(rows, Counting())


def test_a_prompt_that_just_fits_is_taken_and_one_token_more_is_not() -> None:
    check_every_prompt(dataset(3, row1="b" * (CONTEXT - 1)), Counting())
    with pytest.raises(DataError, match="Row 1:"):
        check_every_prompt(dataset(3, row1="b" * CONTEXT), Counting())
    with pytest.raises(DataError, match="Row 1:"):
        check_every_prompt(dataset(3, row1="b" * (CONTEXT - 40)), Counting(room=41))


def test_what_the_template_adds_counts() -> None:
    """Three tokens and 19 bytes around a message; each message of a longer conversation has its share."""
    turns = [{"role": "user", "content": "b" * 10}, {"role": "assistant", "content": "b" * 10}] * 5
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}] * 300 + [{"prompt": turns}])
    check_every_prompt(rows, Counting())
    with pytest.raises(DataError, match="Row 300: A prompt has 121 tokens"):
        check_every_prompt(rows, Counting(context_length=121))


def test_only_suspects_are_tokenised() -> None:
    encoder = Counting()
    check_every_prompt(dataset(1000, row501="b" * 120, row502=" "), encoder)
    assert encoder.tokenised == ["b" * 120, " "]


@pytest.mark.parametrize("settings", [{"context_length": None}, {"max_prompt_length": 20}], ids=str)
def test_where_every_prompt_fits_none_is_tokenised(settings: dict[str, Any]) -> None:
    encoder = Counting(**settings)
    check_every_prompt(dataset(1000, row501="b" * 500), encoder)
    assert encoder.tokenised == []


def test_a_white_prompt_that_has_no_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Counting()
    monkeypatch.setattr(encoder, "token_ids", lambda prompts: [[] for _ in prompts])
    with pytest.raises(DataError, match="Row 44: The prompt '  ' has no tokens"):
        check_every_prompt(dataset(500, row44="  "), encoder)


def test_of_a_very_large_dataset_the_beginning_is_read() -> None:
    assert lengths.MOST_READ == 1_000_000
    check_every_prompt(dataset(30, row20="b" * 300), Counting(), limit=20)
    with pytest.raises(DataError, match="Row 20"):
        check_every_prompt(dataset(30, row20="b" * 300), Counting(), limit=21)


def test_rows_are_not_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dataset(1000, row999="b" * 300).shuffle(seed=0)
    place = list(rows["prompt"]).index("b" * 300)

    def one_by_one(self: Dataset) -> Any:
        raise AssertionError("a row by itself takes ten times as long")

    monkeypatch.setattr(Dataset, "__iter__", one_by_one)
    with pytest.raises(DataError, match=f"Row {place}: A prompt has 300"):
        check_every_prompt(rows, Counting())


def test_what_a_dataset_makes_of_its_rows_when_they_are_read_counts() -> None:
    rows = dataset(30, row20="b").with_transform(lambda rows: {"prompt": [text * 300 for text in rows["prompt"]]})
    with pytest.raises(DataError, match=r"Row 0: A prompt has 300 tokens.* and more"):
        check_every_prompt(rows, Counting())
    check_every_prompt(dataset(30).with_format("numpy"), Counting())


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("rows", [dataset(1024, row601="x" * 300), conversations(1024, 601, "x" * 300)])
def test_a_trainer_says_so_at_construction(kind: str, rows: Dataset, tmp_path: Any) -> None:
    good = prompts(8) if isinstance(rows[0]["prompt"], str) else chats(8)
    sets = {"dataset": rows} if kind == "train" else {"dataset": good, "eval_dataset": {"a": good, "b": rows}}
    with pytest.raises(DataError, match=r"Row 601: A prompt has 30\d tokens"):
        make(tmp_path, GRPOTrainer, **sets)
