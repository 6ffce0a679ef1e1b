"""The script that makes the weights, run for a few steps."""

import json
from itertools import islice

import pytest

from gruppo.demo import model_path
from gruppo.demo.build import Settings, build, collate, demonstrations, learning_rate
from gruppo.demo.task import problems

TINY = Settings(steps=3, lesson_steps=1, batch_size=4, hidden_size=16, intermediate_size=16, layers=1, heads=2)


def test_demonstrations_are_worked_first_and_mostly_direct_later():
    settings = Settings(lesson_steps=10, batch_size=8, worked_share=0.2)
    texts = [text for _, text in islice(demonstrations(settings), 1080)]
    assert all("=" in text for text in texts[:80])
    assert 0.15 < sum("=" in text for text in texts[80:]) / 1000 < 0.25


def test_demonstrations_come_from_the_train_split_only():
    assert {problem.split for problem, _ in islice(demonstrations(Settings()), 500)} == {"train"}


def test_the_loss_sees_the_completion_only():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path())
    pairs = [(problem, problem.direct) for problem in problems("train", 3)]
    batch = collate(pairs, tokenizer)
    for row, (problem, text) in enumerate(pairs):
        seen = batch["labels"][row] != -100
        assert tokenizer.decode(batch["input_ids"][row][seen]) == text + tokenizer.eos_token
        assert tokenizer.decode(batch["input_ids"][row]).startswith(problem.prompt + text)


def test_learning_rate_rises_then_falls():
    settings = Settings(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] < 0.02


def test_build_is_repeatable_and_writes_a_model_folder(tmp_path):
    cards = [build(tmp_path / name, TINY) for name in ("a", "b")]
    assert cards[0] == cards[1] == json.loads((tmp_path / "a" / "card.json").read_text())
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second
    assert (tmp_path / "a" / "tokenizer.json").exists()
