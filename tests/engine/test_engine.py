"""The engine as a whole: every completion is what it would be alone, whatever it shares the device with."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gruppo.engine import engine as engine_module
from gruppo.engine import loop as loop_module
from gruppo.engine.engine import Engine
from gruppo.engine.loop import Loop
from gruppo.engine.noise import derive_key
from gruppo.engine.reference import sample_tokens
from gruppo.engine.runner import Runner
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.work import Work
from gruppo.errors import ConfigError, RolloutError
from gruppo.plan import RolloutPlan
from gruppo.types import Completion, SampleRequest, StopReason
from tests.engine.models import VOCABULARY, build
from tests.helpers import in_double, tiny_tokenizer

EOS = 1
PROMPTS: list[list[int]] = [
    [random.Random(length).randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 2, 5, 9, 14)
] + [[EOS]]
ROOMY = RolloutPlan(kv_tokens=2000, rows=64, prefill_tokens=256)


@cache
def exact() -> Any:
    """A model in float64 throughout: how rows are batched shows in its last bits, and those never reach a token."""
    return in_double(build("llama"))


@cache
def tokenizer() -> Any:
    return tiny_tokenizer()


def engine(plan: RolloutPlan | None = ROOMY, model: Any = None, **options: Any) -> Engine:
    policy = exact() if model is None else model
    return Engine(lambda: policy, tokenizer=tokenizer(), plan=plan, **options)


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.ids) for completion in completions]


def assert_same(ours: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens and ends; log-probs and entropies but for the last bits of float32."""
    assert [(list(c.ids), c.stop) for c in ours] == [(list(c.ids), c.stop) for c in expected]
    for a, b in zip(ours, expected, strict=True):
        for name in ("logps", "plain_logps", "entropies"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), abs=1e-5)


# ---- the slow twin: one row, the model's own forward pass, no cache


def logits_after(row: Sequence[int], model: Any = None) -> torch.Tensor:
    with torch.no_grad():
        return (exact() if model is None else model)(torch.tensor([list(row)])).logits[0, -1]


@cache
def stepwise(prompt: tuple[int, ...], key: int, settings: SamplingSettings) -> Completion:
    """One completion drawn with this key, token by token; of all settings it knows temperature, top_k and stops."""
    written: list[int] = []
    logps: list[float] = []
    plain: list[float] = []
    entropies: list[float] = []
    stop = None
    while stop is None:
        tempered = logits_after((*prompt, *written)).float() / settings.temperature
        scores = tempered
        if settings.top_k:
            scores = tempered.masked_fill(tempered < tempered.topk(settings.top_k).values[-1], -math.inf)
        signed = key - (1 << 64) if key >= 1 << 63 else key
        at = (torch.tensor([signed]), torch.tensor([len(written)]), torch.ones(1))
        token = int(sample_tokens(scores[None], *at, greedy=settings.greedy, entropy=False)[0])
        written.append(token)
        logps.append(float(scores.log_softmax(-1)[token]))
        plain.append(float(tempered.log_softmax(-1)[token]))
        entropies.append(float(torch.distributions.Categorical(logits=tempered).entropy()))
        text = tokenizer().decode(written)
        if token in settings.stop_ids:
            stop = StopReason.EOS
        elif any(string in text for string in settings.stop_strings):
            stop = StopReason.STOP_STRING
        elif len(written) == settings.max_new_tokens:
            stop = StopReason.LENGTH
    return Completion(written, stop, logps, plain_logps=plain, entropies=entropies)


def one_by_one(requests: Sequence[SampleRequest], settings: SamplingSettings) -> list[Completion]:
    return [
        stepwise(tuple(request.prompt_ids), derive_key(request.noise_key, request.first_sample + i), settings)
        for request in requests
        for i in range(request.count)
    ]


# ---- the loop as it runs on a GPU, where the host looks late and batches are padded to what was captured


class Mark:
    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: "Mark") -> float:
        return 0.0


