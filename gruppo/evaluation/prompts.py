"""Render a problem as a prompt: with an instruction, for chat models, or after solved problems, for base models.

    render            the prompt as text and as token ids, and its stop strings
    choose_rendering  chat or plain, for a tokenizer
    cut               a completion up to the first stop string

The instructions are those of the DeepSeekMath paper, word for word: models were trained on them.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from gruppo.errors import ConfigError, DataError
from gruppo.evaluation.types import Benchmark, Exemplar, FewShot, Language, Mode, Problem, Rendering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["INSTRUCTIONS", "PromptText", "choose_rendering", "cut", "load_exemplars", "render"]

# The text after a question, starting with a line break.
INSTRUCTIONS: Mapping[tuple[Mode, Language], str] = MappingProxyType(
    {
        ("cot", "en"): "\nPlease reason step by step, and put your final answer within \\boxed{}.",
        ("cot", "zh"): "\n请通过逐步推理来解答问题，并把最终答案放置于\\boxed{}中。",
        ("tir", "en"): (
            "\nPlease integrate natural language reasoning with programs to solve the problem above, "
            "and put your final answer within \\boxed{}."
        ),
        ("tir", "zh"): "\n请结合自然语言和Python程序语言来解答问题，并把最终答案放置于\\boxed{}中。",
    }
)

HOLE = "{}"


@dataclass(frozen=True)
class PromptText:
    """A prompt, ready to be continued.

    Example:
        PromptText(text="User: 3 + 4 = ?\\n…\\n\\nAssistant:", ids=[1, 5726, …], stop=())
    """

    text: str
    ids: list[int]
    stop: tuple[str, ...]  # a completion is cut before the first of these strings; empty: not cut


def choose_rendering(
    requested: Rendering | Literal["auto"], tokenizer: "PreTrainedTokenizerBase", *, shots: int = 0
) -> Rendering:
    """Choose how prompts are written: as requested or, for "auto", as a chat if the tokenizer has a chat template.

    Few-shot prompts (`shots` above 0) are texts to be continued and always plain.

    Example:
        choose_rendering("auto", tokenizer)           # "chat" for an instruct model
        choose_rendering("auto", tokenizer, shots=8)  # "plain"
    """
    if requested not in ("auto", *get_args(Rendering)):
        raise ConfigError(f"rendering={requested!r} must be one of auto, {', '.join(get_args(Rendering))}.")
    if requested == "chat":
        _require_chat(tokenizer, shots)
        return "chat"
    return "chat" if requested == "auto" and tokenizer.chat_template and not shots else "plain"


def render(
    problem: Problem,
    benchmark: Benchmark,
    mode: Mode,
    *,
    rendering: Rendering,
    shots: int,
    tokenizer: "PreTrainedTokenizerBase",
) -> PromptText:
    """The prompt of a problem.

    Without shots, the prompt is a user turn: the question, then the instruction of the mode in the benchmark's
    language. With shots, the question follows that many solved problems, without an instruction.

    Example:
        render(Problem("a", "3 + 4 = ?", ("7",)), GSM8K, "cot", rendering="plain", shots=0, tokenizer=tokenizer).text
        # "User: 3 + 4 = ?\\nPlease reason step by step, and put your final answer within \\\\boxed{}.\\n\\nAssistant:"
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}.")
    if rendering not in get_args(Rendering):
        raise ConfigError(f"rendering={rendering!r} must be one of {', '.join(get_args(Rendering))}.")
    if rendering == "chat":
        _require_chat(tokenizer, shots)
    if shots:
        few_shot = _layout(benchmark)
        text = _few_shot_text(problem, benchmark.name, few_shot, mode, shots)
        return PromptText(text, _token_ids(text, tokenizer), tuple(few_shot.stop))
    question = problem.question + INSTRUCTIONS[mode, benchmark.language]
    if rendering == "plain":
        text = f"User: {question}\n\nAssistant:"
        return PromptText(text, _token_ids(text, tokenizer), ())
    messages = [{"role": "user", "content": question}]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return PromptText(text, _token_ids(messages, tokenizer), ())


def cut(text: str, stop: Sequence[str]) -> str:
    """A completion up to the first stop string.

    Example:
        cut("9. The answer is 9.\\n\\nQ: And", ["\\nQ:"]) == "9. The answer is 9.\\n"
    """
    if "" in stop:
        raise ConfigError(f"stop={list(stop)!r}: an empty stop string would end every completion at once.")
    return text[: min((at for mark in stop if (at := text.find(mark)) >= 0), default=len(text))]


