"""What a run records about its settings holds no secrets."""

from typing import Any

import pytest

from gruppo import GRPOConfig
from gruppo.runs.secrets import HIDDEN, without_secrets

HF = "hf_" + "aB3" * 11
OPENAI = "sk-proj-" + "x1_Y" * 8


@pytest.mark.parametrize(
    "name",
    [
        *("hub_token", "push_to_hub_token", "token", "access_token", "hub_tokens", "HF_TOKEN", "WANDB_API_KEY"),
        *("api_key", "apikey", "apiKey", "x-api-key", "X-Api-Key", "secret", "clientSecret", "client_secret"),
        *("aws_secret_access_key", "private_key", "password", "DB_PASSWD", "db_pwd", "credentials", "Authorization"),
        *("proxy_auth", "Cookie", "secret_name"),
    ],
)
def test_names_that_hide_their_value(name: str) -> None:
    assert without_secrets({name: "abc", "beta": 0.1}) == {name: HIDDEN, "beta": 0.1}
    assert without_secrets({"kwargs": [{"more": {name: "abc"}}]}) == {"kwargs": [{"more": {name: HIDDEN}}]}
    assert without_secrets({name: {"user": "me", "word": 7}}) == {name: HIDDEN}, "as a whole"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token", "<eos>"),
        ("pad_token", "<pad>"),
        ("image_token", "<image>"),
        ("pad_token_id", 0),
        ("max_tokens_per_micro_batch", 5000),
        ("stop_tokens", ["</s>"]),
        ("include_num_input_tokens_seen", "no"),
        ("tokenizer", "gpt2"),
        ("importance_sampling_level", "token"),
        ("author", "Ada"),
        ("key", "value"),
        ("secretary", "Bob"),
        ("token", None),
        ("token", True),
        ("hub_token", ""),
    ],
)
def test_names_that_do_not(name: str, value: Any) -> None:
    assert without_secrets({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HF, HIDDEN),
        (f"key is {HF}.", f"key is {HIDDEN}."),
        (OPENAI, HIDDEN),
        ("Bearer abcdefgh1234", f"Bearer {HIDDEN}"),
        ("https://me:word@host/path", f"https://{HIDDEN}@host/path"),
        ("ghp_" + "a1" * 18, HIDDEN),
        ("AKIA" + "ABCD1234" * 2, HIDDEN),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", HIDDEN),
    ],
)
def test_values_that_look_like_secrets_are_hidden_under_any_name(text: str, shown: str) -> None:
    assert without_secrets({"note": text}) == {"note": shown}
    assert without_secrets({"notes": ["a", (text,)]}) == {"notes": ["a", (shown,)]}


@pytest.mark.parametrize(
    "text",
    [
        *("hf_internal_testing/tiny", "risk-adjusted-reward-modelling-v2", "Qwen/Qwen2.5-0.5B-Instruct"),
        *("https://host/a@b", "me@host", "302504dce91aa8d75ae07ef4fe3cd7ad2dbdcf1b", "runs/2026-11-15"),
    ],
)
def test_values_that_look_like_names_stay(text: str) -> None:
    assert without_secrets({"note": text}) == {"note": text}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (["run.py", "--hub_token", "abc", "--beta", "0.1"], ["run.py", "--hub_token", HIDDEN, "--beta", "0.1"]),
        (["--api-key=abc", "abc"], [f"--api-key={HIDDEN}", "abc"]),
        (["--push_to_hub_token", "--beta", "0.1"], ["--push_to_hub_token", "--beta", "0.1"]),
        (["--eos_token", "<eos>"], ["--eos_token", "<eos>"]),
    ],
)
def test_command_lines(line: list[str], shown: list[str]) -> None:
    assert without_secrets({"command": line}) == {"command": shown}


def test_what_is_given_is_left_as_it_is() -> None:
    given = {"kwargs": {"token": "abc"}}
    without_secrets(given)
    assert given == {"kwargs": {"token": "abc"}}


def test_a_whole_config_loses_its_secrets_and_nothing_else() -> None:
    config = GRPOConfig(
        "unused", use_cpu=True, bf16=False, hub_token="my-hub-token", model_init_kwargs={"token": "my-other-token"}
    )
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    shown = without_secrets(settings)
    assert "my-hub-token" in repr(settings)
    assert "my-other-token" in repr(settings)
    assert "my-hub-token" not in repr(shown)
    assert "my-other-token" not in repr(shown)
    changed = {name for name in settings if shown[name] != settings[name]}
    assert changed == {"hub_token", "model_init_kwargs"}
