"""Pages that give advice name settings, metrics and checks: each name is one that exists."""

import inspect
import re
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache

import pytest

import gruppo
import gruppo.rewards
from gruppo import GRPOConfig, GRPOTrainer, RLOOConfig
from gruppo.algo.recipes import LOSS_TYPES
from tests.docs.blocks import ROOT

PAGES = ("faq.md", "quickstart.md", "concepts.md", "five-minutes.md", "logging.md")
# Names that belong to others: of data sets, of tokenizers and models, of the reader's own code.
FOREIGN = {
    *(
        "completion",
        "prompt",
        "question",
        "answer",
        "completions",
        "row",
        "model",
        "tokenizer",
        "generate",
        "math",
        "code",
        "eos_token",
    ),
    *("enable_thinking", "do_sample", "train", "reward", "kl", "entropy", "loss", "fn", "rows", "run", "ref_model"),
    *("docs", "dev", "demo", "view", "vllm", "peft", "deepspeed", "timeouts", "bad_updates", "max_new_tokens"),
}


def inline_code(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- run:.*?-->|```.*?```|<!-- fields:.*?<!-- end of fields -->", "", text, flags=re.DOTALL)
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))  # code may be broken over two lines
    return [code for part in paragraphs for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", part)]


@cache
def settings() -> set[str]:
    own = {field.name for config in (GRPOConfig, RLOOConfig) for field in fields(config)}
    return own | set(inspect.signature(GRPOTrainer).parameters) | {"resume_from_checkpoint", "response_template"}


@cache
def metrics() -> set[str]:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    return keys - {"<log_metric name>"} | {"eval_reward"}  # what a reward logs may have any name


@cache
def checks() -> set[str]:
    page = (ROOT / "docs/audits.md").read_text(encoding="utf-8")
    return {key for line in page.splitlines() if line.startswith("| `") for key in re.findall(r"`(\w+)`", line[:60])}


def is_metric(name: str) -> bool:
    """Whether it is a logged key; both sides may leave a part open: `clip_ratio/*`, `rewards/<name>/mean`."""
    asked = re.sub(r"<\w+>", "*", name)
    return any(
        fnmatch(re.sub(r"<[^>]+>", "x", key), asked) or fnmatch(asked, re.sub(r"<[^>]+>", "*", key))
        for key in metrics()
    )


def is_known(name: str) -> bool:
    public = {*gruppo.__all__, *gruppo.rewards.__all__, *LOSS_TYPES}
    return name in settings() | checks() | public | FOREIGN or is_metric(name)


@pytest.mark.parametrize("page", PAGES)
def test_settings_and_metrics_that_a_page_names_exist(page: str) -> None:
    named = inline_code(page)
    assert len(named) > 15
    unknown = []
    for code in named:
        if match := re.match(r"([a-z_]+)=", code):  # a setting with a value
            unknown += [code] if match[1] not in settings() else []
        elif re.fullmatch(r"[a-z_]+(/[\w<>*]+)+", code):  # a metric, or a file
            unknown += [code] if not is_metric(code) and not (ROOT / code).exists() else []
        elif re.fullmatch(r"[a-z_]+", code):
            unknown += [code] if not is_known(code) else []
    assert unknown == []


def test_these_tests_would_find_a_wrong_name() -> None:
    assert is_metric("clip_ratio/*")
    assert is_metric("rewards/<name>/mean")
    assert is_metric("eval_gsm8k_accuracy")
    assert not is_metric("completions/cliped_ratio")
    assert not is_metric("clip_ratios/*")
    assert not is_known("max_completion_lenght")
    assert is_known("max_completion_length")
    assert {"zero_gradient", "no_end", "exploding_gradient"} <= checks()
