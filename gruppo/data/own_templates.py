"""Chat templates that the library provides, in Jinja.

They replace a model's own template where that does not support training with tools. None of them is a copy of a
model's template, but they render the same turns with the same tokens.
"""

import json

# ChatML with tools in the style of Hermes: for models whose template has `<|im_start|>` turns but no tools, such as
# SmolLM2-Instruct. Each turn is rendered independently, so a conversation keeps its tokens when messages are added.
HERMES_TEMPLATE = """
{%- macro described(tools) %}
    {{- '# Tools\\n\\nYou can call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nTo call a function, write its name and arguments as JSON between tags, ' }}
    {{- 'one pair of tags for each call:\\n<tool_call>\\n' }}
    {{- '{"name": "name of the function", "arguments": {"name of an argument": "its value"}}\\n</tool_call>' }}
{%- endmacro %}
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system\\n' + system }}
    {{- '\\n\\n' if system and tools else '' }}
    {{- described(tools) if tools else '' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user\\n' }}
        {%- else %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".strip()

_DEEPSEEK = """
{%- macro described(tools) %}
    {{- '# Tools\\n\\nYou can call these functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '\\n\\nTo call a function, write:\\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' }}
    {{- 'name of the function\\n```json\\n{"name of an argument": "its value"}\\n```' }}
    {{- '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}
{%- endmacro %}
{%- set scan = namespace(system='', last_question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set scan.system = scan.system + ('\\n\\n' if scan.system else '') + message.content %}
    {%- elif message.role == 'user' %}
        {%- set scan.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{{- bos_token + scan.system }}
{{- '\\n\\n' if scan.system and tools else '' }}
{{- described(tools) if tools else '' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- '\\n' if loop.previtem and loop.previtem.role == 'tool' else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- elif message.role == 'assistant' %}
        {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<｜Assistant｜>' }}
        {%- set content = message.content or '' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {%- if thought and loop.index0 > scan.last_question %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
            {%- set content = content.lstrip('\\n') %}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {%- set arguments = call.function.arguments %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '\\n```<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
    {{- GENERATION_PROMPT }}
{%- endif %}
""".strip()


def deepseek_template(generation_prompt: str) -> str:
    """A template for DeepSeek-V3, R1 and the distilled models, whose own template fails in the second round of calls.

    Reasoning after the last question is kept (earlier reasoning is left out, as in the original), every turn is
    closed, and `tools` are described, which the original leaves to the user.
    """
    return _DEEPSEEK.replace("GENERATION_PROMPT", json.dumps(generation_prompt, ensure_ascii=False))
