"""Secrets of the environment reach neither reward workers nor code that a model wrote, unless they are named."""

import os
from typing import Any

import pytest
import torch

from gruppo import GRPOConfig, RLOOConfig
from gruppo.errors import ConfigError, RewardError
from gruppo.rewards.check import check_reward
from gruppo.rewards.runner import RewardInputs, RewardRunner, RewardSettings
from gruppo.sandbox import Sandbox
from gruppo.sandbox.variables import environment, hint, is_passed
from gruppo.tools.python_tool import python_tool
from tests.trainer.runs import make

SECRETS = {
    "OPENAI_API_KEY": "my-secret-1",
    "HF_TOKEN": "my-secret-2",
    "WANDB_API_KEY": "my-secret-3",
    "AWS_SECRET_ACCESS_KEY": "my-secret-4",
    "DATABASE_URL": "postgres://me:my-secret-5@host/db",
    "HTTPS_PROXY": "http://me:my-secret-6@proxy:3128",
    "SOMETHING_ELSE": "my-secret-7",
}
BATCH = RewardInputs(rows=[{}, {}], prompts=["p", "q"], completions=["a", "b"], completion_ids=[[1], [2]])
QUIET = dict(output_dir="unused", use_cpu=True, bf16=False)


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def runner(function: Any, **settings: Any) -> RewardRunner:
    return RewardRunner([function], ["mine"], [None], device=torch.device("cpu"), settings=RewardSettings(**settings))


def seen(function: Any, **settings: Any) -> dict[str, str]:
    """The environment that a reward logs."""
    columns: dict[str, list[Any]] = {}
    scoring = runner(function, **settings)
    try:
        scoring.score(BATCH, log_extra=columns.__setitem__)
    finally:
        scoring.close()
    return dict(columns["environment"][0])


def shows_environment(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    log_extra("environment", [dict(os.environ)] * len(completions))
    return [0.0] * len(completions)


async def shows_environment_async(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    return shows_environment(completions, log_extra)


# ---- what is passed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, "x")
            for name in ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
        ),
        *((name, "x") for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")),
        *((name, "x") for name in ("HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "TOKENIZERS_PARALLELISM")),
        *((name, "x") for name in ("CONDA_PREFIX", "SSL_CERT_FILE", "TRANSFORMERS_OFFLINE", "PYTORCH_ALLOC_CONF")),
        ("https_proxy", "http://proxy:3128"),
        ("HTTP_PROXY", "proxy:3128"),
        ("NO_PROXY", "localhost,.internal"),
    ],
)
def test_what_libraries_need_is_passed(name: str, value: str) -> None:
    assert is_passed(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *SECRETS.items(),
        *((name, "x") for name in ("HUGGINGFACE_HUB_TOKEN", "HUGGINGFACE_API_KEY", "HF_TOKEN_PATH", "CONDA_TOKEN")),
        *(
            (name, "x")
            for name in ("PYTHON_KEYRING_PASSWORD", "TORCH_HUB_AUTH", "GITHUB_TOKEN", "SSH_AUTH_SOCK", "MINE")
        ),
        *((name, "x") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")),
        ("HF_ENDPOINT", "https://me:word@hub.internal"),
        ("https_proxy", "http://me:word@proxy:3128"),
        ("HTTP_PROXY", "me:word@proxy:3128"),
    ],
)
def test_all_else_is_held_back(name: str, value: str) -> None:
    assert not is_passed(name, value)


# ---- workers


def test_a_worker_sees_no_secret() -> None:
    found = seen(shows_environment, timeout=60.0)
    assert not [name for name in SECRETS if name in found]
    assert "my-secret" not in str(found)
    assert found["PATH"] == os.environ["PATH"]
    assert found["HF_HUB_OFFLINE"] == "1"


def test_a_worker_sees_what_is_named() -> None:
    found = seen(shows_environment, timeout=60.0, worker_env=["OPENAI_API_KEY", "NOT_SET"])
    assert {name: found[name] for name in SECRETS if name in found} == {"OPENAI_API_KEY": "my-secret-1"}
    assert "NOT_SET" not in found


@pytest.mark.parametrize(
    ("function", "settings"), [(shows_environment, {}), (shows_environment_async, {"timeout": 60.0})]
)
def test_rewards_in_the_process_of_the_run_see_all_of_it(function: Any, settings: dict[str, Any]) -> None:
    assert SECRETS.items() <= seen(function, **settings).items()


def needs_key(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(os.environ["OPENAI_API_KEY"]))] * len(completions)


def test_a_reward_that_lacks_a_variable_says_how_to_name_it() -> None:
    with pytest.raises(RewardError, match=r"KeyError: 'OPENAI_API_KEY'") as caught:
        runner(needs_key, timeout=60.0, on_error="raise").score(BATCH)
    assert "worker_env=['OPENAI_API_KEY']" in str(caught.value)
    assert "my-secret" not in str(caught.value)
    values_BR = runner(needs_key, timeout=60.0, worker_env=["OPENAI_API_KEY"]).score(BATCH).values_BR
    assert values_BR.tolist() == [[11.0]] * 2


class NeedsKeyToLoad:
    def __setstate__(self, state: Any) -> None:
        os.environ["WANDB_API_KEY"]

    def __getstate__(self) -> dict[str, Any]:
        return {"some": "state"}

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)


