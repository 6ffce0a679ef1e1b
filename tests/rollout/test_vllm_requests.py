"""Settings, requests and answers in vLLM's words, without a server."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from gruppo.errors import ConfigError, RolloutError
from gruppo.rollout.base import group_requests
from gruppo.rollout.vllm.requests import (
    EXTRA,
    Answer,
    Ask,
    asks_of,
    completion,
    completions_of,
    engine_answers,
    http_answers,
    http_request,
    in_two,
    sampling_settings,
)
from gruppo.rollout.vllm.versions import check_version
from gruppo.types import SampleRequest, StopReason

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}


def config(**fields: Any) -> Any:
    extra = fields.pop(EXTRA, None)
    made = GenerationConfig(**({"do_sample": True, "max_new_tokens": 10} | fields))
    if extra is not None:
        setattr(made, EXTRA, extra)
    return made


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}, None),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"stop_strings": "\n\n"}, {"stop": ["\n\n"]}),
        ({"min_new_tokens": 3}, {"min_tokens": 3}),
        ({EXTRA: {"logit_bias": {3: 1.0}}}, {"logit_bias": {3: 1.0}}),
        ({EXTRA: {"ignore_eos": True}}, {"ignore_eos": True, "stop_token_ids": []}),
        ({EXTRA: {"structured_outputs": {"regex": "[0-9]+"}}}, {"structured_outputs": {"regex": "[0-9]+"}}),
    ],
)
def test_a_generation_config_in_the_words_of_vllm(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = sampling_settings(config(**fields), stop_ids=[1, 2], logps=True)
    assert found == NEUTRAL | {"stop_token_ids": [1, 2], "logprobs": 0} | (fields if expected is None else expected)


def test_log_probs_are_asked_for_only_where_they_are_wanted() -> None:
    assert "logprobs" not in sampling_settings(config(), stop_ids=[1], logps=False)


@pytest.mark.parametrize(
    ("kwargs", "regex", "fields", "extra"),
    [
        ({}, None, {}, {}),
        ({"max_tokens": 9, "stop": "x"}, None, {"max_new_tokens": 9, "stop_strings": "x"}, {}),
        ({"max_new_tokens": 9, "ignore_eos": True}, None, {"max_new_tokens": 9}, {"ignore_eos": True}),
        ({"temperature": 0.5}, "[ab]", {"temperature": 0.5}, {"structured_outputs": {"regex": "[ab]"}}),
    ],
)
def test_generation_kwargs_go_to_whoever_knows_them(
    kwargs: dict[str, Any], regex: str | None, fields: dict[str, Any], extra: dict[str, Any]
) -> None:
    assert in_two(kwargs, regex) == (fields, extra)


def test_one_request_per_group_within_its_limits() -> None:
    requests = [
        SampleRequest([5, 6], 4, noise_key=3),
        SampleRequest([7] * 12, 2, noise_key=4),  # 4 places left of 16
        SampleRequest([7] * 16, 3, noise_key=5),  # none left
        SampleRequest([8], 2, noise_key=6, max_new_tokens=2),
        SampleRequest([8], 1, noise_key=6, max_new_tokens=0),
    ]
    asks, without_room = asks_of(requests, config(), context_length=16, seeded=True)
    assert [(ask.place, ask.n, ask.max_tokens) for ask in asks] == [(0, 4, 10), (1, 2, 4), (3, 2, 2)]
    assert without_room == [2, 4]
    assert all(0 <= ask.seed < 2**63 for ask in asks if ask.seed is not None)


def test_a_sample_has_the_same_seed_whichever_process_asks_for_it() -> None:
    whole = group_requests([[5]] * 4, group_size=4, key=[1])
    halves = [*group_requests([[5]] * 2, group_size=4, key=[1])]
    halves += group_requests([[5]] * 2, group_size=4, first_row=2, key=[1])
    (one,), _ = asks_of(whole, config(), context_length=None, seeded=True)
    (first, second), _ = asks_of(halves, config(), context_length=None, seeded=True)
    assert one.seed is not None
    assert (first.seed, second.seed) == (one.seed, one.seed + 2)


def test_seeds_differ_between_turns_and_can_be_left_out() -> None:
    turns = [SampleRequest([5], 1, noise_key=3, turn=turn) for turn in (0, 1)]
    (first, second), _ = asks_of(turns, config(), context_length=None, seeded=True)
    assert first.seed != second.seed
    assert asks_of(turns, config(), context_length=None, seeded=False)[0][0].seed is None
    assert asks_of([SampleRequest([5], 1)], config(), context_length=None, seeded=True)[0][0].seed is None


def test_greedy_samples_are_asked_for_one_by_one() -> None:
    """vLLM refuses several in one request."""
    asks, _ = asks_of([SampleRequest([5], 3)], config(do_sample=False), context_length=None, seeded=True)
    assert [ask.n for ask in asks] == [1, 1, 1]


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (Answer([5, 1], [-1.0, -2.0], "stop", None), StopReason.EOS),
        (Answer([5, 2], [-1.0, -2.0], "stop", 2), StopReason.EOS),
        (Answer([5, 6], [-1.0, -2.0], "stop", "\n"), StopReason.STOP_STRING),
        (Answer([5, 6], [-1.0, None], "length", None), StopReason.LENGTH),
        (Answer([5, 0], [-1.0, -2.0], "length", None), StopReason.EOS),  # padding that the model wrote itself
        (Answer([5, 5], None, "repetition", None), StopReason.LENGTH),
    ],
)
def test_why_a_completion_ended(answer: Answer, stop: StopReason) -> None:
    found = completion(answer, [1, 2], pad_id=0)
    assert found.stop is stop
    assert found.ids == answer.ids
    assert found.logps == answer.logps


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer([5], [-1.0], "abort"), "'abort'.*Its log says why"),
        (Answer([5], [-1.0], None), "None"),
        (Answer([5, 6], [-1.0], "stop"), "1 log-probs for 2 tokens"),
    ],
)
def test_half_an_answer_is_an_error(answer: Answer, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        completion(answer, [1])


def test_answers_go_back_to_their_requests() -> None:
    requests = [SampleRequest([5], 2), SampleRequest([6] * 9, 2), SampleRequest([7], 1)]
    asks = [Ask(0, [5], 2, 4, None), Ask(2, [7], 1, 4, None)]
    answers = [[Answer([8], None, "stop"), Answer([9], None, "stop")], [Answer([10], None, "length")]]
    found = completions_of(requests, asks, answers, stop_ids=[1], pad_id=None)
    assert [c.ids for c in found] == [[8], [9], [], [], [10]]
    assert [c.stop for c in found][2:4] == [StopReason.NO_ROOM] * 2
    with pytest.raises(RolloutError, match="1 completions for a request for 2"):
        completions_of(requests[:1], asks[:1], [answers[0][:1]], stop_ids=[1], pad_id=None)


def test_a_request_over_http() -> None:
    body = http_request(Ask(0, [5, 6], 4, 9, 77), {"temperature": 0.5}, "model")
    assert body == {
        "model": "model",
        "prompt": [5, 6],
        "n": 4,
        "max_tokens": 9,
        "seed": 77,
        "temperature": 0.5,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }
    assert "seed" not in http_request(Ask(0, [5], 1, 9, None), {}, "model")


def test_answers_over_http_are_put_in_order() -> None:
    choices = [
        {"index": 1, "token_ids": [6], "logprobs": None, "finish_reason": "length", "stop_reason": None},
        {"index": 0, "token_ids": [5], "logprobs": {"token_logprobs": [-1.5]}, "finish_reason": "stop"},
    ]
    assert http_answers({"choices": choices}) == [Answer([5], [-1.5], "stop"), Answer([6], None, "length")]
    with pytest.raises(RolloutError, match="without token ids"):
        http_answers({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})


def output(logprobs: Any) -> Any:
    return SimpleNamespace(index=0, token_ids=[5, 6], logprobs=logprobs, finish_reason="length", stop_reason=None)


def test_answers_of_an_engine() -> None:
    at = [{5: SimpleNamespace(logprob=-1.0)}, {9: SimpleNamespace(logprob=-0.1), 6: SimpleNamespace(logprob=-3.0)}]
    (answer,) = engine_answers(SimpleNamespace(outputs=[output(at)]))
    assert answer.logps == [-1.0, -3.0]
    (answer,) = engine_answers(SimpleNamespace(outputs=[output([None, {6: SimpleNamespace(logprob=float("nan"))}])]))
    assert answer.logps == [None, None]
    with pytest.raises(RolloutError, match="1 log-probs for 2 tokens"):
        engine_answers(SimpleNamespace(outputs=[output(at[:1])]))


@pytest.mark.parametrize("version", ["0.24.0", "0.32.1.dev3+g12"])
def test_known_releases(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version, "here")
    assert not caplog.text


@pytest.mark.parametrize("version", ["0.33.0", "v0.33.9"])
def test_releases_that_were_not_tried(version: str, caplog: pytest.LogCaptureFixture) -> None:
    check_version(version, "here")
    assert f"vLLM {version} of here has not been tested; the newest tested release is 0.32." in caplog.text


@pytest.mark.parametrize("version", ["0.23.2", "0.34.0", "1.0", "dev", ""])
def test_unknown_releases(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"vLLM {version} of here is not supported: .* 0\.24 to 0\.33.*pip install"):
        check_version(version, "here")
