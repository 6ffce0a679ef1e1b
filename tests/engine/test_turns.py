"""Turns: what a completion was is kept for the next call, and nothing but the work to be done depends on it."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from gruppo.engine import kv as kv_module
from gruppo.engine.engine import Engine
from gruppo.engine.kv import RangeAllocator
from gruppo.engine.noise import derive_key
from gruppo.engine.runner import Runner
from gruppo.engine.scheduler import KeptTurn, PromptWork, Scheduler
from gruppo.engine.settings import SamplingSettings
from gruppo.engine.work import Work
from gruppo.errors import RolloutError
from gruppo.plan import RolloutPlan
from gruppo.types import Completion, SampleRequest, StopReason
from tests.engine.models import BUILDERS, VOCABULARY, build
from tests.engine.test_engine import (
    EOS,
    PROMPTS,
    ROOMY,
    as_on_cuda,
    assert_same,
    engine,
    fail_to_allocate,
    late,
)
from tests.helpers import in_double

__all__ = ["as_on_cuda", "late"]  # fixtures

HASTY = tuple(range(1, VOCABULARY, 4))  # end tokens: a completion has four tokens in the mean
SETTINGS = SamplingSettings(max_new_tokens=9, stop_ids=HASTY)


# ---- conversations: whatever ends by itself is answered and goes on


class Talk(NamedTuple):
    """What conversations became: the completions of each turn, and the tokens that could be taken over in each."""

    completions: list[list[Completion]]
    repeated: list[int]


def answer(key: int, sample: int, turn: int, longest: int = 5) -> list[int]:
    choose = random.Random(f"{key} {sample} {turn}")
    return [choose.randrange(3, VOCABULARY) for _ in range(choose.randrange(longest + 1))]


def converse(
    sampler: Engine,
    settings: SamplingSettings = SETTINGS,
    *,
    prompts: Sequence[list[int]] = PROMPTS,
    group: int = 3,
    turns: int = 3,
    drop: float = 0.0,
    between: Callable[[int], Any] = lambda turn: None,
) -> Talk:
    """Several turns with each prompt; `drop` of the conversations end with each turn."""
    requests = [SampleRequest(prompt, group, noise_key=key) for key, prompt in enumerate(prompts)]
    talk = Talk([], [])
    for turn in range(turns):
        between(turn)
        completions = iter(sampler.sample(requests, settings, entropies=True))
        talk.completions.append([])
        following: list[SampleRequest] = []
        repeated: dict[tuple[int, ...], int] = {}
        for request in requests:
            for sample in range(request.first_sample, request.first_sample + request.count):
                completion = next(completions)
                talk.completions[-1].append(completion)
                assert request.noise_key is not None
                if not completion.stop.ended or random.Random(sample * 31 + turn).random() < drop:
                    continue
                said = [*request.prompt_ids, *completion.ids]
                ids = [*said, *answer(request.noise_key, sample, turn)]
                repeated.setdefault(tuple(ids), len(said) - 1)  # the last token was not fed to the model
                following.append(SampleRequest(ids, 1, request.noise_key, sample, turn=turn + 1))
        requests = following
        talk.repeated.append(sum(repeated.values()))
    return talk


def check(
    sampler: Engine, settings: SamplingSettings = SETTINGS, expected: Engine | None = None, **options: Any
) -> Talk:
    """The same conversations inside a block and call by call; returns those of the block."""
    alone = converse(expected or engine(model=sampler.policy()), settings, **options)
    with sampler.turns():
        together = converse(sampler, settings, **options)
        assert_nothing_is_lost(sampler)
    for ours, theirs in zip(together.completions, alone.completions, strict=True):
        assert_same(ours, theirs)
    assert sampler._runner is None or sampler._runner.turns is None
    return together


def assert_nothing_is_lost(sampler: Engine) -> None:
    """What is taken in the pool is what is kept."""
    if sampler._runner is None or sampler._runner.turns is None:
        return
    turns = sampler._runner.turns
    places = {p for turn in turns.kept.values() for start, n in turn.ranges for p in range(start, start + n)}
    assert turns.places.used == len(places)
    for turn in turns.kept.values():
        assert sum(length for _, length in turn.ranges) == len(turn.ids) - 1


@pytest.mark.usefixtures("late")
def test_a_block_of_turns_samples_what_single_calls_sample() -> None:
    sampler = engine()
    talk = check(sampler, turns=5)
    assert all(talk.completions), "they must go on for five turns, or this proves little"
    # What was sampled in a turn is not encoded in the next one; nor is what was there before.
    assert sampler.counters.kept_tokens == sum(talk.repeated[:-1]) > 0
    assert sampler.counters.calls == 5


def test_only_what_is_new_is_encoded() -> None:
    sampler, prompt = engine(), PROMPTS[3]
    with sampler.turns():
        first = sampler.sample([SampleRequest(prompt, 2, noise_key=4)], SETTINGS)
        assert all(c.stop is StopReason.EOS for c in first)
        assert sampler.counters.prefill_tokens == len(prompt) - 1
        longer = [[*prompt, *first[0].ids, 20, 21, 22], [*prompt, *first[1].ids]]
        sampler.sample([SampleRequest(ids, 1, 4, i, turn=1) for i, ids in enumerate(longer)], SETTINGS)
    # The last sampled token and two of the answer, whose last one is fed as it is sampled from; of the other nothing.
    assert sampler.counters.prefill_tokens == len(prompt) - 1 + 3
    assert sampler.counters.kept_tokens == sum(len(prompt) + len(c.ids) - 1 for c in first)


PLANS = st.none() | st.builds(RolloutPlan, st.integers(1, 150), st.integers(1, 8), st.integers(1, 20))
MANY_SETTINGS = st.builds(
    SamplingSettings,
    max_new_tokens=st.sampled_from([1, 2, 7]),
    greedy=st.sampled_from([False, False, True]),
    top_k=st.sampled_from([0, 6]),
    stop_ids=st.sampled_from([HASTY, tuple(range(VOCABULARY))]),  # with all of them every turn has one token
    stop_strings=st.sampled_from([(), ("A", "!!", "-2"), ("C", "E")]),
)
OPTIONS = st.fixed_dictionaries(
    {"group": st.integers(1, 5), "turns": st.integers(2, 4), "drop": st.sampled_from([0.0, 0.4])}
)


@hypothesis_settings(max_examples=20, deadline=None)
@given(PLANS, MANY_SETTINGS, OPTIONS)
def test_whatever_the_room(plan: Any, settings: SamplingSettings, options: dict[str, Any]) -> None:
    check(engine(plan), settings, **options)


@pytest.mark.usefixtures("as_on_cuda")
@hypothesis_settings(max_examples=20, deadline=None)
@given(PLANS, MANY_SETTINGS, OPTIONS)
def test_the_same_where_the_host_runs_ahead(plan: Any, settings: SamplingSettings, options: dict[str, Any]) -> None:
    check(engine(plan), settings, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("greedy", [True, False])
def test_every_kind_of_model(name: str, greedy: bool) -> None:
    model = build(name)
    if name != "gpt-oss":  # its experts cannot be run in float64
        model.double()
    settings = replace(SETTINGS, greedy=greedy, forced_eos_token_id=(EOS,))  # all of them go on
    sampler = engine(model=model)
    talk = check(sampler, settings, prompts=[[9, 8, 7], [5], list(range(20, 31))], group=2, turns=4)
    assert sampler.counters.kept_tokens == sum(talk.repeated[:-1])
    assert talk.repeated[-2] > 6 * 8, "longer than the windows of five tokens"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change",
    [
        dict(repetition_penalty=1.8),
        dict(repetition_penalty=1.8, greedy=True),
        dict(min_new_tokens=3),
        dict(begin_suppress_tokens=HASTY),
        dict(suppress_tokens=(5, 6), top_p=0.8, temperature=1.4),
        dict(max_new_tokens=4, forced_eos_token_id=(EOS,)),
        dict(stop_strings=("A", "!!", "-2", "C"), stop_ids=()),
    ],
    ids=str,
)
@pytest.mark.usefixtures("late")
def test_settings_that_look_back_or_count(change: dict[str, Any]) -> None:
    sampler = engine(RolloutPlan(300, 5, 16))
    check(sampler, replace(SETTINGS, **change), turns=4)
    assert sampler.counters.kept_tokens


@pytest.mark.usefixtures("late")
def test_what_a_stop_string_cut_off_is_not_kept() -> None:
    """The device samples on until the host has seen the string."""
    settings = SamplingSettings(max_new_tokens=20, stop_strings=tuple("ABCDEFGHIJ"))
    sampler = engine()
    talk = check(sampler, settings, prompts=PROMPTS[2:4], group=6)
    assert any(c.stop is StopReason.STOP_STRING for c in talk.completions[0])
    assert sampler.counters.kept_tokens == sum(talk.repeated[:-1])


def test_adapters_and_cast_weights() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(in_double(build("llama")), lora).double()
    check(engine(model=adapted))
    masters = build("llama")
    sampler = Engine(lambda: masters, autocast_dtype=torch.bfloat16, plan=ROOMY)
    with sampler.turns():
        talk = converse(sampler, replace(SETTINGS, greedy=True))
    assert sampler.counters.kept_tokens == sum(talk.repeated[:-1])
    alone = converse(Engine(lambda: masters, autocast_dtype=torch.bfloat16), replace(SETTINGS, greedy=True))
    pairs = list(zip(talk.completions[1], alone.completions[1], strict=False))
    assert sum(list(a.ids) == list(b.ids) for a, b in pairs) > 0.7 * len(pairs), "bfloat16 rounds as rows are batched"


# ---- what is not gone on from


def go_on(sampler: Engine, change: Callable[[SampleRequest], SampleRequest]) -> int:
    """Tokens that a second turn took over, of a request that was changed."""
    first = SampleRequest(PROMPTS[3], 1, noise_key=4)
    with sampler.turns():
        (completion,) = sampler.sample([first], SETTINGS)
        request = change(SampleRequest([*first.prompt_ids, *completion.ids, 20, 21], 1, 4, turn=1))
        ours = sampler.sample([request], SETTINGS)
    assert_same(ours, engine().sample([request], SETTINGS))
    return sampler.counters.kept_tokens


def test_a_prompt_must_begin_with_what_was_said() -> None:
    assert go_on(engine(), lambda request: request) > 0
    assert go_on(engine(), lambda request: replace(request, count=3)) > 0, "three ways to go on from one"
    edited = [20, *list(PROMPTS[3])[1:], 21, 22, 23]
    assert go_on(engine(), lambda request: replace(request, prompt_ids=edited)) == 0
    assert go_on(engine(), lambda request: replace(request, prompt_ids=request.prompt_ids[:-4])) == 0
    assert go_on(engine(), lambda request: replace(request, noise_key=5)) == 0
    assert go_on(engine(), lambda request: replace(request, noise_key=None)) == 0
    assert go_on(engine(), lambda request: replace(request, first_sample=1)) == 0


def test_what_a_call_does_not_go_on_from_is_dropped() -> None:
    sampler = engine()
    first = SampleRequest(PROMPTS[3], 1, noise_key=4)
    with sampler.turns():
        (completion,) = sampler.sample([first], SETTINGS)
        sampler.sample([SampleRequest([5, 6], 1, noise_key=9)], SETTINGS)
        assert list(sampler._runner.turns.kept) == [(9, 0)]  # type: ignore[union-attr]
        sampler.sample([SampleRequest([*PROMPTS[3], *completion.ids, 20], 1, 4, turn=1)], SETTINGS)
    assert sampler.counters.kept_tokens == 0


def test_what_reached_its_limit_is_not_kept() -> None:
    sampler = engine()
    with sampler.turns():
        sampler.sample([SampleRequest(PROMPTS[3], 20, noise_key=4)], replace(SETTINGS, max_new_tokens=2))
        kept = sampler._runner.turns.kept  # type: ignore[union-attr]
        assert 0 < len(kept) < 20
        assert all(turn.ids[-1] in HASTY for turn in kept.values())


def test_nothing_is_kept_outside_of_a_block() -> None:
    sampler = engine()
    converse(sampler)
    assert sampler.counters.kept_tokens == 0
    assert sampler.counters.calls == 1
    check(sampler)
    converse(sampler)
    assert sampler.counters.kept_tokens == 0


def test_a_block_inside_another_is_refused() -> None:
    sampler = engine()
    with sampler.turns():
        with pytest.raises(RolloutError, match="inside another"), sampler.turns():
            pass
        converse(sampler)
    assert sampler.counters.kept_tokens > 0, "the first one goes on"


# ---- what changes between the turns


@pytest.mark.parametrize("how", ["in place", "elsewhere"])
def test_new_weights_forget_the_old_ones_keys(how: str) -> None:
    model = in_double(build("llama"))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def change(turn: int) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                new = weights[name].roll(turn, 0)
                if how == "in place":
                    parameter.copy_(new)
                else:
                    parameter.data = new

    sampler = engine(model=model)
    check(sampler, between=change)
    assert sampler.counters.kept_tokens == 0


def test_another_adapter_forgets_the_first_ones_keys() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(in_double(build("llama")), lora)
    model.add_adapter("other", lora)
    model.double()
    sampler = engine(model=model)
    check(sampler, between=lambda turn: model.set_adapter("other" if turn == 1 else "default"))
    assert sampler.counters.kept_tokens == 0


def test_a_plan_may_change_between_turns() -> None:
    sampler = engine()

    def change(turn: int) -> None:
        if turn == 1:
            sampler.plan = RolloutPlan(kv_tokens=200, rows=4, prefill_tokens=16)

    alone = converse(engine())
    with sampler.turns():
        together = converse(sampler, between=change)
        assert_nothing_is_lost(sampler)
    for ours, theirs in zip(together.completions, alone.completions, strict=True):
        assert_same(ours, theirs)


def test_a_plan_of_ones_own_grows_between_turns() -> None:
    sampler = engine(None)
    plans = []
    options: Any = dict(prompts=[PROMPTS[1]], group=8, turns=4, between=lambda turn: plans.append(sampler.plan))
    check(sampler, **options)
    assert len(set(plans[5:])) > 1, "the first four turns were those of another engine"
    kept = sampler.counters.kept_tokens
    check(sampler, **options)
    assert sampler.counters.kept_tokens > kept, "the second time there is more room from the start"


def test_a_plan_of_ones_own_has_room_for_turns_within_a_budget() -> None:
    """As with tools: what answers and later turns are part of the completion, whose length is bounded."""
    sampler, prompt = engine(None), list(range(20, 40))
    budget = SamplingSettings(max_new_tokens=24, stop_ids=tuple(range(VOCABULARY)))
    requests, plans, said_before = [SampleRequest(prompt, 8, noise_key=4)], [], 0
    with sampler.turns():
        for turn in range(5):
            completions = sampler.sample(requests, budget)
            # One token is sampled in each turn; it and three more are new in the next.
            said_before += len({tuple(r.prompt_ids) for r in requests}) * (len(prompt) + 4 * (turn - 1)) * (turn > 0)
            plans.append(sampler.plan)
            said = requests if turn else [replace(requests[0], count=1, first_sample=i) for i in range(8)]
            rows = [[*r.prompt_ids, *c.ids, 5, 6, 7] for r, c in zip(said, completions, strict=True)]
            left = [len(prompt) + 24 - len(row) for row in rows]
            requests = [
                replace(r, prompt_ids=row, max_new_tokens=n, turn=turn + 1)
                for r, row, n in zip(said, rows, left, strict=True)
            ]
    assert len(set(plans)) == 1
    # A little is given up where the last ones find no room in one piece.
    assert 0.9 * said_before < sampler.counters.kept_tokens <= said_before


def test_memory_that_runs_out_between_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = engine(RolloutPlan(400, 16, 64))
    passes, failing = [0], [False]
    real = Runner._step

    def step(self: Runner, *args: Any) -> None:
        passes[0] += failing[0]
        if passes[0] == 3:
            passes[0] += 1
            raise torch.OutOfMemoryError("no memory")
        real(self, *args)

    alone = converse(engine())
    monkeypatch.setattr(Runner, "_step", step)
    with sampler.turns():
        together = converse(sampler, between=lambda turn: failing.__setitem__(0, turn == 1))
        assert_nothing_is_lost(sampler)
    for ours, theirs in zip(together.completions, alone.completions, strict=True):
        assert_same(ours, theirs)
    assert sampler.plan == RolloutPlan(200, 8, 32)
    assert sampler.counters.kept_tokens > 0, "the turn after goes on again"


def test_a_pool_that_cannot_be_made_between_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = engine(RolloutPlan(400, 16, 64))
    alone = converse(engine())
    with sampler.turns():

        def change(turn: int) -> None:
            if turn == 1:
                fail_to_allocate(monkeypatch, 1)
                sampler.plan = RolloutPlan(500, 16, 64)

        together = converse(sampler, between=change)
    for ours, theirs in zip(together.completions, alone.completions, strict=True):
        assert_same(ours, theirs)
    assert sampler.plan == RolloutPlan(250, 8, 32)


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, prompt = engine(), PROMPTS[3]
    with sampler.turns():
        (first,) = sampler.sample([SampleRequest(prompt, 1, noise_key=4)], SETTINGS)
        second = [SampleRequest([*prompt, *first.ids, 20, 21], 1, 4, turn=1)]
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "decode", lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                sampler.sample(second, SETTINGS)
        assert_same(sampler.sample(second, SETTINGS), engine().sample(second, SETTINGS))
        assert sampler.counters.kept_tokens == 0
        assert_nothing_is_lost(sampler)

    def interrupted() -> None:
        with sampler.turns():
            sampler.sample(second, SETTINGS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    check(sampler)


# ---- memory that is lent


class Lent:
    """Memory on a CPU that is lost when it is lent, as a GPU's is."""

    def __init__(self, size: int, device: torch.device):
        self.bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.held = True

    def take(self) -> None:
        self.held = True

    def lend(self) -> None:
        self.bytes.fill_(255)  # NaN as a float
        self.held = False


