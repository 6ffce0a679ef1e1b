"""Templates are small imitations of the known families; what counts is how they frame turns, calls and results."""

import pytest
from jinja2 import Template

from gruppo.data.probing import without_none
from gruppo.data.templates import (
    HERMES_TEMPLATE,
    add_response_schema,
    clone_chat_template,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    shows_tools,
    supports_tool_calling,
)
from gruppo.errors import ConfigError
from tests.data.imitations import (
    DEEPSEEK,
    HERMES,
    HIDES_RESULT,
    LLAMA,
    NO_TOOLS,
    PHI,
    QWEN2_5,
    QWEN3,
    REWRITES,
    USER_ONLY,
    XML,
    byte_tokenizer,
    deepseek_tokenizer,
)
from tests.helpers import tiny_model, tiny_tokenizer

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": "x"}}}
ASKED = [{"role": "user", "content": "What?"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RETURNED = [*CALLED, {"role": "tool", "name": "multiply", "content": "6"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, True),
        (HERMES_TEMPLATE, True),
        (QWEN2_5, True),
        (QWEN3, True),
        (DEEPSEEK, True),
        (XML, True),
        (LLAMA, True),
        (NO_TOOLS, False),
        (PHI, False),
        (USER_ONLY, False),
        (HIDES_RESULT, False),
        (None, False),
    ],
)
def test_supports_tool_calling(template, expected):
    assert supports_tool_calling(tiny_tokenizer(chat_template=template)) is expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [(QWEN2_5, True), (HERMES_TEMPLATE, True), (HERMES, False), (DEEPSEEK, False), (None, False)],
)
def test_shows_tools(template, expected):
    assert shows_tools(tiny_tokenizer(chat_template=template)) is expected


@pytest.mark.parametrize(
    ("question", "content", "yes"),
    [
        ("m.content is none", None, True),
        ("m['content'] is none", "", False),
        ("m['content'] is not none", None, False),
        ("m.content is not none", "a", True),
    ],
)
def test_a_value_that_is_none_may_be_left_out(question, content, yes):
    """As transformers does from 5.23 on."""
    template = without_none(f"{{% if {question} %}}yes{{% else %}}no{{% endif %}}")
    given = {"content": content} if content is not None else {}
    for message in (given, {"content": content}):
        assert (Template(template).render(m=message) == "yes") is yes


class Processor:
    """A processor, as far as templates are concerned: a tokenizer inside, and messages in blocks."""

    def __init__(self, chat_template):
        self.tokenizer = tiny_tokenizer(chat_template=chat_template)

    def apply_chat_template(self, messages, **kwargs):
        assert all(not isinstance(message.get("content"), str) for message in messages)
        return self.tokenizer.apply_chat_template(messages, **kwargs)


def test_processors_are_given_blocks():
    processor = Processor(HERMES.replace("{{ m.content }}", "{% for b in m.content %}{{ b.text }}{% endfor %}"))
    assert supports_tool_calling(processor)
    assert add_response_schema(processor) is processor
    assert processor.tokenizer.response_template["start_anchor"] == ["<|im_start|>assistant\n"]


@pytest.mark.parametrize("template", [HERMES, HERMES_TEMPLATE, QWEN2_5, XML, LLAMA, NO_TOOLS])
def test_templates_that_need_no_repair(template):
    tokenizer = tiny_tokenizer(chat_template=template)
    assert is_chat_template_prefix_preserving(tokenizer)
    assert get_training_chat_template(tokenizer) is None


def test_qwen3_keeps_its_think_block_after_the_repair():
    tokenizer = tiny_tokenizer(chat_template=QWEN3)

    def render(messages, **kwargs):
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)

    before = render(CALLED)
    assert "<think>\n\n</think>" in before
    assert "<think>" not in render(RETURNED)  # the fault
    patched = get_training_chat_template(tokenizer)
    assert patched != QWEN3
    assert render(CALLED, chat_template=patched) == before
    after = render(RETURNED, add_generation_prompt=True, chat_template=patched)
    assert after == before + (
        "<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.chat_template == QWEN3


DEEPSEEK_CALL = (
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>multiply\n```json\n{"a": 2, "b": "x"}\n```<｜tool▁call▁end｜>'
)


def test_deepseek_is_replaced_by_a_template_that_closes_every_turn():
    tokenizer = deepseek_tokenizer()
    assert not is_chat_template_prefix_preserving(tokenizer)
    template = get_training_chat_template(tokenizer)
    assert shows_tools(tokenizer, template)
    two = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL, CALL]}
    messages = [*ASKED, two, *RETURNED[-1:] * 2, CALLED[-1], RETURNED[-1], {"role": "assistant", "content": "6."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template)
    output = "<｜tool▁output▁begin｜>6<｜tool▁output▁end｜>"
    assert text == (
        "<｜begin▁of▁sentence｜><｜User｜>What?<｜Assistant｜><think>\nHm.\n</think>\n\n"
        f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}\n{DEEPSEEK_CALL}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        f"<｜tool▁outputs▁begin｜>{output}\n{output}<｜tool▁outputs▁end｜>"
        f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        f"<｜tool▁outputs▁begin｜>{output}<｜tool▁outputs▁end｜>6.<｜end▁of▁sentence｜>"
    )