class LateLoop(Loop):
    """Several steps between two looks, and a look is read only when the next steps are on their way."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.on_cuda = True

    def _mark(self) -> Mark:
        return Mark()

    def _to_host(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.clone()


def padded_decode(self: Runner, settings: SamplingSettings, steps: int) -> int:
    bucket = next(size for size in self.buckets if size >= self.rows.count)
    for _ in range(steps):
        self._step(bucket, settings)
    return bucket


@pytest.fixture
def as_on_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Loop", LateLoop)
        patch.setattr(loop_module, "_STEPS_PER_LOOK", {"cpu": 3})
        patch.setattr(Runner, "decode", padded_decode)
        yield


@pytest.fixture(params=["at once", "late"])
def late(request: pytest.FixtureRequest) -> bool:
    """Run a test on either loop."""
    if request.param == "late":
        request.getfixturevalue("as_on_cuda")
    return bool(request.param == "late")


# ---- alone and together

REQUESTS = st.lists(
    st.builds(
        SampleRequest,
        st.sampled_from(PROMPTS),
        st.integers(0, 4),
        noise_key=st.integers(0, 1),
        first_sample=st.integers(0, 2),
    ),
    max_size=7,
)
PLANS = st.none() | st.builds(RolloutPlan, st.integers(1, 90), st.integers(1, 6), st.integers(1, 20))
SETTINGS = st.builds(
    SamplingSettings,
    max_new_tokens=st.sampled_from([1, 2, 7]),
    greedy=st.sampled_from([False, False, False, True]),
    temperature=st.sampled_from([1.0, 1.7]),
    top_k=st.sampled_from([0, 6]),
    stop_ids=st.sampled_from([(), (EOS,), tuple(range(1, 64, 4))]),
    stop_strings=st.sampled_from([(), ("A", "!!", "-2"), ("C", "E")]),  # C is among the stop_ids as well
)
CALLS = st.lists(st.tuples(REQUESTS, SETTINGS), min_size=1, max_size=2)


def check_calls(plan: RolloutPlan | None, calls: list[tuple[list[SampleRequest], SamplingSettings]]) -> None:
    """Several calls of one engine against the slow twin, and what the engine says of itself."""
    sampler = engine(plan)
    for requests, settings in calls:
        expected = [
            # Greedy decoding has no distribution of its own: both log-probs are the plain one.
            replace(c, logps=c.plain_logps) if settings.greedy else c
            for c in one_by_one(requests, settings)
        ]
        assert_same(sampler.sample(requests, settings, entropies=True), expected)
        if not expected:
            continue
        counters = sampler.counters
        tokens = sum(len(c.ids) for c in expected)
        distinct = {tuple(request.prompt_ids) for request in requests if request.count}
        assert counters.decode_tokens == tokens == counters.computed_rows - counters.wasted_rows
        # A prefix for which the pool was too broken up is encoded again.
        assert counters.prefill_tokens >= sum(len(prompt) - 1 for prompt in distinct)
        assert 0 < counters.kv_high_water <= counters.kv_tokens


@hypothesis_settings(max_examples=60, deadline=None)
@given(PLANS, CALLS)
def test_every_completion_is_what_it_would_be_alone(plan: Any, calls: Any) -> None:
    check_calls(plan, calls)


@pytest.mark.usefixtures("as_on_cuda")
@hypothesis_settings(max_examples=60, deadline=None)
@given(PLANS, CALLS)
def test_the_same_where_the_host_runs_ahead_of_the_device(plan: Any, calls: Any) -> None:
    check_calls(plan, calls)


def test_same_keys_same_completions() -> None:
    requests = [SampleRequest(prompt, 3, noise_key=8) for prompt in PROMPTS]
    settings = SamplingSettings(max_new_tokens=6)
    sampler = engine()
    first = sampler.sample(requests, settings)
    assert sampler.sample(requests, settings) == first
    sampler.release()
    assert sampler.sample(requests, settings) == first
    assert_same(engine(None).sample(requests[::-1], settings)[::-3], first[2::3])


def test_another_key_or_sample_is_another_stream() -> None:
    settings = SamplingSettings(max_new_tokens=12)
    requests = [SampleRequest(PROMPTS[3], 2, noise_key=key, first_sample=first) for key in (0, 1) for first in (0, 2)]
    assert len({tuple(row) for row in ids(engine().sample(requests, settings))}) == 8
    same_draw = SampleRequest(PROMPTS[3], 1, noise_key=0, first_sample=1)
    again = ids(engine().sample([requests[0], same_draw], settings))
    assert again[1] == again[2], "the address of the noise is (noise_key, sample), wherever it stands"


def test_a_group_may_be_asked_for_in_parts() -> None:
    settings = SamplingSettings(max_new_tokens=8, stop_ids=(EOS,))
    whole = engine().sample([SampleRequest(PROMPTS[2], 8, noise_key=5)], settings)
    parts = [SampleRequest(PROMPTS[2], 3, 5, first_sample=0), SampleRequest(PROMPTS[2], 5, 5, first_sample=3)]
    assert_same(engine().sample(parts, settings), whole)
    elsewhere = [completion for part in parts for completion in engine().sample([part], settings)]
    assert_same(elsewhere, whole)


def test_nothing_asked_nothing_given() -> None:
    settings = SamplingSettings(max_new_tokens=3)
    assert engine().sample([], settings) == []
    assert engine().sample([SampleRequest([5], 0)], settings) == []
    assert len(engine().sample([SampleRequest([5], 0), SampleRequest([6], 2), SampleRequest([7], 0)], settings)) == 2


# ---- settings reach the sampler


def test_a_low_temperature_and_one_candidate_are_greedy() -> None:
    requests = [SampleRequest(prompt, 2, noise_key=i) for i, prompt in enumerate(PROMPTS)]
    greedy = ids(engine().sample(requests, SamplingSettings(max_new_tokens=6, greedy=True)))
    assert greedy[::2] == greedy[1::2]
    assert ids(engine().sample(requests, SamplingSettings(max_new_tokens=6, temperature=1e-5))) == greedy
    assert ids(engine().sample(requests, SamplingSettings(max_new_tokens=6, top_k=1))) == greedy
    assert ids(engine().sample(requests, SamplingSettings(max_new_tokens=6))) != greedy


def test_filters_bans_and_forced_ends_reach_the_sampler() -> None:
    requests = [SampleRequest(PROMPTS[3], 24)]
    few = SamplingSettings(max_new_tokens=1, top_p=0.5)
    scores = logits_after(PROMPTS[3]).softmax(-1).sort(descending=True)
    nucleus = set(scores.indices[: int((scores.values.cumsum(0) < 0.5).sum()) + 1].tolist())
    drawn = {c.ids[0] for c in engine().sample(requests, few)}
    assert 1 < len(drawn) <= len(nucleus)
    assert drawn <= nucleus

    odd = SamplingSettings(
        max_new_tokens=4, suppress_tokens=tuple(range(0, VOCABULARY, 2)), forced_eos_token_id=(EOS,)
    )
    for row in ids(engine().sample(requests, odd)):
        assert all(token % 2 for token in row)
        assert row[-1] == EOS

    hasty = SamplingSettings(max_new_tokens=6, stop_ids=tuple(range(40)))
    assert min(map(len, ids(engine().sample(requests, hasty)))) == 1
    assert min(map(len, ids(engine().sample(requests, replace(hasty, min_new_tokens=3))))) == 4


@pytest.mark.usefixtures("late")
def test_a_penalty_follows_each_completion_through_shared_rows() -> None:
    """Greedy with a penalty, where rows and seats change hands, against generate on one prompt at a time."""
    model = build("llama").double()
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    expected = [
        model.generate(torch.tensor([p]), do_sample=False, repetition_penalty=1.8, max_new_tokens=9)[0, len(p) :]
        for p in prompts
    ]
    settings = SamplingSettings(max_new_tokens=9, greedy=True, repetition_penalty=1.8, stop_ids=(EOS,))
    sampler = engine(RolloutPlan(60, 2, 8), model)
    requests = [SampleRequest(prompt, 2) for prompt in prompts]
    assert ids(sampler.sample(requests, settings))[::2] == [row.tolist() for row in expected]
    without = ids(sampler.sample(requests, replace(settings, repetition_penalty=1.0)))[::2]
    assert without != [row.tolist() for row in expected]
    assert ids(sampler.sample(requests, settings))[1::2] == [row.tolist() for row in expected]


# ---- how completions end


def test_end_tokens_and_the_limit() -> None:
    settings = SamplingSettings(max_new_tokens=5, stop_ids=tuple(range(0, VOCABULARY, 8)))
    completions = engine().sample([SampleRequest(PROMPTS[2], 40)], settings)
    assert {c.stop for c in completions} == {StopReason.EOS, StopReason.LENGTH}
    for completion in completions:
        ends = [token in settings.stop_ids for token in completion.ids]
        assert not any(ends[:-1])
        assert completion.stop is (StopReason.EOS if ends[-1] else StopReason.LENGTH)
        assert len(completion.ids) == 5 or ends[-1]


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(late: bool) -> None:
    settings = SamplingSettings(max_new_tokens=9)
    completions = engine().sample([SampleRequest(PROMPTS[3], 99)], settings)
    plain = [len(set(tokenizer().decode(c.ids))) == 9 for c in completions]  # nine different characters
    free, request = completions[plain.index(True)], [SampleRequest(PROMPTS[3], 1, first_sample=plain.index(True))]
    settings = replace(settings, stop_strings=("never", tokenizer().decode(free.ids[2:4])))
    sampler = engine()
    (completion,) = sampler.sample(request, settings)
    assert (completion.ids, completion.stop) == (free.ids[:4], StopReason.STOP_STRING)
    assert completion.logps == pytest.approx(free.logps[:4])  # type: ignore[index]
    assert sampler.counters.decode_tokens == 4
    # Late: looks are three steps apart, and the steps after the look that finds the string are already launched.
    assert sampler.counters.wasted_rows == (9 - 4 if late else 0)

    (ended,) = sampler.sample(request, replace(settings, stop_ids=(free.ids[3],)))
    assert (ended.ids, ended.stop) == (free.ids[:4], StopReason.EOS), "an end token is the nearer reason"


@pytest.mark.usefixtures("late")
def test_text_after_the_end_is_not_looked_at() -> None:
    """Columns that a completion never reached hold zeros or an earlier call's tokens."""
    settings = SamplingSettings(max_new_tokens=8, stop_ids=tuple(range(1, 20)), suppress_tokens=(0,))
    request = [SampleRequest(PROMPTS[3], 20)]
    expected = engine().sample(request, settings)
    assert len({len(c.ids) for c in expected}) > 4
    unwritten = tokenizer().decode([0])
    assert engine().sample(request, replace(settings, stop_strings=(unwritten,))) == expected


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    request = [SampleRequest(tokenizer().encode("AB"), 1)]
    settings = SamplingSettings(max_new_tokens=4, greedy=True)
    (free,) = engine().sample(request, settings)
    across = "B" + tokenizer().decode(free.ids[:1])
    assert engine().sample(request, replace(settings, stop_strings=("AB", across))) == [free]
    (cut,) = engine().sample(request, replace(settings, stop_strings=(across[1:],)))
    assert (cut.ids, cut.stop) == (free.ids[:1], StopReason.STOP_STRING)