def test_the_pool_is_held_for_the_block_and_lent_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_module, "lent_memory", Lent)
    sampler, states = engine(), []

    def look(turn: int) -> None:
        if sampler._runner is not None and sampler._in_turns:
            states.append(sampler._runner.pool.held_bytes > 0)

    for _ in range(2):
        check(sampler, between=look)
        assert sampler.counters.kept_tokens > 0
        assert sampler._runner is not None
        assert sampler._runner.pool.held_bytes == 0
    assert states == [True, True, False, True, True], "not before the first call of the second block"
    converse(sampler, turns=1)
    assert sampler._runner is not None
    assert sampler._runner.pool.held_bytes == 0


# ---- ranges and the scheduler


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40), st.lists(st.tuples(st.sampled_from(["take", "share", "shrink", "free"]), st.integers(1, 15)))
)
def test_shared_and_shrunk_ranges(size: int, orders: list[tuple[str, int]]) -> None:
    places = RangeAllocator(size)
    taken: list[list[int]] = []  # start, length, owners
    for order, number in orders:
        own = taken[number % len(taken)] if taken else None
        if order == "take":
            busy = {p for start, length, _ in taken for p in range(start, start + length)}
            start = places.take(number)
            fitting = [s for s in range(size - number + 1) if not busy & set(range(s, s + number))]
            assert start == (fitting[0] if fitting else None)
            if start is not None:
                taken.append([start, number, 1])
        elif own is None:
            continue
        elif order == "share":
            places.share(own[0])
            own[2] += 1
        elif order == "shrink":
            own[1] = min(number, own[1])
            places.shrink(own[0], own[1])
        else:
            places.give_back(own[0])
            own[2] -= 1
            if not own[2]:
                taken.remove(own)
        assert places.used == sum(length for _, length, _ in taken)
    for start, _, owners in taken:
        for _ in range(owners):
            places.give_back(start)
    assert places.take(size) == 0, "the pool is whole again"


