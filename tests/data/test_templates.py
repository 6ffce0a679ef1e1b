"""Templates are small imitations of the known families; what counts is how they frame turns, calls and results."""

import pytest

from gruppo.data.templates import (
    add_response_schema,
    clone_chat_template,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)
from gruppo.errors import ConfigError
from tests.helpers import tiny_model, tiny_tokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
JSON_CALLS = (
    "{% for call in m.tool_calls %}{% if not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
XML_CALLS = (
    "{% for call in m.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + JSON_CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT
)
# A think block in the last assistant message, even an empty one, that disappears once a message follows.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- set reasoning_content = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' %}"
    "{%- if loop.last or (not loop.last and reasoning_content) %}"
    "{{- '\n<think>\n' + reasoning_content + '\n</think>\n\n' }}{% else %}{{- '\n' }}{% endif %}"
    "{% else %}{{- '\n' }}{% endif %}"
    "{{ m.content }}" + JSON_CALLS + "<|im_end|>\n{% endfor %}" + PROMPT
)
XML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + XML_CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
NO_TOOLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
USER_ONLY = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
HIDES_RESULT = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}" + JSON_CALLS + "{% endif %}{% endfor %}"
)
REWRITES = "{{ messages | length }}" + HERMES

CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": "x"}}}
ASKED = [{"role": "user", "content": "What?"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
RETURNED = [*CALLED, {"role": "tool", "name": "multiply", "content": "6"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, True),
        (QWEN3, True),
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
    assert processor.tokenizer.response_template["start_anchor"] == "<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [HERMES, XML, LLAMA, NO_TOOLS])
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
    assert after == before + "<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_template == QWEN3


def test_phi_loses_the_final_eos():
    tokenizer = tiny_tokenizer(chat_template=PHI)
    patched = get_training_chat_template(tokenizer)
    text = tokenizer.apply_chat_template(ASKED, tokenize=False, chat_template=patched)
    assert tokenizer.apply_chat_template(ASKED, tokenize=False) == text + "<eos>"
    assert is_chat_template_prefix_preserving(tokenizer, patched)


def test_unknown_fault_is_an_error():
    tokenizer = tiny_tokenizer(chat_template=REWRITES)
    assert not is_chat_template_prefix_preserving(tokenizer)
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template"):
        get_training_chat_template(tokenizer)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": "x"}}\n</tool_call>'
XML_MULTIPLY = (
    "<tool_call>\n<function=multiply>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA_MULTIPLY = '{"name": "multiply", "parameters": {"a": 2, "b": {"c": "}"}}}'


@pytest.mark.parametrize(
    ("template", "prefix", "response", "message"),
    [
        (HERMES, "", "Hello<|im_end|>", {"content": "Hello"}),
        (HERMES, "", "Hello", {"content": "Hello"}),
        (HERMES, "", "Hello<|im_end|>\n<eos>junk", {"content": "Hello"}),
        (HERMES, "", MULTIPLY + "<|im_end|>", {"tool_calls": [call("multiply", a=2, b="x")]}),
        (
            HERMES,
            "",
            f"First.\n{MULTIPLY}\n{MULTIPLY}\nThen.<|im_end|>\n",
            {"content": "First.\nThen.", "tool_calls": [call("multiply", a=2, b="x")] * 2},
        ),
        (
            QWEN3,
            "",
            f"<think>\nHm.\n</think>\n\n{MULTIPLY}<|im_end|>",
            {"reasoning_content": "Hm.", "tool_calls": [call("multiply", a=2, b="x")]},
        ),
        (QWEN3, "", "<think>\nHm", {"reasoning_content": "Hm"}),
        (XML, "<think>\n", "Hm.\n</think>\n\nYes.<|im_end|>", {"reasoning_content": "Hm.", "content": "Yes."}),
        (XML, "<think>\n\n</think>\n\n", XML_MULTIPLY, {"tool_calls": [call("multiply", a="2", b="x\ny")]}),
        (LLAMA, "", "Hello {} there<|eot_id|>", {"content": "Hello {} there"}),
        (LLAMA, "", LLAMA_MULTIPLY + "<|eot_id|>", {"tool_calls": [call("multiply", a=2, b={"c": "}"})]}),
        (LLAMA, "", LLAMA_MULTIPLY, {"tool_calls": [call("multiply", a=2, b={"c": "}"})]}),
        (
            LLAMA,
            "",
            f"<|python_tag|>{LLAMA_MULTIPLY}<|eom_id|>",
            {"tool_calls": [call("multiply", a=2, b={"c": "}"})]},
        ),
    ],
)
def test_responses_are_parsed(template, prefix, response, message):
    tokenizer = tiny_tokenizer(chat_template=template)
    assert add_response_schema(tokenizer) is tokenizer
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    prompt = prompt.partition("<think>")[0] + prefix
    assert tokenizer.parse_response(response, prefix=prompt) == {"role": "assistant", **message}


def test_tags_are_cast_by_the_tool_schema():
    tokenizer = add_response_schema(tiny_tokenizer(chat_template=XML))
    tool = {"name": "multiply", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
    message = tokenizer.parse_response(XML_MULTIPLY, prefix="", tools=[{"type": "function", "function": tool}])
    assert message["tool_calls"] == [call("multiply", a=2, b="x\ny")]


@pytest.mark.parametrize("template", [HERMES, LLAMA])
def test_a_broken_call_is_a_value_error(template):
    tokenizer = add_response_schema(tiny_tokenizer(chat_template=template))
    broken = (MULTIPLY if template is HERMES else LLAMA_MULTIPLY)[:-20]
    with pytest.raises(ValueError, match="JSON"):
        tokenizer.parse_response(broken, prefix="")


@pytest.mark.parametrize("template", [NO_TOOLS, PHI, USER_ONLY, None])
def test_unknown_tool_style_is_an_error(template):
    tokenizer = tiny_tokenizer(chat_template=template)
    with pytest.raises(ConfigError, match="response_template"):
        add_response_schema(tokenizer)
    assert tokenizer.response_template is None


def test_own_response_template_is_kept():
    tokenizer = tiny_tokenizer(chat_template=HERMES)
    tokenizer.response_template = {"mine": True}
    assert add_response_schema(tokenizer).response_template == {"mine": True}


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