def test_a_prompt_that_leaves_no_room() -> None:
    prompts = [[5] * 7, [5] * 8, [6] * 9, [7] * 5]
    settings = SamplingSettings(max_new_tokens=4)
    sampler = engine(context_length=8)
    completions = sampler.sample([SampleRequest(prompt, 2, i) for i, prompt in enumerate(prompts)], settings)
    stops = [(len(c.ids), c.stop) for c in completions[::2]]
    no_room, length = (0, StopReason.NO_ROOM), StopReason.LENGTH
    assert stops == [(1, length), no_room, no_room, (3, length)]
    assert completions[2].logps == [] == completions[2].plain_logps
    assert sampler.counters.prefill_tokens == 6 + 4
    fitting = engine().sample([SampleRequest(prompts[3], 2, 3)], replace(settings, max_new_tokens=3))
    assert_same(completions[6:], fitting)

    nothing = sampler.sample([SampleRequest([5] * 20, 2)], settings)
    assert [(c.ids, c.stop) for c in nothing] == [([], StopReason.NO_ROOM)] * 2


POISON = 7


def poisoned() -> Any:
    """A model that knows no numbers for what comes after token 7."""
    model = in_double(build("llama"))
    model.get_input_embeddings().weight.data[POISON] = math.nan
    return model