def works(*prompts: tuple[int, int, int]) -> list[PromptWork]:
    """Prompts as (length of the prefix, length of a tail, completions)."""
    found, number = [], 0
    for i, (prefix, tail, owed) in enumerate(prompts):
        found.append(PromptWork(tuple([i] * (prefix + 1)), tail, deque(range(number, number + owed))))
        number += owed
    return found


def test_what_ended_stays_with_the_places_it_used() -> None:
    places = RangeAllocator(20)
    scheduler = Scheduler(works((4, 5, 2)), places, rows=4, keeps=True)
    scheduler.admit()
    scheduler.finish(0, written=2)
    assert scheduler.ended[0] == KeptTurn((0,) * 5, ((0, 4), (4, 2)))
    scheduler.finish(1)
    assert places.used == 4 + 2, "the prefix stays with the one that is kept"
    scheduler.ended[0].free(places)
    assert places.used == 0


def test_what_is_kept_makes_room_in_this_order() -> None:
    places = RangeAllocator(30)
    first, second, third, fourth = prompts = works((4, 6, 2), (4, 6, 1), (7, 6, 1), (7, 6, 1))
    for prompt in (third, fourth):
        start = places.take(5)
        assert start is not None
        prompt.kept = KeptTurn(prompt.ids[:6], ((start, 5),))
    scheduler = Scheduler(prompts, places, rows=2, keeps=True)
    assert [e.completion for e in scheduler.admit().entries] == [0, 1]
    scheduler.finish(0, written=6)
    assert [e.completion for e in scheduler.admit().entries] == [2]
    assert scheduler.ended == {}, "what ended in this call"
    assert third.kept is not None
    assert fourth.kept is not None

    scheduler.finish(1, written=1)
    admission = scheduler.admit()
    assert scheduler.ended == {}
    assert fourth.kept is None, "and then what would be gone on from last"
    assert admission.prompts == [third]
    assert (third.copied, third.past) == (((0, 5),), 5)
    assert [e.completion for e in admission.entries] == [3]

    scheduler.finish(2)
    assert scheduler.admit().prompts == [fourth]
    assert fourth.past == 0, "encoded from the start"
    assert first.start is None is second.start


