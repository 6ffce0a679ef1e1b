"""Small imitations of chat templates: each has only those features of its family that matter for tools."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
JSON_CALLS = (
    "{% for call in m.tool_calls %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
XML_CALLS = (
    "{% for call in m.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
# Consecutive results share one user turn.
SHARED_RESULTS = (
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
)

HERMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + JSON_CALLS
    + "<|im_end|>\n{% endfor %}"
    + PROMPT
)
# Tools are described in a system message, which is always present.
QWEN2_5 = (
    "<|im_start|>system\nHelp.{% if tools %} Tools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% for m in messages %}{% if m.role == 'tool' %}" + SHARED_RESULTS + "{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + JSON_CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)
# The last assistant message has a think block, possibly empty, that disappears once another message follows.
QWEN3 = (
    "{% for m in messages %}{% if m.role == 'tool' %}" + SHARED_RESULTS + "{% else %}<|im_start|>{{ m.role }}\n"
    "{%- set reasoning_content = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' %}"
    "{%- if loop.last or (not loop.last and reasoning_content) %}"
    "{{- '\n<think>\n' + reasoning_content + '\n</think>\n\n' }}{% else %}{{- '\n' }}{% endif %}"
    "{% else %}{{- '\n' }}{% endif %}"
    "{{ m.content }}" + JSON_CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)
# The generation prompt opens the think block.
XML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}"
    + XML_CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# One call per message, without its content; results are JSON under another role; texts are trimmed.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Arguments are text, and a call has no content. Only the first call of a conversation gets the opening token and only
# later ones the closing token; later results are not opened. Reasoning is removed, and there is no generation prompt
# after a result.
DEEPSEEK = (
    "{{ bos_token }}{% set ns = namespace(called=false, returned=false, in_tool=false) %}"
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.in_tool = false %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}{% set ns.in_tool = true %}"
    "{{ '\n' if ns.returned else '<｜tool▁outputs▁begin｜>' }}{% set ns.returned = true %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% elif m.role == 'assistant' and m.content is none %}{% set ns.in_tool = false %}{% for c in m.tool_calls %}"
    "{{ '\n' if ns.called else '<｜Assistant｜><｜tool▁calls▁begin｜>' }}"
    "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' }}"
    "{{ '' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
    "{% if ns.called %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% endif %}{% set ns.called = true %}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ '<｜tool▁outputs▁end｜>' if ns.in_tool else '<｜Assistant｜>' }}"
    "{% set ns.in_tool = false %}{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if ns.in_tool %}<｜tool▁outputs▁end｜>{% elif add_generation_prompt %}"
    "{{ '<｜Assistant｜><think>\n' }}{% endif %}"
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

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁outputs▁end｜>",
]


@cache
def _backend() -> str:
    """A byte-level BPE with a few hundred merges, so that neighbours, such as newlines and brackets, may be merged."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    text = '{"name": "add", "arguments": {"a": 1}}}\n</tool_call>\n\n<tool_response>\nuser\nassistant\n\n"}}\n\n\n'
    backend.train_from_iterator([QWEN2_5, LLAMA, DEEPSEEK, XML, text * 20], trainer)
    return backend.to_str()


def byte_tokenizer(chat_template: str, eos_token: str = "<|im_end|>", **kwargs: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows the special tokens of all families."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        chat_template=chat_template,
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL if token not in ("<|endoftext|>", eos_token)],
        **kwargs,
    )


def deepseek_tokenizer(chat_template: str = DEEPSEEK) -> PreTrainedTokenizerFast:
    return byte_tokenizer(chat_template, "<｜end▁of▁sentence｜>", bos_token="<｜begin▁of▁sentence｜>")
