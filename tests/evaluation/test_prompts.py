"""Prompts: their literal text, their tokens, and the solved problems in front of them."""

import ast
import gzip
import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation import prompts
from gruppo.evaluation.benchmarks import BENCHMARKS
from gruppo.evaluation.prompts import choose_rendering, cut, load_exemplars, render
from gruppo.evaluation.types import Benchmark, FewShot, Problem
from gruppo.grading import LADDERS, Rule, grade
from gruppo.sandbox import Sandbox
from tests.helpers import tiny_tokenizer

REAL = Path(__file__).parents[3] / "shared" / "data"
EXEMPLARS = Path(prompts.__file__).parent / "exemplars"
CHAT = tiny_tokenizer()
BASE = tiny_tokenizer(chat_template=None)
PROBLEM = Problem("a", "3 + 4 = ?", ("7",))

# Written out once more, from the protocol.
COT_EN = r"Please reason step by step, and put your final answer within \boxed{}."
COT_ZH = r"请通过逐步推理来解答问题，并把最终答案放置于\boxed{}中。"
TIR_EN = (
    "Please integrate natural language reasoning with programs to solve the problem above, "
    r"and put your final answer within \boxed{}."
)
TIR_ZH = r"请结合自然语言和Python程序语言来解答问题，并把最终答案放置于\boxed{}中。"
INSTRUCTIONS = [
    *(("gsm8k", "cot", COT_EN), ("math", "cot", COT_EN), ("math500", "cot", COT_EN)),
    *(("mgsm_zh", "cot", COT_ZH), ("cmath", "cot", COT_ZH)),
    *(("gsm8k", "tir", TIR_EN), ("math", "tir", TIR_EN), ("mgsm_zh", "tir", TIR_ZH), ("cmath", "tir", TIR_ZH)),
]


def rendered(name: str = "gsm8k", mode: str = "cot", tokenizer: Any = BASE, **settings: Any) -> prompts.PromptText:
    settings = {"rendering": "plain", "shots": 0, **settings}
    return render(settings.pop("problem", PROBLEM), BENCHMARKS[name], mode, tokenizer=tokenizer, **settings)  # type: ignore[arg-type]