def test_nothing_is_given_up_in_vain() -> None:
    scheduler = Scheduler(works((4, 6, 2), (4, 7, 1)), RangeAllocator(16), rows=4, keeps=True)
    assert [e.completion for e in scheduler.admit().entries] == [0, 1]
    scheduler.finish(0, written=1)
    assert scheduler.admit().entries == []
    assert list(scheduler.ended) == [0], "without it there would be no room for a prompt and its tail either"
    scheduler.finish(1, written=6)
    assert [e.completion for e in scheduler.admit().entries] == [2]


def test_a_prefix_placed_between_what_is_kept_is_placed_anew() -> None:
    """It fits a gap, but then no tail fits on either side, even if all else is given up."""
    places = RangeAllocator(12)
    for length in (4, 3, 5):
        places.take(length)
    (prompt,) = works((3, 9, 1))
    prompt.kept = KeptTurn(prompt.ids[:2], ((0, 4), (7, 5)))
    places.give_back(4)
    scheduler = Scheduler([prompt], places, rows=2, keeps=True)
    admission = scheduler.admit()
    assert [(e.prompt.start, e.tail_start) for e in admission.entries] == [(0, 3)]
    assert admission.prompts == [prompt]
    assert prompt.past == 0, "what it began with was written over: it is encoded from the start"


