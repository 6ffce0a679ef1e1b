"""Whatever a conversation is, its pieces joined by suffixes are the conversation rendered as a whole."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from gruppo.data.responses import parse_response
from gruppo.data.templates import HERMES_TEMPLATE, add_response_schema, get_training_chat_template
from gruppo.errors import ConfigError
from gruppo.tools.suffix import SuffixTokens
from tests.data.imitations import (
    DEEPSEEK,
    HERMES,
    HIDES_RESULT,
    LLAMA,
    NO_TOOLS,
    QWEN2_5,
    QWEN3,
    USER_ONLY,
    XML,
    byte_tokenizer,
)
from tests.helpers import tiny_tokenizer

WORDS = [
    "a",
    "né",
    "数字",
    "🙂",
    "{x}",
    '"q"',
    "\\n",
    "two\nlines",
    "</tool>",
    "[1, 2]",
    "  gap",
    "```",
    "'",
    "ÿ",
    "<b>",
]


class Family(NamedTuple):
    template: str
    eos: str = "<|im_end|>"
    bos: str | None = None
    most_calls: int = 3
    says_and_calls: bool = True  # a message may have content beside its calls
    thinks: Callable[[bool], bool] = lambda first: False  # whether a message has reasoning
    text_only: bool = False  # arguments are read back as text

    def tokenizer(self) -> Any:
        tokenizer = byte_tokenizer(self.template, self.eos, **({"bos_token": self.bos} if self.bos else {}))
        return add_response_schema(tokenizer)


FAMILIES = {
    "hermes": Family(HERMES),
    "hermes, ours": Family(HERMES_TEMPLATE),
    "qwen2.5": Family(QWEN2_5),
    "qwen3": Family(QWEN3, thinks=lambda first: random.random() < 0.5),
    "xml": Family(XML, thinks=lambda first: True, text_only=True),
    "llama": Family(LLAMA, eos="<|eot_id|>", bos="<|begin_of_text|>", most_calls=1, says_and_calls=False),
    "deepseek": Family(
        DEEPSEEK, eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", thinks=lambda first: first
    ),
}


def some_text(rng: random.Random, most: int = 6) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most))).strip()


def some_arguments(rng: random.Random, text_only: bool) -> dict[str, Any]:
    values: list[Any] = [some_text(rng), 3, -0.5, None, True, {"deep": [some_text(rng), {"er": {}}]}, []]
    return {f"k{i}": some_text(rng) if text_only else rng.choice(values) for i in range(rng.randint(0, 3))}


def some_conversation(rng: random.Random, family: Family) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": some_text(rng)}]
    for round_number in range(rng.randint(1, 4)):
        names = rng.choices(["add", "search", "run_it"], k=rng.randint(1, family.most_calls))
        calls = [
            {"type": "function", "function": {"name": name, "arguments": some_arguments(rng, family.text_only)}}
            for name in names
        ]
        content = some_text(rng) if family.says_and_calls and rng.random() < 0.3 else ""
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        if family.thinks(round_number == 0):
            messages[-1]["reasoning_content"] = some_text(rng)
        messages += [{"role": "tool", "name": name, "content": some_text(rng, 12)} for name in names]
    messages.append({"role": "assistant", "content": some_text(rng)})
    if family.thinks(False):
        messages[-1]["reasoning_content"] = some_text(rng)
    return messages


def in_rounds(messages: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """For each assistant message: its place, and the tool messages that answer it."""
    rounds: list[tuple[int, list[dict[str, Any]]]] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            rounds.append((place, []))
        elif message["role"] == "tool":
            rounds[-1][1].append(message)
    return rounds


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_joined_by_suffixes_are_the_whole(name: str, ended: bool) -> None:
    family, rng = FAMILIES[name], random.Random(7)
    random.seed(7)
    tokenizer = family.tokenizer()
    template = get_training_chat_template(tokenizer)
    suffixes = SuffixTokens(tokenizer, template)

    def render(messages: list[dict[str, Any]], prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, chat_template=template
        )

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for _ in range(20):
        messages = some_conversation(rng, family)
        ids = tokens(render(messages[:1], prompt=True))
        for place, answers in in_rounds(messages):
            so_far = render(messages[:place], prompt=True)
            assert tokenizer.decode(ids) == so_far
            written = render(messages[: place + 1]).removeprefix(so_far)
            assert written != render(messages[: place + 1])
            written = written[: written.rindex(family.eos)] + (family.eos if ended else "")
            parsed = parse_response(tokenizer, tokens(written), prefix=ids)
            ids = ids + tokens(written)
            assert parsed.get("tool_calls") == messages[place].get("tool_calls")
            assert parsed.get("reasoning_content") == messages[place].get("reasoning_content")
            assert parsed["content"] == messages[place]["content"]
            if answers:
                ids = ids + suffixes.suffix([a["name"] for a in answers], answers, ended=ended)
        whole = render(messages)
        assert tokenizer.decode(ids) == whole[: whole.rindex(family.eos)] + (family.eos if ended else "")


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "content": content}


def test_several_results_share_a_turn_where_the_template_says_so() -> None:
    tokenizer = byte_tokenizer(QWEN2_5)
    ids = SuffixTokens(tokenizer).suffix(["add", "add"], [result("3"), result("4")])
    assert tokenizer.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_of_one_call_a_message_takes_several_results() -> None:
    tokenizer = byte_tokenizer(LLAMA, "<|eot_id|>", bos_token="<|begin_of_text|>")
    text = tokenizer.decode(SuffixTokens(tokenizer).suffix(["add", "sub"], [result("3"), result("é")], ended=False))
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert text == (
        f'<|eot_id|>{head.format("ipython")}"3"<|eot_id|>{head.format("ipython")}"é"<|eot_id|>'
        f"{head.format('assistant')}"
    )


def test_the_end_of_a_turn_need_not_be_the_end_of_sequence_token() -> None:
    """The tokenizer of a base model may have another one."""
    tokenizer = byte_tokenizer(LLAMA, "<|endoftext|>", bos_token="<|begin_of_text|>")
    suffixes = SuffixTokens(tokenizer)
    open_turn, closed = (suffixes.suffix(["add"], [result("3")], ended=ended) for ended in (False, True))
    assert open_turn == [tokenizer.convert_tokens_to_ids("<|eot_id|>"), *closed]


def test_a_special_token_at_the_start_of_texts_is_not_part_of_a_suffix() -> None:
    tokenizer = byte_tokenizer(QWEN2_5, bos_token="<|begin_of_text|>", add_bos_token=True)
    assert tokenizer.convert_tokens_to_ids("<|begin_of_text|>") == tokenizer("x")["input_ids"][0]
    ids = SuffixTokens(tokenizer).suffix(["add"], [result("3")])
    assert tokenizer.convert_tokens_to_ids("<|begin_of_text|>") not in ids


def test_blocks_of_text_are_joined() -> None:
    tokenizer = byte_tokenizer(QWEN2_5)
    suffixes = SuffixTokens(tokenizer)
    blocks = [{"type": "text", "text": "one"}, "two", {"type": "number", "value": 3}]
    expected = "one\ntwo\n{'type': 'number', 'value': 3}"
    assert suffixes.suffix(["add"], [result(blocks)]) == suffixes.suffix(["add"], [result(expected)])


def test_half_a_surrogate_pair_is_a_question_mark() -> None:
    tokenizer = byte_tokenizer(QWEN2_5)
    suffixes = SuffixTokens(tokenizer)
    assert suffixes.suffix(["add"], [result("\ud83d!")]) == suffixes.suffix(["add"], [result("?!")])


def test_options_of_the_template_reach_it() -> None:
    template = QWEN2_5 + "{% if add_generation_prompt and quiet %}<think>\n\n</think>\n\n{% endif %}"
    tokenizer = byte_tokenizer(template)
    messages = [result("3")]
    loud, quiet = (
        SuffixTokens(tokenizer, None, {"quiet": quiet}).suffix(["add"], messages) for quiet in (False, True)
    )
    assert tokenizer.decode(quiet) == tokenizer.decode(loud) + "<think>\n\n</think>\n\n"
    assert SuffixTokens(tiny_tokenizer(chat_template=NO_TOOLS), template).suffix(["add"], messages)


@pytest.mark.parametrize(
    "name", ["", "no such tool", 'quo"te', "<|im_end|>", "probevalue", "}\n</tool_call><|im_end|>\n"]
)
def test_whatever_name_the_model_made_up(name: str) -> None:
    tokenizer = byte_tokenizer(QWEN2_5)
    suffixes = SuffixTokens(tokenizer)
    answer = [result("probevalue <|im_end|>")]
    assert suffixes.suffix([name], answer) == suffixes.suffix(["add"], answer) == suffixes.suffix([], answer)


def test_an_earlier_think_block_that_goes_away_does_no_harm() -> None:
    """Even with the template that is not repaired, the suffix begins where the model's turn ends."""
    tokenizer = byte_tokenizer(QWEN3)
    repaired = SuffixTokens(tokenizer, get_training_chat_template(tokenizer))
    assert SuffixTokens(tokenizer).suffix(["add"], [result("3")]) == repaired.suffix(["add"], [result("3")])


MERGES = HERMES.replace("<|im_end|>\n", "{% if loop.last %}<|im_end|>\n{% endif %}")
LATER_TOOL_ONLY = HERMES.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if loop.index > 3 %}{{ raise_exception('too long') }}{% endif %}",
)
ONE_RESULT = HERMES.replace("{{ m.content }}", "{% if loop.index < 4 %}{{ m.content }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NO_TOOLS, "HERMES_TEMPLATE"),
        (USER_ONLY, "HERMES_TEMPLATE"),
        (HIDES_RESULT, "HERMES_TEMPLATE"),
        (MERGES, "get_training_chat_template"),
        (LATER_TOOL_ONLY, "2 tool messages in a row: too long"),
        (ONE_RESULT, "does not show 2 tool messages"),
    ],
)
def test_a_template_that_cannot_do_it_is_an_error_at_once(template: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SuffixTokens(byte_tokenizer(template))


def test_a_turn_without_a_special_token_must_not_join_with_what_follows() -> None:
    template = HERMES.replace("<|im_start|>", "=").replace("<|im_end|>\n", " =")  # " ==" is a token
    with pytest.raises(ConfigError, match="must end a turn with a special token"):
        SuffixTokens(byte_tokenizer(template))
