"""The shipped tokenizer and weights: small, loadable offline, exact on text, and weak before training."""

import json
from pathlib import Path

import pytest

from gruppo.demo import accuracy, greedy, load_task, model_path
from gruppo.demo.evaluate import MAX_NEW_TOKENS
from gruppo.demo.run import config
from gruppo.demo.task import exact_match, problems
from gruppo.demo.tokenizer import build_tokenizer, split_pieces

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(model_path())


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(model_path()).eval()


def test_the_folder_is_small_and_complete():
    files = {file.name: file.stat().st_size for file in Path(model_path()).iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "card.json"} <= set(files)
    assert sum(files.values()) < 8 * 2**20


def test_weights_are_float32(model):
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}


def test_round_trip(tokenizer):
    for problem in problems("held_out", 200):
        for text in (problem.prompt, problem.direct, problem.worked):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert tokenizer.unk_token_id not in ids


def test_digits_are_single_tokens(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("Tom has 120 pens. A: 7")["input_ids"])
    assert tokens == ["Tom", " has", " ", "1", "2", "0", " pens", ". ", "A", ": ", "7"]


def test_unknown_words_fall_apart_into_letters(tokenizer):
    text = "xylophones & {braces}"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_special_tokens(tokenizer, model):
    assert tokenizer.padding_side == "left"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_completions_fit_the_length_limit(tmp_path, tokenizer):
    longest = max(len(tokenizer(p.worked)["input_ids"]) + 1 for p in problems("train", 3000))
    assert longest <= config(tmp_path, 1, 0).max_completion_length <= MAX_NEW_TOKENS


def test_build_tokenizer_is_deterministic():
    texts = [p.prompt for p in problems("train", 20)]
    assert build_tokenizer(texts).get_vocab() == build_tokenizer(reversed(texts)).get_vocab()
    assert split_pieces("has 12 pens.") == ["has", " ", "1", "2", " pens", "."]


def test_the_base_model_is_weak_at_answering_at_once(model, tokenizer):
    _, held_out = load_task(held_out_size=200)
    assert 0.1 < accuracy(model, tokenizer, held_out) < 0.45


def test_the_base_model_is_good_once_it_has_begun_to_work(model, tokenizer):
    chosen = problems("held_out", 100)
    # The first number of the calculation commits the model to working step by step.
    completions = greedy(model, tokenizer, [p.prompt + p.steps[0].split("=")[0] for p in chosen])
    assert sum(exact_match(completions, [str(p.answer) for p in chosen])) / len(chosen) > 0.85


def test_greedy_leaves_mode_and_random_state_alone(model, tokenizer):
    import torch

    model.train()
    state = torch.get_rng_state()
    texts = greedy(model, tokenizer, [p.prompt for p in problems("held_out", 5)], batch_size=2)
    assert len(texts) == 5
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    model.eval()


def test_the_card_says_how_the_weights_were_made():
    card = json.loads((Path(model_path()) / "card.json").read_text())
    assert {"settings", "parameters", "held_out"} <= set(card)
    assert card["held_out"]["greedy"] < 0.45