def with_bos() -> Any:
    """A tokenizer that puts a token in front of every text."""
    tokenizer = tiny_tokenizer(
        chat_template="<system>{% for m in messages %}{{ m['content'] }}{% endfor %}<assistant>"
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<system> $A", special_tokens=[("<system>", 4)])
    return tokenizer


# ---- zero-shot


@pytest.mark.parametrize(("name", "mode", "instruction"), INSTRUCTIONS)
def test_the_literal_prompt(name: str, mode: str, instruction: str) -> None:
    prompt = rendered(name, mode)
    assert prompt.text == f"User: 3 + 4 = ?\n{instruction}\n\nAssistant:"
    assert prompt.ids == BASE(prompt.text)["input_ids"]
    assert prompt.stop == ()


@pytest.mark.parametrize(("name", "mode", "instruction"), INSTRUCTIONS)
def test_the_prompt_of_a_chat_model(name: str, mode: str, instruction: str) -> None:
    prompt = rendered(name, mode, CHAT, rendering="chat")
    assert prompt.text == f"<user>3 + 4 = ?\n{instruction}<eos><assistant>"
    assert prompt.ids == CHAT(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.stop == ()


def test_special_tokens_come_once() -> None:
    tokenizer = with_bos()
    bos = tokenizer.convert_tokens_to_ids("<system>")
    for settings in ({"rendering": "plain"}, {"rendering": "chat"}, {"rendering": "plain", "shots": 2}):
        ids = rendered(tokenizer=tokenizer, **settings).ids
        assert ids[0] == bos, settings
        assert ids.count(bos) == 1, settings


@given(question=st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
@pytest.mark.parametrize("extra", ["", "{}", "{question} {0} {{", "%s \\boxed{}"])
def test_a_question_stands_there_as_it_is(extra: str, question: str) -> None:
    problem = Problem("a", extra + question, ("7",))
    assert rendered(problem=problem).text == f"User: {extra}{question}\n{COT_EN}\n\nAssistant:"
    assert rendered(problem=problem, shots=1).text.endswith(f"\n\n\nQ: {extra}{question}\nA:")


@pytest.mark.parametrize(
    ("requested", "tokenizer", "shots", "chosen"),
    [
        ("auto", CHAT, 0, "chat"),
        ("auto", BASE, 0, "plain"),
        ("auto", CHAT, 8, "plain"),
        ("plain", CHAT, 0, "plain"),
        ("plain", BASE, 8, "plain"),
        ("chat", CHAT, 0, "chat"),
    ],
)
def test_the_rendering_is_chosen_by_the_tokenizer(requested: Any, tokenizer: Any, shots: int, chosen: str) -> None:
    assert choose_rendering(requested, tokenizer, shots=shots) == chosen


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_rendering("chat", BASE), "the tokenizer has no chat template"),
        (lambda: choose_rendering("chat", CHAT, shots=8), "cannot be combined with shots=8"),
        (lambda: choose_rendering("prose", CHAT), "rendering='prose' must be one of auto, chat, plain"),  # type: ignore[arg-type]
        (lambda: rendered(rendering="chat"), "the tokenizer has no chat template"),
        (lambda: rendered(rendering="chat", shots=1, tokenizer=CHAT), "cannot be combined with shots=1"),
        (lambda: rendered(rendering="auto"), "rendering='auto' must be one of chat, plain"),
        (lambda: rendered(mode="pot"), "mode='pot' must be one of cot, tir"),
        (lambda: rendered(shots=9), "shots=9: gsm8k has 8 solved problems"),
        (lambda: rendered("math", shots=5), "shots=5: math has 4 solved problems"),
        (lambda: rendered(shots=-1), "shots=-1: gsm8k has 8"),
    ],
)
def test_what_cannot_be_rendered(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


# ---- few-shot


def test_the_layout_of_gsm8k() -> None:
    first, second, *_ = load_exemplars("gsm8k.jsonl")
    prompt = rendered(shots=2)
    assert prompt.text == (
        f"Q: {first.question}\nA: {first.cot}\n\n\nQ: {second.question}\nA: {second.cot}\n\n\nQ: 3 + 4 = ?\nA:"
    )
    assert prompt.stop == ("\nQ:",)
    assert prompt.ids == BASE(prompt.text)["input_ids"]
    assert first.cot.endswith("The answer is 48.")


@pytest.mark.parametrize("name", ["math", "math500"])
def test_the_layout_of_math(name: str) -> None:
    first = load_exemplars("math.jsonl")[0]
    prompt = rendered(name, shots=1)
    assert prompt.text == f"Problem:\n{first.question}\n\nSolution:\n{first.cot}\n\nProblem:\n3 + 4 = ?\n\nSolution:"
    assert prompt.stop == ("\nProblem:",)
    assert first.cot.endswith("\\boxed{3}$.\nFinal Answer: The final answer is $3$. I hope it is correct.")


@pytest.mark.parametrize(("name", "file"), [("cmath", "cmath.jsonl"), ("mgsm_zh", "mgsm_zh.jsonl")])
def test_the_layout_of_the_chinese_sets(name: str, file: str) -> None:
    first = load_exemplars(file)[0]
    prompt = rendered(name, shots=1)
    assert prompt.text == f"问题：{first.question}\n答案：{first.cot}\n\n\n问题：3 + 4 = ?\n答案："
    assert prompt.stop == ("\n问题：",)


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("mode", ["cot", "tir"])
def test_all_shots_and_no_instruction(name: str, mode: str) -> None:
    few_shot = BENCHMARKS[name].few_shot
    assert few_shot is not None
    exemplars = load_exemplars(few_shot.file)
    assert len(exemplars) == few_shot.shots
    text = rendered(name, mode, shots=few_shot.shots).text
    assert [text.count(each.tir if mode == "tir" else each.cot) for each in exemplars] == [1] * few_shot.shots
    assert text.count("```output") == (few_shot.shots if mode == "tir" else 0)
    assert not any(instruction in text for _, _, instruction in INSTRUCTIONS)
    # A completion in the style of the exemplars is not cut short by a stop string.
    assert [each.cot for each in exemplars] == [cut(each.cot, few_shot.stop) for each in exemplars]
    assert [each.tir for each in exemplars] == [cut(each.tir, few_shot.stop) for each in exemplars]
    assert text.count(few_shot.stop[0].strip()) == few_shot.shots + 1


def own(**layout: Any) -> Benchmark:
    settings = dict(file="gsm8k.jsonl", shots=1, question="Q: {}", answer="A: {}", separator="\n", stop=("\nQ:",))
    return Benchmark("own", "Own", "own.jsonl", LADDERS["gsm8k"], few_shot=FewShot(**(settings | layout)))


@pytest.mark.parametrize(
    ("benchmark", "message"),
    [
        (replace(own(), few_shot=None), "own has no few-shot prompt; use shots=0"),
        (own(question="Q:"), "must hold one {} each"),
        (own(answer="A: {} {}"), "must hold one {} each"),
        (own(stop="\nQ:"), "must be a tuple of strings"),
        (own(stop=("",)), "none of them empty"),
        (own(shots=9), r"own: FewShot\(shots=9\) is more than the 8 solved problems in gsm8k.jsonl"),
        (own(file="nowhere.jsonl"), "no such file, and the library has cmath.jsonl, gsm8k.jsonl"),
    ],
)
def test_a_layout_of_your_own_that_cannot_work(benchmark: Benchmark, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(PROBLEM, benchmark, "cot", rendering="plain", shots=1, tokenizer=BASE)


def test_no_more_shots_than_the_layout_says() -> None:
    asked = dict(rendering="plain", tokenizer=BASE)
    assert render(PROBLEM, own(shots=2), "cot", shots=2, **asked).text.count("Q: ") == 3
    with pytest.raises(ConfigError, match=r"shots=3: own has 2 solved problems to show .*gsm8k.jsonl holds 8"):
        render(PROBLEM, own(shots=2), "cot", shots=3, **asked)


def test_stop_strings_may_be_a_list() -> None:
    assert render(PROBLEM, own(stop=["Q"]), "cot", rendering="plain", shots=1, tokenizer=BASE).stop == ("Q",)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"question": "q", "cot": "c"}', '{"question": "q", "cot": "c", "tir": 1}']
)
def test_a_file_of_your_own_that_is_wrong(tmp_path: Path, line: str) -> None:
    path = tmp_path / "solved.jsonl"
    path.write_text(f'{{"question": "q", "cot": "c", "tir": "t"}}\n\n{line}\n')
    with pytest.raises(DataError, match=r"solved\.jsonl:3: "):
        load_exemplars(str(path))