def test_deepseek_prompts_stay_as_they_are():
    tokenizer = deepseek_tokenizer()
    template = get_training_chat_template(tokenizer)
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
    for messages in (ASKED, [{"role": "system", "content": "Be brief."}, *ASKED], [*ASKED, thought, *ASKED]):
        theirs = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ours = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=template
        )
        assert ours == theirs
        assert ours.endswith("<｜Assistant｜><think>\n")


def test_an_edited_deepseek_template_is_not_replaced_by_one_with_other_prompts():
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template"):
        get_training_chat_template(deepseek_tokenizer(DEEPSEEK.replace("<｜User｜>", "<｜User｜>Please: ")))


def test_phi_loses_the_final_eos():
    tokenizer = tiny_tokenizer(chat_template=PHI)
    patched = get_training_chat_template(tokenizer)
    text = tokenizer.apply_chat_template(ASKED, tokenize=False, chat_template=patched)
    assert tokenizer.apply_chat_template(ASKED, tokenize=False) == text + "<eos>"
    assert is_chat_template_prefix_preserving(tokenizer, patched)


@pytest.mark.parametrize(
    "extra",
    [
        "{% if m.role == 'tool' and loop.index < 4 %}the first{% endif %}",
        "{% if m.role == 'tool' and loop.last %}the last{% endif %}",
        "{% if loop.index > 3 %}{{ raise_exception('too long') }}{% endif %}",
    ],
)
def test_the_second_round_must_be_like_the_first(extra):
    template = HERMES.replace("<|im_end|>", extra + "<|im_end|>")
    assert not is_chat_template_prefix_preserving(tiny_tokenizer(chat_template=template))


def test_unknown_fault_is_an_error():
    tokenizer = tiny_tokenizer(chat_template=REWRITES)
    assert not is_chat_template_prefix_preserving(tokenizer)
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template"):
        get_training_chat_template(tokenizer)


def test_our_hermes_template_describes_the_tools():
    tokenizer = byte_tokenizer(HERMES_TEMPLATE)
    tool = {"type": "function", "function": {"name": "multiply", "description": "né", "parameters": {}}}

    def render(messages, tools=None):
        return tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, add_generation_prompt=True)

    assert render(ASKED) == "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    system = {"role": "system", "content": "Be brief."}
    assert render([system, *ASKED]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + render(ASKED)
    described = render([system, *ASKED], [tool])
    assert described.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert '\n{"type": "function", "function": {"name": "multiply", "description": "né"' in described
    assert described.endswith("</tool_call><|im_end|>\n" + render(ASKED))


def test_our_deepseek_template_describes_the_tools():
    tokenizer = deepseek_tokenizer()
    tool = {"type": "function", "function": {"name": "multiply", "description": "né", "parameters": {}}}
    text = tokenizer.apply_chat_template(
        ASKED, tokenize=False, tools=[tool], chat_template=get_training_chat_template(tokenizer)
    )
    assert text.startswith("<｜begin▁of▁sentence｜># Tools\n\n")
    assert (
        ':\n{"type": "function", "function": {"name": "multiply", "description": "né", "parameters": {}}}\n\n' in text
    )
    assert text.endswith("\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜User｜>What?")


@pytest.mark.parametrize(("multiple", "size"), [(64, 128), (None, 104), (8, 104), (5, 105)])
def test_clone_chat_template(tmp_path, multiple, size):
    source = tiny_tokenizer(chat_template=HERMES, eos_token="<|im_end|>")
    source.add_tokens(["<|im_start|>", "<extra_id_0>"])
    source.save_pretrained(tmp_path)
    tokenizer, model = tiny_tokenizer(), tiny_model()
    assert len(tokenizer) == 101
    old = model.get_input_embeddings().weight.detach().clone()

    model, tokenizer, added = clone_chat_template(model, tokenizer, str(tmp_path), multiple)

    assert added == list(range(101, size))
    assert set(tokenizer.convert_ids_to_tokens(added[:3])) == {"<|im_end|>", "<|im_start|>", "<extra_id_0>"}
    assert all(token.startswith("<extra_id_") for token in tokenizer.convert_ids_to_tokens(added[3:]))
    assert len(tokenizer) == size == model.config.vocab_size == model.get_input_embeddings().weight.shape[0]
    assert model.get_input_embeddings().weight[:101].equal(old[:101])
    assert tokenizer.chat_template == HERMES
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id >= 101
