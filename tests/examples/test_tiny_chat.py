"""The format of the examples: what the chat template writes, the response template reads back."""

import pytest
import torch
from tiny_chat import answers, calls, imitate, load, says, user

from gruppo.data.responses import parse_response
from gruppo.data.templates import is_chat_template_prefix_preserving, supports_tool_calling


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one number
        b: another
    """
    return a + b


def test_a_conversation_as_text() -> None:
    _, tokenizer = load()
    conversation = [user("How many?"), calls("add", a=1, b=22), answers(23), says("A: 23")]
    text = tokenizer.apply_chat_template(conversation, tools=[add], tokenize=False)
    assert text == "[add a b]\nQ: How many?\n[add a=1 b=22]<eos>\n= 23\nA: 23<eos>\n"
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("A: 23<eos>", "A: 23", None),
        ("[add a=1 b=22]<eos>", "", {"a": 1, "b": 22}),
        ("[add a=1 b=22<eos>", "", {"a": 1, "b": 22}),  # the bracket was forgotten
        ("[add a=x]<eos>", "", {"a": "x"}),
        ("[add ]<eos>", "", {}),
        ("[add<eos>", "[add", None),
    ],
)
def test_what_the_model_writes_is_read_back(text: str, content: str, arguments: dict[str, object] | None) -> None:
    _, tokenizer = load()
    prompt = tokenizer("[add a b]\nQ: How many?\n")["input_ids"]
    message = parse_response(tokenizer, tokenizer(text)["input_ids"], prompt, [add])
    assert message["content"] == content
    asked = [call["function"] for call in message.get("tool_calls", [])]
    assert asked == ([] if arguments is None else [{"name": "add", "arguments": arguments}])


def test_the_warm_up_looks_at_the_assistants_part_only() -> None:
    model, tokenizer = load()
    seen: list[dict[str, torch.Tensor]] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    weight = model.lm_head.weight.detach().clone()
    short, long = [user("4"), says("A: 4")], [user("37"), calls("add", a=1, b=2), answers(3), says("A: 3")]
    imitate(model, tokenizer, [short, long], [add], steps=2, batch_size=2)
    assert len(seen) == 2
    learned = {tokenizer.decode(row[row != -100]) for row in seen[0]["labels"]}
    assert learned == {"A: 4<eos>", "[add a=1 b=2]<eos>A: 3<eos>"}
    assert not torch.equal(weight, model.lm_head.weight)
