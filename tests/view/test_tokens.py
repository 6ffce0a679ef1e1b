"""Tokens: their texts, and the numbers that they are coloured by."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gruppo.runs import Run, RunRecorder
from gruppo.view.queries import Desk, Question
from gruppo.view.tokens import load_decoder, pieces, token_view
from tests.view import runs


def tokens(desk: Desk, **values: Any) -> dict[str, Any]:
    found: dict[str, Any] = desk.answer("tokens", Question({name: [str(v)] for name, v in values.items()}))
    return found


def row(**changes: Any) -> dict[str, Any]:
    own = dict(update=2, generation=2, row=5, replaced=False, completion_tokens=[1, 2, 3], model_mask=None)
    return own | dict(logps=[-1.0, -2.0, -0.5], entropies=None, advantage=0.5, advantages=None) | changes


def test_a_completion_of_the_run(desk: Desk) -> None:
    view = tokens(desk, generation=3, row=1)
    assert "".join(view["texts"]) == "The answer is 4."
    assert view["logp"] == [-0.5 * i for i in range(view["total"])]
    assert view["entropy"] == [0.25] * view["total"]
    assert view["contribution"] == [0.5] * view["total"], "the ratio counts as 1 where it is not known"
    assert view["ratio"] is None
    assert view["why"] == {
        "ratio": "The run recorded no log-probabilities of an update that learned from this completion."
    }


def test_tokens_of_tools_have_no_numbers(desk: Desk) -> None:
    view = tokens(desk, generation=1, row=5)
    assert 0 in view["model"]
    assert [value is None for value in view["logp"]] == [mark == 0 for mark in view["model"]]
    assert view["why"]["entropy"] == "The run recorded no entropies of this completion."


def test_a_part_of_a_completion(desk: Desk) -> None:
    whole, part = tokens(desk, generation=3, row=1), tokens(desk, generation=3, row=1, first=2, count=3)
    assert part["texts"] == whole["texts"][2:5]
    assert (part["first"], part["total"]) == (2, whole["total"])


def test_ratios_come_from_the_update_that_learned_last() -> None:
    computed = {
        3: [{"generation": 2, "row": 5, "logps": [-1.0, -2.0, -0.5]}, {"generation": 2, "row": 6, "logps": [0.0] * 3}],
        4: [{"generation": 2, "row": 5, "logps": [-1.0 + math.log(2), -2.0 - math.log(4), None]}],
        5: [{"generation": 2, "row": 5, "logps": None}],  # it was left out of that update
    }

    def update_logps(updates: list[int]) -> pa.Table:
        return pa.Table.from_pylist([line for update in updates for line in computed.get(update, [])])

    run: Any = SimpleNamespace(update_logps=update_logps)
    view = token_view(run, None, row(), 0, 10)
    assert view["ratio"] == [2.0, 0.25, None]
    assert view["contribution"] == [1.0, 0.125, 0.5]
    assert view["update"] == 4
    assert token_view(run, None, row(replaced=True), 0, 10)["ratio"] is None, "nothing was learned from it"
    assert token_view(run, None, row(row=7), 0, 10)["ratio"] is None


def test_advantages_of_each_token_count() -> None:
    run: Any = SimpleNamespace()
    view = token_view(run, None, row(advantages=[0.1, -0.2, 0.3], advantage=0.2, model_mask=[1, 0, 1]), 0, 10)
    assert view["contribution"] == [0.1, None, 0.3]
    assert view["model"] == [1, 0, 1]
    without = token_view(run, None, row(advantage=None, logps=[math.nan] * 3), 0, 10)
    assert without["why"]["contribution"] == "This completion has no advantage: nothing was learned from it."
    assert "logp" in without["why"], "log-probs that are all unknown are none"
    assert without["texts"] is None


def test_a_character_of_several_tokens_is_told_once() -> None:
    """A tokenizer of bytes: each of the four bytes of 🦙 is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode("a🦙b").ids

    def decode(own: Any) -> str:
        return str(tokenizer.decode(list(own), skip_special_tokens=False))

    assert pieces(decode, ids) == ["a", "", "", "", "🦙", "b"]
    assert "".join(pieces(decode, ids[:3])).startswith("a"), "a completion may end within a character"
    garbage = pieces(decode, ids[1:2] * 100)
    assert len(garbage) == 100
    assert "\ufffd" in "".join(garbage)


@pytest.mark.parametrize("text", ["", "{}", "[1, 2", '{"model": {"type": "BPE"}}', "null"])
def test_a_tokenizer_that_is_none_is_passed_over(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    RunRecorder(tmp_path).begin(config={}, environment={})
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(text)
    assert load_decoder(Run(tmp_path)) is None
    assert "cannot be used" in caplog.text


def test_older_runs_have_a_tokenizer_in_their_checkpoints(tmp_path: Path) -> None:
    RunRecorder(tmp_path).begin(config={}, environment={})
    assert load_decoder(Run(tmp_path)) is None
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "tokenizer.json").write_text(runs.tokenizer_text())
    decode = load_decoder(Run(tmp_path))
    assert decode is not None
    assert decode(runs.encode("The answer is 4.")) == "The answer is 4."
