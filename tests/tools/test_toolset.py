import asyncio
import time
from typing import Any

import pytest

from gruppo.data.prompts import PromptEncoder
from gruppo.errors import ConfigError, DataError
from gruppo.tools.calls import answer, read_call
from gruppo.tools.toolset import Toolset
from tests.tools.scripted import tool_tokenizer
from tests.tools.test_environments import ROW, Counter, Quiet
from tests.tools.test_functions import add, fetch


def names(schemas: Any) -> list[str]:
    return [schema["function"]["name"] for schema in schemas]


def test_functions_alone() -> None:
    toolset = Toolset([add, fetch], None)
    assert toolset.functions == [add, fetch]
    assert names(toolset.schemas) == ["add", "fetch"]
    started = toolset.start([ROW, ROW], "train")
    assert started.rows == [ROW, ROW]
    assert started.extra(0) == {}
    assert [list(tools) for tools in started.tools] == [["add", "fetch"]] * 2


def test_each_row_calls_its_own_environment() -> None:
    toolset = Toolset([add], Counter)
    started = toolset.start([ROW, ROW], "train")
    first, second = started.tools
    first["increment"].function(by=2)
    assert (first["increment"].function(by=1), second["increment"].function(by=1)) == (3, 1)
    assert first["add"].function(a=1) == 3
    assert started.extra(1) == {"environments": started.environments[1]}
    assert started.rows[0]["prompt"] == [{"role": "user", "content": "Count. Up to 3."}]
    assert started.rows[0] is started.rows[1], "one prompt, to be rendered and read once"
    assert ROW["prompt"][0]["content"] == "Count. "


def test_rows_of_several_environments_show_their_own_tools() -> None:
    toolset = Toolset([add], {"count": Counter, "quiet": Quiet})
    assert {name: names(schemas) for name, schemas in toolset.schemas.items()} == {
        "count": ["add", "double", "increment", "inherited"],
        "quiet": ["add"],
    }
    encoder = PromptEncoder(tool_tokenizer(), tools=toolset.schemas)
    rows = [{**ROW, "environment": name} for name in ("quiet", "count", "quiet")]
    texts = [tool_tokenizer().decode(prompt.ids) for prompt in encoder(rows)]
    shown = [text.split("<eos>")[0] for text in texts]
    assert shown == ["<system>[add]", "<system>[add][double][increment][inherited]", "<system>[add]"]


def test_a_training_template_takes_the_place_of_the_tokenizers_own() -> None:
    encoder = PromptEncoder(tool_tokenizer(), chat_template="<user>{{ messages[0].content }}<eos>", tools=[])
    (prompt,) = encoder([{"prompt": [{"role": "user", "content": "q"}]}])
    assert tool_tokenizer().decode(prompt.ids) == "<user>q<eos>"


def increment(by: int) -> int:
    """Count on.

    Args:
        by: how far
    """
    return by


def test_names_must_be_told_apart() -> None:
    with pytest.raises(ConfigError, match="`increment` is a tool and a method of the environment Counter"):
        Toolset([increment], Counter)


def test_plain_prompts_have_no_place_for_tools() -> None:
    with pytest.raises(DataError, match=r"conversations.*'2\+2='"):
        Toolset([add], None).start([{"prompt": "2+2="}], "train")


class Slow(Counter):
    async def wait(self) -> None:
        """Wait."""
        await asyncio.sleep(60)

    def sleep(self) -> None:
        """Sleep."""
        time.sleep(5)


async def pause() -> None:
    """Pause."""
    await asyncio.sleep(60)


def requested(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "arguments": {"by": 1} if name == "increment" else {}}}


@pytest.mark.parametrize("slow", ["wait", "sleep"])
def test_only_the_environment_of_an_overrun_call_is_given_up(slow: str) -> None:
    toolset = Toolset([pause], Slow, timeout=0.2)
    started = toolset.start([ROW, ROW], "train")
    first, second = started.environments

    def run(*names: list[str]) -> list[list[str]]:
        calls = [[read_call(requested(n), started.tools[row]) for n in sample] for row, sample in enumerate(names)]
        pairs = zip(calls, toolset.executor.run(calls), strict=True)
        return [[answer(*made)["content"] for made in zip(*pair, strict=True)] for pair in pairs]

    run(["pause", "increment"], [slow])
    start = time.perf_counter()
    fine, refused = run(["increment"], ["increment", "wait", "sleep"])
    assert time.perf_counter() - start < 4
    assert fine == ["2"]
    assert all("was not called: an earlier call took too long" in told for told in refused)
    assert second.count == 0
    again = toolset.start([ROW, ROW], "train").environments
    assert again[0] is first
    assert again[1] is not second


def test_calls_after_one_that_overran_are_refused_in_the_same_turn() -> None:
    toolset = Toolset(None, Slow, timeout=0.2)
    started = toolset.start([ROW], "train")
    calls = [read_call(requested(name), started.tools[0]) for name in ("sleep", "increment")]
    ((_, second),) = toolset.executor.run([calls])
    assert "increment was not called" in str(second.error)
    assert started.environments[0].count == 0