# ---- the exemplars


def exemplar_rows() -> list[Any]:
    return [
        pytest.param(path.stem, json.loads(line), id=f"{path.stem}-{i}")
        for path in sorted(EXEMPLARS.glob("*.jsonl"))
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines())
    ]


@pytest.mark.parametrize(("name", "row"), exemplar_rows())
def test_every_exemplar_is_graded_as_right(name: str, row: dict[str, str]) -> None:
    assert set(row) == {"question", "answer", "cot", "tir"}
    for text in (row["cot"], row["tir"]):
        result = grade(text, row["answer"], name)
        assert result.correct, result
        assert result.rule is (Rule.BOX if name == "math" else Rule.SENTENCE)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(allow_unconfined=Sandbox.capabilities().missing)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "row"), exemplar_rows())
def test_every_program_prints_what_the_exemplar_says(name: str, row: dict[str, str], sandbox: Sandbox) -> None:
    parts = re.fullmatch(r"(.+)\n```python\n(.+)\n```\n```output\n(.+)\n```\n(.+)", row["tir"], re.DOTALL)
    assert parts is not None
    execution = sandbox.run(parts[2])
    assert execution.stdout == f"{parts[3]}\n", execution


@pytest.mark.parametrize(("name", "row"), [row for row in exemplar_rows() if row.values[0] != "math"])
def test_the_arithmetic_of_the_exemplars(name: str, row: dict[str, str]) -> None:
    steps = re.findall(r"([0-9(][-0-9+*/(). ]*) = ([0-9.]+)", row["cot"])
    assert steps
    for left, right in steps:
        # Decimals as fractions: 9.5 / 0.38 is 25 exactly.
        tree = ast.parse(re.sub(r"[0-9.]+", lambda found: f"F('{found[0]}')", left), mode="eval")
        assert eval(compile(tree, "step", "eval"), {"F": Fraction}) == Fraction(right.rstrip(".")), (left, right)
    assert steps[-1][1].rstrip(".") == row["answer"]


def test_the_chinese_exemplars_translate_the_english_ones() -> None:
    english, chinese = (
        [json.loads(line) for line in (EXEMPLARS / file).read_text(encoding="utf-8").splitlines()]
        for file in ("gsm8k.jsonl", "mgsm_zh.jsonl")
    )
    assert [row["answer"] for row in english] == [row["answer"] for row in chinese]
    program = re.compile(r"```python.*?```\n```output.*?```", re.DOTALL)
    assert [program.findall(row["tir"]) for row in english] == [program.findall(row["tir"]) for row in chinese]


def plain(text: str) -> str:
    return "".join(character for character in text.lower() if character.isalnum())


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the benchmark sets are not at {REAL}")
def test_no_exemplar_is_in_a_benchmark() -> None:
    asked = set()
    for path in REAL.rglob("*.jsonl*"):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        asked |= {plain(json.loads(line)["question"]) for line in raw.decode().split("\n") if line}
    assert len(asked) > 10_000
    ours = {plain(each.question) for path in EXEMPLARS.glob("*.jsonl") for each in load_exemplars(path.name)}
    assert len(ours) == 26
    assert ours & asked == set()


# ---- cutting


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("9.\n\n\nQ: next", ("\nQ:",), "9.\n\n"),
        ("9. Q: not at a line's start", ("\nQ:",), "9. Q: not at a line's start"),
        ("所以答案是：9。\n问题：再来", ("\n问题：",), "所以答案是：9。"),
        ("abc", (), "abc"),
        ("abcb", ("c", "b"), "a"),
        ("", ("x",), ""),
        ("xa", ("x",), ""),
    ],
)
def test_a_completion_ends_before_the_first_stop_string(text: str, stop: tuple[str, ...], kept: str) -> None:
    assert cut(text, stop) == kept


@given(text=st.text("ab\n", max_size=20), stop=st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_cutting_against_a_slow_search(text: str, stop: list[str]) -> None:
    kept = next((text[:i] for i in range(len(text)) if any(text[i:].startswith(mark) for mark in stop)), text)
    assert cut(text, stop) == kept


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="an empty stop string"):
        cut("abc", ("b", ""))