@pytest.mark.usefixtures("late")
def test_broken_logits_end_one_completion_and_harm_no_other() -> None:
    settings = SamplingSettings(max_new_tokens=6, suppress_tokens=(POISON,))
    good = [SampleRequest(prompt, 2, noise_key=i) for i, prompt in enumerate(PROMPTS) if POISON not in prompt]
    assert len(good) > 3
    bad = [SampleRequest([9, POISON, 9], 3), SampleRequest([POISON], 1)]
    mixed = [bad[0], good[0], bad[1], *good[1:]]
    # Five places more than the largest needs: what the broken ones leave behind is written over by the others.
    for plan in (ROOMY, RolloutPlan(25, 3, 4)):
        completions = engine(plan, poisoned()).sample(mixed, settings, entropies=True)
        assert [(c.ids, c.stop, c.logps) for c in completions[:3]] == [([], StopReason.NAN, [])] * 3
        assert [c.stop for c in completions].count(StopReason.NAN) == 4
        rest = [c for c in completions if c.stop is not StopReason.NAN]
        assert_same(rest, engine(ROOMY, poisoned()).sample(good, settings, entropies=True))


@pytest.mark.usefixtures("late")
def test_tokens_before_broken_logits_are_kept() -> None:
    completions = engine(model=poisoned()).sample([SampleRequest([9, 10], 60)], SamplingSettings(max_new_tokens=12))
    broken = [c for c in completions if c.stop is StopReason.NAN]
    assert 0 < len(broken) < 60
    for completion in completions:
        assert POISON not in completion.ids[:-1]
        read_it = completion.ids[-1] == POISON and len(completion.ids) < 12
        assert completion.stop is (StopReason.NAN if read_it else StopReason.LENGTH)
        assert all(math.isfinite(logp) for logp in completion.logps)  # type: ignore[union-attr, arg-type]