@hypothesis_settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(0, 25),
    st.integers(1, 8),
    st.integers(0, 2**16),
)
def test_all_completions_run_through_three_calls(
    prompts: list[tuple[int, int, int]], more: int, rows: int, seed: int
) -> None:
    """Each prompt of a call goes on from something that the call before has kept, if that is still there."""
    choose = random.Random(seed)
    size = max(prefix + tail for prefix, tail, _ in prompts) + 12 + more
    places = RangeAllocator(size)
    kept: list[KeptTurn] = []
    for _ in range(3):
        work = works(*prompts)
        for prompt in work:
            fitting = [turn for turn in kept if sum(n for _, n in turn.ranges) <= prompt.prefix_length]
            if fitting:
                prompt.kept = choose.choice(fitting)
                kept.remove(prompt.kept)
        for turn in kept:
            turn.free(places)
        scheduler = Scheduler(work, places, rows, keeps=True)
        admitted = []
        while not scheduler.finished:
            admission = scheduler.admit()
            admitted += [entry.completion for entry in admission.entries]
            assert scheduler.live, "nothing runs and something waits"
            taken = [(entry.tail_start, entry.prompt.tail_tokens) for entry in scheduler.live.values()]
            taken += [(prompt.start, prompt.prefix_length) for prompt in work if prompt.start is not None]
            used = [place for start, length in taken for place in range(start, start + length)]
            assert len(used) == len(set(used)), "two completions in one place"
            waiting = [prompt.kept for prompt in work if prompt.kept is not None]
            held = {p for t in (*scheduler.ended.values(), *waiting) for s, n in t.ranges for p in range(s, s + n)}
            running = {p for entry in scheduler.live.values() for p in range(entry.tail_start, entry.tail_start + 1)}
            assert not held & running
            assert places.used == len(held | set(used))
            live = sorted(scheduler.live)
            for completion in choose.sample(live, choose.randint(1, len(live))):
                longest = scheduler.live[completion].prompt.tail_tokens
                scheduler.finish(completion, choose.randint(0, longest))
        assert admitted == list(range(sum(owed for _, _, owed in prompts))), "each once, in order"
        kept = list(scheduler.ended.values())