def _token_ids(prompt: str | list[dict[str, str]], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokenize as in training: the tokenizer adds special tokens to a text; the template adds those of a chat.

    Some tokenizers append EOS to every text. It is removed here, because the model has to continue the prompt.
    """
    from gruppo.data.prompts import PromptEncoder  # imports transformers, which takes seconds

    ids: list[int] = PromptEncoder(tokenizer).token_ids([prompt])[0]
    return ids[:-1] if isinstance(prompt, str) and ids and ids[-1] == tokenizer.eos_token_id else ids


def _require_chat(tokenizer: "PreTrainedTokenizerBase", shots: int) -> None:
    if shots:
        raise ConfigError(
            f'rendering="chat" cannot be combined with shots={shots}: few-shot prompts are plain text for a '
            'base model to continue. Use rendering="plain" or "auto", or shots=0.'
        )
    if not tokenizer.chat_template:
        raise ConfigError('rendering="chat": the tokenizer has no chat template. Use rendering="plain" or "auto".')


# ---- solved problems


@functools.lru_cache(maxsize=32)
def load_exemplars(file: str) -> tuple[Exemplar, ...]:
    """The solved problems of a file: one of the library's by name, or your own by path.

    Example:
        load_exemplars("gsm8k.jsonl")[0].cot.endswith("The answer is 48.")
    """
    source = files("gruppo.evaluation") / "exemplars" / file
    if not source.is_file():
        source = Path(file).expanduser()
    if not source.is_file():
        known = sorted(entry.name for entry in (files("gruppo.evaluation") / "exemplars").iterdir())
        raise ConfigError(f"FewShot(file={file!r}): there is no such file, and the library has {', '.join(known)}.")
    return tuple(
        _exemplar(line, f"{file}:{number}")
        for number, line in enumerate(source.read_text(encoding="utf-8").split("\n"), start=1)
        if line.strip()
    )


def _exemplar(line: str, where: str) -> Exemplar:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: this is not valid JSON ({error}). Each line holds one solved problem.") from None
    keys = ("question", "cot", "tir")
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) and row[key].strip() for key in keys):
        raise DataError(
            f"{where}: a solved problem is an object with the strings {', '.join(keys)}, but this is {row!r}."
        )
    return Exemplar(**{key: row[key] for key in keys})


def _layout(benchmark: Benchmark) -> FewShot:
    """The few-shot layout of a benchmark, validated because users can define their own."""
    few_shot = benchmark.few_shot
    if few_shot is None:
        raise ConfigError(f"{benchmark.name} has no few-shot prompt; use shots=0, or give it a `few_shot`.")
    if few_shot.question.count(HOLE) != 1 or few_shot.answer.count(HOLE) != 1:
        raise ConfigError(f"{few_shot}: `question` and `answer` must hold one {HOLE} each.")
    if isinstance(few_shot.stop, str) or "" in few_shot.stop:
        raise ConfigError(f"{few_shot}: `stop` must be a tuple of strings, none of them empty.")
    return few_shot


def _few_shot_text(problem: Problem, name: str, few_shot: FewShot, mode: Mode, shots: int) -> str:
    exemplars = load_exemplars(few_shot.file)
    if few_shot.shots > len(exemplars):
        raise ConfigError(
            f"{name}: FewShot(shots={few_shot.shots}) is more than the {len(exemplars)} solved problems "
            f"in {few_shot.file}."
        )
    if not 0 < shots <= few_shot.shots:
        raise ConfigError(
            f"shots={shots}: {name} has {few_shot.shots} solved problems to show (`shots` of its FewShot; "
            f"{few_shot.file} holds {len(exemplars)})."
        )
    opening, closing = few_shot.answer.split(HOLE)
    parts = []
    for each in exemplars[:shots]:
        solution = each.tir if mode == "tir" else each.cot
        parts.append(f"{few_shot.question.replace(HOLE, each.question)}\n{opening}{solution}{closing}")
    parts.append(f"{few_shot.question.replace(HOLE, problem.question)}\n{opening}")
    # No trailing space: in most tokenizers the space is part of the next word's token.
    return few_shot.separator.join(parts).rstrip()
