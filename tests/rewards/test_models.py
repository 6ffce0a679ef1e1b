"""Reward models: what they read, in which batches, and with which tokenizer."""

import functools
import math
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from gruppo.config.grpo import GRPOConfig
from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.models import batches_of, load_reward_tokenizer, score_with_model, scored_text, token_budget
from gruppo.rewards.outcomes import Kind
from gruppo.rewards.resolve import function_name, is_reward_model, resolve_rewards
from gruppo.rewards.runner import RewardInputs
from gruppo.trainer.grpo import GRPOTrainer
from tests.helpers import base_args, chats, sharp, tiny_model, tiny_tokenizer
from tests.rewards.test_runner import BATCH, CPU, plain, runner


def classifier(**kwargs: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    size = dict(vocab_size=101, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    settings = size | dict(num_labels=1, pad_token_id=0, max_position_embeddings=64, bos_token_id=None) | kwargs
    return sharp(LlamaForSequenceClassification(LlamaConfig(**settings)))


def gpt2_classifier() -> GPT2ForSequenceClassification:
    """Its positions are learned: padding on the left would shift them."""
    torch.manual_seed(0)
    size = dict(vocab_size=101, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    return sharp(GPT2ForSequenceClassification(GPT2Config(**size, num_labels=1, pad_token_id=0)))


def alone(model: Any, tokenizer: Any, text: str) -> float:
    """The score of one unpadded text: the head at its last token."""
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        return float(model.score(model.base_model(ids).last_hidden_state)[0, -1, 0])


TEXTS = ["a", "abcdef", "hello there", "xyz", "q" * 30]


@pytest.mark.parametrize("make", [classifier, gpt2_classifier])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tokens", [1, 25, 60, 999])
def test_a_score_is_that_of_the_text_alone(make, side, tokens):
    model, tokenizer = make(), tiny_tokenizer(padding_side=side)
    scores = score_with_model(model, tokenizer, TEXTS, tokens=tokens, device=CPU)
    assert scores == pytest.approx([alone(model, tokenizer, text) for text in TEXTS], rel=1e-5)
    assert len({round(score, 4) for score in scores}) == len(TEXTS)
    assert tokenizer.padding_side == side


def test_no_special_tokens_are_added():
    model, plain_tokenizer, adding = classifier(), tiny_tokenizer(), tiny_tokenizer()
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<user> $A", special_tokens=[("<user>", 2)])
    assert adding("a")["input_ids"][0] == 2
    score = functools.partial(score_with_model, model, texts=TEXTS, tokens=999, device=CPU)
    assert score(tokenizer=adding) == score(tokenizer=plain_tokenizer)


def test_no_more_than_a_budget_of_tokens_at_a_time():
    model, shapes = classifier(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    score_with_model(model, tiny_tokenizer(), TEXTS, tokens=23, device=CPU)
    assert shapes == [(1, 30), (2, 11), (2, 3)], "a text that is longer has a pass of its own"


@pytest.mark.parametrize(
    ("lengths", "tokens", "batches"),
    [
        ([3, 9, 4], 10, [[1], [2, 0]]),
        ([3, 9, 4], 1, [[1], [2], [0]]),
        ([5, 5, 5, 5], 10, [[0, 1], [2, 3]]),
        ([0, 0], 4, [[0, 1]]),
        ([], 4, []),
    ],
)
def test_batches_of_texts(lengths, tokens, batches):
    assert batches_of(lengths, tokens) == batches


def test_one_pass_and_many_give_the_same_scores_in_the_same_order():
    model, tokenizer = classifier(), tiny_tokenizer()
    texts = [chr(97 + i % 26) * (1 + 7 * i % 40) for i in range(26)]
    score = functools.partial(score_with_model, model, tokenizer, texts, device=CPU)
    assert score(tokens=100) == pytest.approx(score(tokens=10**6), rel=1e-6)
    assert len(set(score(tokens=100))) == 26


def test_a_score_that_is_no_number_fails_its_completion():
    model, tokenizer = classifier(), tiny_tokenizer()
    with torch.no_grad():
        model.base_model.embed_tokens.weight[tokenizer("c")["input_ids"][0]] = math.nan
    scores = runner(model, tokenizers=[tokenizer]).score(BATCH)
    assert scores.kinds_BR.tolist() == [[Kind.SCORE], [Kind.FAILURE]]


class Failing(nn.Module):
    """A classifier that raises on batches of some kind."""

    def __init__(self, fails: Any, error: Exception):
        super().__init__()
        self.model, self.fails, self.error, self.shapes = classifier(), fails, error, []

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        if self.fails(input_ids):
            raise self.error
        return self.model(input_ids=input_ids, **inputs)


def longer_than(limit: int) -> Any:
    return lambda input_ids: input_ids.shape[1] > limit


def test_a_model_that_raises_on_a_text_fails_that_one_only(caplog):
    model, tokenizer = Failing(longer_than(10), IndexError("index out of range")), tiny_tokenizer()
    shown = RewardInputs([{}] * 3, ["p"] * 3, ["a", "b" * 20, "cd"], [[1]] * 3)
    scores = runner(model, tokenizers=[tokenizer]).score(shown)
    assert scores.kinds_BR.tolist() == [[Kind.SCORE], [Kind.FAILURE], [Kind.SCORE]]
    expected = [alone(model.model, tokenizer, text) for text in ("pa", "pcd")]
    assert scores.values_BR[[0, 2], 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert "index out of range" in caplog.records[0].message
    with pytest.raises(RewardError, match=r"(?s)failed on 1 of 3.*index out of range"):
        runner(model, tokenizers=[tokenizer], on_error="raise").score(shown)


def test_a_pass_that_needs_too_much_memory_is_split():
    error = torch.cuda.OutOfMemoryError("CUDA out of memory")
    model, tokenizer = Failing(lambda input_ids: len(input_ids) > 1, error), tiny_tokenizer()
    scores = score_with_model(model, tokenizer, TEXTS, tokens=999, device=CPU)
    assert scores == pytest.approx([alone(model.model, tokenizer, text) for text in TEXTS], rel=1e-5)
    assert [rows for rows, _ in model.shapes] == [5, 1, 1, 1, 1, 1]


def test_a_conversation_that_the_template_refuses_fails_alone():
    template = "{% for m in messages %}{{ m['content'] }}{% if m['content'] == 'x' %}{{ raise_exception('x') }}"
    tokenizer = tiny_tokenizer(chat_template=template + "{% endif %}{% endfor %}")
    prompts = [[{"role": "user", "content": "q"}]] * 2
    answers = [[{"role": "assistant", "content": text}] for text in ("x", "y")]
    scores = runner(classifier(), tokenizers=[tokenizer]).score(RewardInputs([{}] * 2, prompts, answers, [[1]] * 2))
    assert scores.kinds_BR.tolist() == [[Kind.FAILURE], [Kind.SCORE]]


def test_the_budget_is_larger_on_a_gpu():
    assert (token_budget(CPU), token_budget(torch.device("cuda"))) == (4096, 16384)


def test_a_tokenizer_without_pad_token_gets_one_and_the_model_learns_it():
    model, tokenizer = classifier(pad_token_id=None), tiny_tokenizer(pad_token=None)
    assert load_reward_tokenizer(model, tokenizer, False) is tokenizer
    assert (tokenizer.pad_token, model.config.pad_token_id) == ("<eos>", 1)
    scores = score_with_model(model, tokenizer, TEXTS, tokens=999, device=CPU)
    assert scores == pytest.approx([alone(model, tokenizer, text) for text in TEXTS], rel=1e-5)


def test_the_models_pad_token_follows_the_tokenizer():
    model = classifier(pad_token_id=7)
    load_reward_tokenizer(model, tiny_tokenizer(), False)
    assert model.config.pad_token_id == 0


def test_the_tokenizer_of_a_named_model_is_found(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    classifier().float().save_pretrained(tmp_path)
    functions, tokenizers, _ = resolve_rewards(str(tmp_path), None, None, trust_remote_code=False)
    assert isinstance(functions[0], LlamaForSequenceClassification)
    assert tokenizers[0].pad_token == "<pad>"
    assert function_name(functions[0]) == tmp_path.name
    expected = [alone(classifier().float(), tokenizers[0], text) for text in TEXTS]
    found = score_with_model(functions[0].eval(), tokenizers[0], TEXTS, tokens=40, device=CPU)
    assert found == pytest.approx(expected, abs=1e-5)


def test_plain_texts_are_joined_and_conversations_rendered_with_the_models_own_template():
    tokenizer = tiny_tokenizer(
        chat_template="{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }};{% endfor %}{{ tail }}"
    )
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    assert scored_text(tokenizer, "q: ", "a", {}) == "q: a"
    assert scored_text(tokenizer, [user], [assistant], {"tail": "!"}) == "u=q;a=a;!"
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "q"}, {"type": "text", "text": "?"}]
    seen = {**user, "content": parts}
    assert scored_text(tokenizer, [seen], [assistant], {}) == "u=q?;a=a;"
    assert seen["content"] is parts


def test_models_and_functions_side_by_side():
    model, tokenizer = classifier(), tiny_tokenizer()
    rewards = runner(plain, model, tokenizers=[None, tokenizer]).score(BATCH).values_BR
    expected = [alone(model, tokenizer, text) for text in ("pa", "qbc")]
    assert rewards[:, 0].tolist() == [1.0, 1.0]
    assert rewards[:, 1].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_module_that_is_no_pretrained_model_needs_its_tokenizer():
    compiled = nn.Sequential(nn.Linear(2, 2))
    assert is_reward_model(compiled)
    with pytest.raises(ConfigError, match=r"Sequential is not a PreTrainedModel.*reward_processing_classes"):
        resolve_rewards(compiled, None, None, trust_remote_code=False)
    _, tokenizers, _ = resolve_rewards(compiled, tiny_tokenizer(), None, trust_remote_code=False)
    assert tokenizers[0].pad_token == "<pad>"


def test_a_trainer_scores_conversations_with_a_model_in_evaluation_mode(tmp_path):
    model, tokenizer = classifier(attention_dropout=0.9).train(), tiny_tokenizer()
    trainer = GRPOTrainer(
        tiny_model(),
        [model, plain],
        GRPOConfig(**base_args(tmp_path)),
        chats(),
        processing_class=tiny_tokenizer(),
        reward_processing_classes=[tokenizer, None],
    )
    assert not trainer.reward_funcs[0].training
    turns = [[{"role": "assistant", "content": text}] for text in ("ab", "c", "defg", "")]
    questions = [row["prompt"] for row in chats(4)]
    scores = trainer._calculate_rewards([{}] * 4, questions, turns, [[1]] * 4)[:, 0]
    expected = [
        alone(model, tokenizer, f"<user>p{i}<eos><assistant>{turn[0]['content']}<eos>") for i, turn in enumerate(turns)
    ]
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)