def test_a_reward_that_lacks_a_variable_to_load_says_so_too() -> None:
    with pytest.raises(ConfigError, match="could not be loaded") as caught:
        runner(NeedsKeyToLoad(), timeout=60.0).score(BATCH)
    assert "worker_env=['WANDB_API_KEY']" in str(caught.value)


@pytest.mark.parametrize("text", ["KeyError: 'PATH'", "KeyError: 'NEVER_SET'", "ValueError: openai_api_key", ""])
def test_there_is_no_hint_where_it_would_not_help(text: str) -> None:
    assert hint(text) == ""


def test_there_is_no_hint_for_what_was_named() -> None:
    assert "HF_TOKEN" in hint("no HF_TOKEN")
    assert hint("no HF_TOKEN", ["HF_TOKEN"]) == ""


async def needs_key_async(completions: list[str], **kwargs: Any) -> list[float]:
    return needs_key(completions)


@pytest.mark.parametrize(
    ("function", "named", "works"),
    [(needs_key, None, False), (needs_key, ["OPENAI_API_KEY"], True), (needs_key_async, None, True)],
)
def test_check_reward_shows_what_a_run_would_show(function: Any, named: list[str] | None, works: bool) -> None:
    report = check_reward(function, [{"prompt": "p"}], worker_env=named, max_rows=1, show=False)
    failed = [trial for trial in report.trials if trial.kind.failed]
    assert bool(failed) is not works


def test_a_worker_finds_this_package_whatever_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/mine")
    assert environment()["PYTHONPATH"].endswith("/of/mine")


# ---- the setting


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
@pytest.mark.parametrize("names", ["OPENAI_API_KEY", [7], [""], {"OPENAI_API_KEY": "abc"}])
def test_worker_env_is_a_list_of_names(config: Any, names: Any) -> None:
    with pytest.raises(ConfigError, match=r"worker_env=.* must be a list of names"):
        config(**QUIET, worker_env=names)


def test_a_variable_that_is_not_set_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    GRPOConfig(**QUIET, worker_env=["OPENAI_API_KEY", "NOT_SET_ANYWHERE"])
    (record,) = [r for r in caplog.records if "worker_env" in r.message]
    assert "NOT_SET_ANYWHERE is not set" in record.message
    assert "my-secret" not in record.message


def test_a_trainer_passes_the_names_on(tmp_path: Any) -> None:
    trainer = make(tmp_path, rewards=needs_key, reward_timeout=60.0, worker_env=["OPENAI_API_KEY"])
    try:
        assert trainer.rewards.runner.settings.bounds.variables == ("OPENAI_API_KEY",)
        assert trainer.rewards.runner.score(BATCH).values_BR.tolist() == [[11.0]] * 2
    finally:
        trainer.rewards.runner.close()


# ---- code that a model wrote

SHOW = """
import os
print(dict(os.environ))
for entry in ("self", str(os.getppid()), "1"):
    try:
        print(open(f"/proc/{entry}/environ").read())
    except OSError as error:
        print(entry, type(error).__name__)
"""


def test_code_in_the_sandbox_sees_no_secret() -> None:
    run = Sandbox(allow_unconfined=Sandbox.capabilities().missing).run(SHOW)
    assert "OMP_NUM_THREADS" in run.stdout, "it ran"
    assert "my-secret" not in run.stdout + run.stderr
    assert not [name for name in SECRETS if name in run.stdout]


def test_the_python_tool_shows_no_secret() -> None:
    answer = python_tool(allow_unconfined=Sandbox.capabilities().missing)(SHOW)
    assert "OMP_NUM_THREADS" in answer, "it ran"
    assert "my-secret" not in answer