# ---- log-probs and entropies


@pytest.mark.parametrize("top_k", [0, 4])
def test_logps_are_of_the_draw_and_of_the_plain_distribution(top_k: int) -> None:
    settings = SamplingSettings(max_new_tokens=5, temperature=0.7, top_k=top_k)
    prompt = PROMPTS[3]
    for completion in engine().sample([SampleRequest(prompt, 3)], settings, entropies=True):
        for i, token in enumerate(completion.ids):
            tempered = logits_after([*prompt, *completion.ids[:i]]) / 0.7
            plain = tempered.log_softmax(-1)
            kept = tempered.topk(top_k or VOCABULARY)
            assert token in kept.indices
            assert completion.plain_logps[i] == pytest.approx(plain[token].item(), abs=1e-5)  # type: ignore[index]
            actual = plain[token] - plain[kept.indices].logsumexp(-1)
            assert completion.logps[i] == pytest.approx(actual.item(), abs=1e-5)  # type: ignore[index]
            entropy = -(plain.exp() * plain).sum()
            assert completion.entropies[i] == pytest.approx(entropy.item(), abs=1e-5)  # type: ignore[index]


def test_entropies_come_on_request() -> None:
    sampler, settings = engine(), SamplingSettings(max_new_tokens=3)
    without = sampler.sample([SampleRequest([5, 6], 1)], settings)[0]
    with_them = sampler.sample([SampleRequest([5, 6], 1)], settings, entropies=True)[0]
    assert without.entropies is None
    assert len(with_them.entropies) == 3  # type: ignore[arg-type]
    assert replace(with_them, entropies=None) == without