# ---- requests of a turn


def test_a_request_may_have_a_limit_of_its_own() -> None:
    requests = [
        SampleRequest([5, 6, 7], 2, max_new_tokens=n, noise_key=i) for i, n in enumerate([4, 16, 99, None, 0, -3])
    ]
    work = Work.of(requests, 16, 100, None)
    assert work.limits == [4, 4, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0]
    assert [prompt.tail_tokens for prompt in work.prompts] == [16], "the largest of those that share the prompt"
    assert Work.of(requests, 16, 100, 8).limits[:6] == [4, 4, 5, 5, 5, 5]

    completions = engine().sample(requests, SamplingSettings(max_new_tokens=6))
    assert [len(c.ids) for c in completions] == [4, 4, 6, 6, 6, 6, 6, 6, 0, 0, 0, 0]
    assert [c.stop for c in completions] == [StopReason.LENGTH] * 8 + [StopReason.NO_ROOM] * 4
    free = engine().sample([SampleRequest([5, 6, 7], 2, noise_key=0)], SamplingSettings(max_new_tokens=6))
    assert [list(c.ids) for c in completions[:2]] == [list(c.ids[:4]) for c in free]


def test_every_turn_has_noise_of_its_own_and_the_first_that_of_before() -> None:
    requests = [SampleRequest([5, 6], 2, noise_key=3, turn=turn) for turn in range(3)]
    requests += [SampleRequest([5, 6], 1, turn=turn) for turn in range(2)]
    keys = Work.of(requests, 16, 100, None).keys
    assert len(set(keys)) == len(keys)
    assert [key % 2**64 for key in keys[:2]] == [derive_key(3, 0), derive_key(3, 1)]
    completions = engine().sample(requests[:3], SamplingSettings(max_new_tokens=12))
    assert len({tuple(c.ids) for c in completions}) == 6


def test_prompts_that_are_not_shared_are_not_read_as_if() -> None:
    prompt, other = [5] * 301, [6] * 301
    assert Work.of([SampleRequest(prompt, 4), SampleRequest(other, 1)], 4, 100, None).shared_tokens == 300
    assert Work.of([SampleRequest(prompt, 1), SampleRequest(other, 1)], 4, 100, None).shared_tokens == 0
    assert Work.of([], 4, 100, None).shared_tokens == 0