# ---- bad input


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([SampleRequest([5], 1), SampleRequest([], 1)], "Prompt 1 is empty"),
        ([SampleRequest([5, VOCABULARY], 1)], r"Prompt 0 has the token id 64, but .* has 64 tokens"),
        ([SampleRequest([5], 1), SampleRequest([5], 1), SampleRequest([5, -1], 1)], "Prompt 2 has the token id -1"),
    ],
)
def test_bad_prompts_are_named_before_anything_runs(requests: list[SampleRequest], message: str) -> None:
    model = in_double(build("llama"))
    passes: list[Any] = []
    model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    sampler = engine(model=model)
    settings = SamplingSettings(max_new_tokens=3)
    with pytest.raises(RolloutError, match=message):
        sampler.sample(requests, settings)
    assert passes == []
    assert_same(sampler.sample([SampleRequest([5], 1)], settings), engine().sample([SampleRequest([5], 1)], settings))
    assert passes


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperatures_that_make_no_distribution(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature="):
        SamplingSettings(max_new_tokens=3, temperature=temperature)


def test_settings_that_the_model_or_the_engine_cannot_meet() -> None:
    sampler = Engine(exact)
    request, fine = [SampleRequest([5, 6], 2)], SamplingSettings(max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"suppress_tokens .* vocabulary of 64: \[64\]"):
        sampler.sample(request, replace(fine, suppress_tokens=(64,)))
    with pytest.raises(ConfigError, match=r"stop_strings=\['x'\] need a tokenizer"):
        sampler.sample(request, replace(fine, stop_strings=("x",)))
    assert_same(sampler.sample(request, fine), engine().sample(request, fine))


# ---- what is kept between calls


def test_new_weights_are_sampled_from() -> None:
    model = in_double(build("llama"))
    settings = SamplingSettings(max_new_tokens=6, greedy=True)
    requests = [SampleRequest(prompt, 1) for prompt in PROMPTS]
    sampler = engine(model=model)
    before = ids(sampler.sample(requests, settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1, 0))  # in place
    after = ids(sampler.sample(requests, settings))
    assert after == ids(engine(model=model).sample(requests, settings)) != before
    for parameter in model.parameters():
        parameter.data = parameter.data.roll(-1, 0)  # elsewhere in memory
    assert ids(sampler.sample(requests, settings)) == before


def test_the_policy_may_be_another_module_from_call_to_call() -> None:
    models = [in_double(build("llama")), in_double(build("qwen2")), in_double(build("gpt2"))]
    current = [models[0]]
    sampler = Engine(lambda: current[0])
    request, settings = [SampleRequest(PROMPTS[2], 2)], SamplingSettings(max_new_tokens=6)
    for model in (*models, models[0]):
        current[0] = model
        assert_same(sampler.sample(request, settings), Engine(lambda model=model: model).sample(request, settings))


def test_a_plan_of_ones_own_grows_with_the_work_and_a_given_one_does_not() -> None:
    settings = SamplingSettings(max_new_tokens=4)
    small, large = [SampleRequest([5, 6], 2)], [SampleRequest(prompt, 8) for prompt in PROMPTS]
    own, given_ = engine(None), engine(RolloutPlan(30, 2, 16))
    for sampler in (own, given_):
        sampler.sample(small, settings)
    assert own.plan is not None
    assert own.plan.rows == 2
    assert_same(own.sample(large, settings), given_.sample(large, settings))
    assert own.plan.rows == 48
    assert given_.plan == RolloutPlan(30, 2, 16)


def test_a_plan_is_widened_to_hold_one_completion() -> None:
    sampler = engine(RolloutPlan(kv_tokens=1, rows=4, prefill_tokens=16))
    requests = [SampleRequest(prompt, 3) for prompt in PROMPTS]
    settings = SamplingSettings(max_new_tokens=5)
    assert_same(sampler.sample(requests, settings), engine().sample(requests, settings))
    assert sampler.plan == RolloutPlan(kv_tokens=13 + 5, rows=4, prefill_tokens=16)
    assert sampler.counters.kv_high_water == 18


def test_another_plan_may_be_set_between_calls() -> None:
    requests, settings = [SampleRequest([5, 6, 7], 6)], SamplingSettings(max_new_tokens=3)
    sampler = engine(RolloutPlan(kv_tokens=200, rows=2, prefill_tokens=16))
    expected = sampler.sample(requests, settings)
    for rows in (6, 1):
        sampler.plan = RolloutPlan(kv_tokens=200, rows=rows, prefill_tokens=16)
        assert_same(sampler.sample(requests, settings), expected)
        assert sampler.counters.decode_steps == 3 * 6 // rows


# ---- counters


def test_counters_of_a_rollout() -> None:
    requests = [SampleRequest(PROMPTS[3], 4), SampleRequest(PROMPTS[2], 2), SampleRequest(PROMPTS[3], 1, noise_key=1)]
    settings = SamplingSettings(max_new_tokens=6)
    sampler = engine()
    sampler.sample(requests, settings)
    counters = sampler.counters
    assert counters.prefill_tokens == 8 + 4, "all but the last token, once for each distinct prompt"
    assert (counters.decode_tokens, counters.decode_steps, counters.wasted_rows) == (7 * 6, 6, 0)
    assert counters.kv_tokens == ROOMY.kv_tokens
    assert counters.kv_high_water == 8 + 4 + 7 * 6
    assert counters.prefill_seconds > 0
    assert counters.decode_seconds > 0
    rates = counters.to_dict()
    assert rates["decode_tokens_per_second"] == pytest.approx(42 / counters.decode_seconds)
    assert rates["prefill_tokens_per_second"] == pytest.approx(12 / counters.prefill_seconds)


def test_what_ended_makes_room() -> None:
    """Twelve completions through a pool for two: their memory is used again, and no prompt is encoded twice."""
    settings = SamplingSettings(max_new_tokens=6, stop_ids=tuple(range(0, VOCABULARY, 5)))
    request = [SampleRequest(PROMPTS[3], 12)]
    sampler = engine(RolloutPlan(kv_tokens=8 + 2 * 6, rows=12, prefill_tokens=64))
    assert_same(sampler.sample(request, settings), engine().sample(request, settings))
    counters = sampler.counters
    assert counters.kv_high_water == 20 == counters.kv_tokens
    assert counters.prefill_tokens == 8
    assert counters.wasted_rows == 0, "nobody waits for the longest"


@pytest.mark.usefixtures("as_on_cuda")
def test_late_looks_and_padding_count_as_waste() -> None:
    sampler = engine(RolloutPlan(200, 8, 16))
    sampler.sample([SampleRequest(PROMPTS[2], 5)], SamplingSettings(max_new_tokens=4))
    counters = sampler.counters
    # Five rows run as eight: three steps, and one more for the fourth token.
    assert (counters.computed_rows, counters.decode_tokens) == (8 * 4, 5 * 4)
    assert counters.wasted_rows == 8 * 4 - 5 * 4


# ---- out of memory


def fail_to_allocate(monkeypatch: pytest.MonkeyPatch, times: float) -> list[int]:
    """The first `times` pools cannot be allocated; returns the sizes that were tried."""
    real, tried = engine_module.KvPool, []

    def pool(shapes: Any, tokens: int, **options: Any) -> Any:
        tried.append(tokens)
        if len(tried) <= times:
            raise torch.OutOfMemoryError("no memory")
        return real(shapes, tokens, **options)

    monkeypatch.setattr(engine_module, "KvPool", pool)
    return tried


def test_a_pool_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    requests, settings = [SampleRequest(prompt, 4) for prompt in PROMPTS], SamplingSettings(max_new_tokens=5)
    expected = engine().sample(requests, settings)
    tried = fail_to_allocate(monkeypatch, 2)
    sampler = engine(RolloutPlan(400, 16, 64))
    assert_same(sampler.sample(requests, settings), expected)
    assert tried == [400, 200, 100]
    assert sampler.plan == RolloutPlan(100, 4, 16)
    assert caplog.text.count("Out of memory while sampling: continuing with half the budget") == 2
    assert_same(sampler.sample(requests, settings), expected)
    assert len(tried) == 3, "the plan is kept"


def test_a_failure_half_way_begins_anew_and_loses_nothing() -> None:
    requests, settings = [SampleRequest(prompt, 4) for prompt in PROMPTS], SamplingSettings(max_new_tokens=5)
    model = in_double(build("llama"))
    passes: list[int] = []

    def fail_once(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 6:
            raise torch.OutOfMemoryError("no memory")

    model.model.layers[1].register_forward_hook(fail_once)
    sampler = engine(RolloutPlan(300, 16, 64), model)
    assert_same(sampler.sample(requests, settings), engine().sample(requests, settings))
    assert sampler.plan == RolloutPlan(150, 8, 32)


def test_when_not_even_one_completion_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, settings = [SampleRequest(PROMPTS[2], 4)], SamplingSettings(max_new_tokens=5)
    tried = fail_to_allocate(monkeypatch, math.inf)
    sampler = engine(RolloutPlan(80, 4, 64))
    with pytest.raises(RolloutError, match="no memory left to sample even one completion"):
        sampler.sample(requests, settings)
    assert tried == [80, 40, 20, 10, 9]  # the prompt's four tokens before the last, and five of a completion
    assert "forward" not in {name for module in exact().modules() for name in vars(module)}
    monkeypatch.undo()
    assert_same(sampler.sample(requests, settings), engine().sample(requests, settings))


# ---- work


def test_work_numbers_completions_and_merges_prompts() -> None:
    requests = [SampleRequest([5, 6], 2, 3), SampleRequest([7], 1, 4), SampleRequest([5, 6], 1, 9, first_sample=4)]
    work = Work.of(requests, 16, 100, None)
    assert [(prompt.ids, list(prompt.owed)) for prompt in work.prompts] == [((5, 6), [0, 1, 3]), ((7,), [2])]
    assert work.limits == [16] * 4
    assert [key % 2**64 for key in work.keys] == [derive_key(*words) for words in ((3, 0), (3, 1), (4, 0), (9, 4))]
    assert all(-(2**63) <= key < 2**63 for key in work.keys), "they are kept as int64"


def test_work_in_a_context_of_eight() -> None:
    work = Work.of([SampleRequest([5] * n, 1) for n in (1, 3, 7, 8, 9)], 6, 100, 8)
    assert work.limits == [6, 5, 1, 0, 0]
    assert [prompt.tail_tokens for prompt in work.runnable] == [6, 5, 1]
