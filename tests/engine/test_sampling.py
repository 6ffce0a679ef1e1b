"""Filters beside transformers' own, draws beside exact probabilities, log-probs beside float64."""

import itertools
import logging
import math
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig

from gruppo.engine import sampling
from gruppo.engine.sampling import Choice, actual_and_plain, choose, few_bans, filter_logits, needs_filter, needs_seen
from gruppo.engine.settings import SamplingSettings
from tests import interpreter
from tests.helpers import tiny_model

interpreter.make_ready()
STOPS = [2, 3]
MODEL = tiny_model()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="transformers")


# One setting for each thing a filter does; a vocabulary of 12 tokens has room for all of them together.
FILTERS: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=0.7),
    "top_k": dict(top_k=6),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.15),
    "repetition_penalty": dict(repetition_penalty=1.6),
    "min_new_tokens": dict(min_new_tokens=2),
    "suppress_tokens": dict(suppress_tokens=[0, 7]),
    "begin_suppress_tokens": dict(begin_suppress_tokens=[1, 8]),
    "forced_eos": dict(forced_eos_token_id=[2, 5]),
    "forced_bos": dict(forced_bos_token_id=4),
}
PAIRS = [(name,) for name in FILTERS] + list(itertools.combinations(FILTERS, 2)) + [tuple(FILTERS)]


def fields_of(*names: str, **more: Any) -> dict[str, Any]:
    """Fields of a GenerationConfig that switch these filters on and all others off."""
    fields = dict(do_sample=True, top_k=0, max_new_tokens=4, eos_token_id=STOPS, pad_token_id=0)
    for name in names:
        fields |= FILTERS[name]
    return fields | more


def settings_of(fields: dict[str, Any]) -> SamplingSettings:
    return SamplingSettings.from_generation_config(GenerationConfig(**fields), stop_ids=STOPS)


def by_transformers(logits: Tensor, fields: dict[str, Any], ids: Tensor, prompt_length: int) -> Tensor:
    """What generate's processors make of logits [B, V] after the tokens `ids` [B, T]."""
    config = MODEL._prepare_generation_config(GenerationConfig(**fields))[0]
    MODEL._prepare_special_tokens(config, device="cpu")
    config.max_length = prompt_length + config.max_new_tokens
    processors = MODEL._get_logits_processor(config, prompt_length, encoder_input_ids=ids, device="cpu")
    return processors(ids, logits.clone())


def seen_in(ids: Tensor, vocabulary: int) -> Tensor:
    return torch.zeros(len(ids), vocabulary, dtype=torch.bool).scatter_(1, ids, True)


def by_us(
    logits: Tensor, settings: SamplingSettings, ids: Tensor, prompt_lengths: Tensor, generated: Tensor
) -> Tensor:
    return filter_logits(
        logits,
        settings,
        generated=generated,
        seen=seen_in(ids, logits.shape[1]) if needs_seen(settings) else None,
        inverse_temperature=torch.tensor([1 / settings.temperature]),
        prompt_lengths=prompt_lengths,
    )


def random_logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def random_ids(rows: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- filters beside transformers'


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_filters_and_their_pairs_are_those_of_transformers(names: tuple[str, ...], do_sample: bool) -> None:
    fields = fields_of(*names, do_sample=do_sample)
    settings = settings_of(fields)
    for prompt_length, generated in itertools.product((1, 3), range(4)):
        logits = random_logits(8, 12, seed=generated)
        ids = random_ids(8, prompt_length + generated, 12)
        expected = by_transformers(logits, fields, ids, prompt_length)
        lengths, counts = torch.full((8,), prompt_length), torch.full((8,), generated)
        torch.testing.assert_close(by_us(logits, settings, ids, lengths, counts), expected)


def test_rows_of_different_age_do_not_meet() -> None:
    """Each row stands at its own place in its completion, which transformers' batches cannot."""
    fields = fields_of(*FILTERS)
    logits, ids = random_logits(8, 12), random_ids(8, 6, 12)
    lengths, generated = torch.tensor([1, 1, 1, 1, 3, 3, 3, 3]), torch.tensor([0, 1, 2, 3] * 2)
    seen = torch.zeros(8, 12, dtype=torch.bool)
    expected = []
    for row in range(8):
        own = ids[row : row + 1, : int(lengths[row] + generated[row])]
        seen[row, own[0]] = True
        expected.append(by_transformers(logits[row : row + 1], fields, own, int(lengths[row])))
    result = filter_logits(
        logits,
        settings_of(fields),
        generated=generated,
        seen=seen,
        inverse_temperature=torch.tensor([1 / 0.7]),
        prompt_lengths=lengths,
    )
    torch.testing.assert_close(result, torch.cat(expected))


def support(scores: Tensor) -> Tensor:
    return scores > -math.inf


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, dict[str, Any]]:
    """Logits of any shape, often with ties and banned tokens, and fields; temperatures that lose no bits."""
    rows, vocabulary = draw(st.integers(1, 4)), draw(st.integers(2, 40))
    logits = random_logits(rows, vocabulary, draw(st.integers(0, 2**31)), draw(st.sampled_from([0.1, 1.0, 5.0, 30.0])))
    step = draw(st.sampled_from([0.0, 0.5, 4.0]))
    if step:
        logits = (logits / step).round() * step
    if draw(st.booleans()):
        logits[:, 1::3] = -math.inf
    fields = fields_of(
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
        top_k=draw(st.integers(0, 45)),
        top_p=draw(st.sampled_from([1e-9, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]) | st.floats(0.01, 1.0)),
        min_p=draw(st.sampled_from([None, 0.0, 0.05, 0.5, 1.0]) | st.floats(0.0, 1.0)),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 2.0])),
        min_new_tokens=draw(st.sampled_from([None, 0, 3])),
    )
    return logits, fields


@given(cases())
@hypothesis_settings(max_examples=300, deadline=None)
def test_filters_agree_on_anything(case: tuple[Tensor, dict[str, Any]]) -> None:
    """Where float32 decides which side of a cut a token is on, either side is right: the cut is moved a little."""
    logits, fields = case
    rows, vocabulary = logits.shape
    ids = random_ids(rows, 5, vocabulary, seed=rows)
    ours = by_us(logits, settings_of(fields), ids, torch.full((rows,), 3), torch.full((rows,), 2))
    if not support(by_transformers(logits, fields | dict(top_p=1.0, min_p=None), ids, 3)).any(-1).all():
        return  # transformers leaves nothing of such a row; see the test of what is kept
    min_p = fields["min_p"] or 0.0
    tighter = fields | dict(top_p=max(fields["top_p"] - 1e-5, 0.0), min_p=min(min_p * (1 + 1e-5), 1.0))
    looser = fields | dict(top_p=min(fields["top_p"] + 1e-5, 1.0), min_p=min_p * (1 - 1e-5))
    fewest, most = (support(by_transformers(logits, f, ids, 3)).sum(-1) for f in (tighter, looser))
    unfiltered = by_transformers(logits, fields | dict(top_k=0, top_p=1.0, min_p=None), ids, 3)
    kept = support(ours)
    assert (kept.sum(-1) >= fewest.clamp(min=1)).all()
    assert (kept.sum(-1) <= most).all()
    assert_the_best_are_kept(kept, unfiltered)
    torch.testing.assert_close(ours[kept], unfiltered[kept])


def assert_the_best_are_kept(kept: Tensor, scores: Tensor) -> None:
    """None that goes is better than one that stays. Which of equals go is up to transformers' sort, and unstable."""
    worst_kept = scores.masked_fill(~kept, math.inf).amin(-1)
    best_gone = scores.masked_fill(kept, -math.inf).amax(-1)
    assert (worst_kept >= best_gone).all()


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 700])
@pytest.mark.parametrize("top_p", [1e-9, 0.05, 0.6, 0.95])
def test_ties_are_cut_as_transformers_cuts_them(top_k: int, top_p: float) -> None:
    """Logits that were bfloat16: most values occur many times, at the edges of top_k and top_p too."""
    logits = random_logits(16, 5000, scale=1.0).bfloat16().float()
    assert logits[0].unique().numel() < 1500
    fields, ids = fields_of(top_k=top_k, top_p=top_p), random_ids(16, 3, 5000)
    expected = support(by_transformers(logits, fields, ids, 3))
    kept = support(by_us(logits, settings_of(fields), ids, torch.full((16,), 3), torch.zeros(16)))
    # The last bit of a sum may put a token on the other side of the cut.
    assert (kept.sum(-1) - expected.sum(-1)).abs().max() <= 1
    assert_the_best_are_kept(kept, logits)


@pytest.mark.parametrize(("top_k", "of_two_values"), [(0, [3, 5, 6]), (6, [3, 5, 6]), (2, [5, 6])])
def test_of_equal_tokens_those_with_the_lowest_ids_go(top_k: int, of_two_values: list[int]) -> None:
    logits = torch.tensor([[0.0] * 8, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
    settings = settings_of(fields_of(top_k=top_k, top_p=0.5))
    kept = support(by_us(logits, settings, random_ids(2, 3, 8), torch.full((2,), 3), torch.zeros(2)))
    assert kept[0].nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert kept[1].nonzero().flatten().tolist() == of_two_values


@pytest.mark.parametrize(
    "fields",
    [
        dict(do_sample=True, top_k=20, top_p=0.9, temperature=0.8, repetition_penalty=1.3, min_new_tokens=4),
        dict(do_sample=True, min_p=0.2, forced_eos_token_id=1, suppress_tokens=[5, 6], begin_suppress_tokens=[1, 9]),
        dict(do_sample=False, repetition_penalty=0.8, min_new_tokens=6, forced_eos_token_id=[1, 7]),
    ],
)
def test_scores_are_those_of_generate_itself(fields: dict[str, Any]) -> None:
    fields = dict(max_new_tokens=6, pad_token_id=0, eos_token_id=1) | fields
    ids = random_ids(3, 4, MODEL.config.vocab_size)
    torch.manual_seed(0)
    with torch.no_grad():
        # A sharper model than the random one, or nothing would be filtered.
        MODEL.lm_head.weight.mul_(20)
        out = MODEL.generate(
            ids,
            generation_config=GenerationConfig(
                **fields, return_dict_in_generate=True, output_scores=True, output_logits=True
            ),
        )
        MODEL.lm_head.weight.div_(20)
    settings = SamplingSettings.from_generation_config(GenerationConfig(**fields), stop_ids=[1])
    for step, (logits, scores) in enumerate(zip(out.logits, out.scores, strict=True)):
        before = out.sequences[:, : 4 + step]
        ours = by_us(logits, settings, before, torch.full((3,), 4), torch.full((3,), step))
        torch.testing.assert_close(ours, scores)


# ---- edges


@pytest.mark.parametrize(
    "fields",
    [
        dict(begin_suppress_tokens=[2], forced_eos_token_id=2, max_new_tokens=1),
        dict(suppress_tokens=[0, 1, 4], min_new_tokens=3, forced_eos_token_id=None),
    ],
)
@pytest.mark.parametrize("do_sample", [True, False])
def test_where_nothing_is_left_the_best_token_is_kept(fields: dict[str, Any], do_sample: bool) -> None:
    settings = settings_of(fields_of(do_sample=do_sample, **fields))
    logits, ids = random_logits(6, 5), torch.zeros(6, 1, dtype=torch.long)
    scores = by_us(logits, settings, ids, torch.full((6,), 3), torch.zeros(6, dtype=torch.long))
    assert torch.equal(support(scores).sum(-1), torch.ones(6, dtype=torch.long))
    assert torch.equal(scores.argmax(-1), logits.argmax(-1))


def test_a_forced_first_token_needs_a_prompt_of_one_token() -> None:
    """As in generate, where it is meant for encoder-decoder models. Without lengths, prompts count as longer."""
    settings = settings_of(fields_of("forced_bos"))
    logits, zeros = random_logits(2, 12), torch.zeros(2, dtype=torch.long)
    options: dict[str, Any] = dict(generated=zeros, seen=None, inverse_temperature=torch.ones(1))
    scores = filter_logits(logits, settings, prompt_lengths=torch.tensor([1, 2]), **options)
    assert support(scores)[0].nonzero().tolist() == [[4]]
    assert torch.equal(scores[1], logits[1])
    assert torch.equal(filter_logits(logits, settings, **options), logits)


def test_a_repetition_penalty_without_the_tokens_seen_is_an_error() -> None:
    settings = settings_of(fields_of("repetition_penalty"))
    with pytest.raises(ValueError, match="seen"):
        filter_logits(
            random_logits(1, 5), settings, generated=torch.zeros(1), seen=None, inverse_temperature=torch.ones(1)
        )


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_nothing_depends_on_values(names: tuple[str, ...]) -> None:
    """On the meta device there are no values: reading one back, or a shape made of one, raises."""
    count = torch.zeros(3, dtype=torch.long, device="meta")
    for do_sample in (True, False):
        scores = filter_logits(
            torch.empty(3, 50, device="meta"),
            settings_of(fields_of(*names, do_sample=do_sample)),
            generated=count,
            seen=torch.empty(3, 50, dtype=torch.bool, device="meta"),
            inverse_temperature=torch.empty(1, device="meta"),
            prompt_lengths=count,
        )
        assert scores.shape == (3, 50)
        actual_and_plain(scores, scores, count, scores[0, :1], greedy=not do_sample, entropy=True)


def test_what_is_needed() -> None:
    plain = settings_of(fields_of("temperature"))
    assert not needs_filter(plain)
    assert not needs_seen(plain)
    for name in set(FILTERS) - {"temperature"}:
        assert needs_filter(settings_of(fields_of(name))), name
        assert needs_seen(settings_of(fields_of(name))) == (name == "repetition_penalty")
    for name in ("top_k", "top_p", "min_p"):
        assert not needs_filter(settings_of(fields_of(name, do_sample=False)))
    assert not needs_filter(SamplingSettings(max_new_tokens=2, min_new_tokens=1)), "there is no end to forbid"


# ---- draws

DRAWS = 20_000


def draw(
    logits: Tensor, settings: SamplingSettings, seed: int = 0, generated: int = 0, entropy: bool = True
) -> Choice:
    """One token for each row of logits [B, V], each row with noise of its own; token 3 and 6 have been seen."""
    rows, vocabulary = logits.shape
    ids = torch.tensor([[3, 6]]).expand(rows, 2)
    return choose(
        logits,
        settings,
        keys=torch.arange(rows) * 7919 + seed,
        positions=torch.full((rows,), generated),
        inverse_temperature=torch.tensor([1 / settings.temperature]),
        generated=torch.full((rows,), generated),
        seen=seen_in(ids, vocabulary) if needs_seen(settings) else None,
        entropy=entropy,
        prompt_lengths=torch.full((rows,), 2 - generated),
    )


def p_value(tokens: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square for draws and exact probabilities; what is expected less than 5 times is one class."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    rare = expected < 5
    if rare.any():
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def exact(logits: Tensor, fields: dict[str, Any], generated: int) -> Tensor:
    """The probabilities [V] that transformers would draw from, in float64."""
    ids = torch.tensor([[3, 6]])
    return by_transformers(logits[None].clone(), fields, ids, 2 - generated)[0].double().softmax(-1)


@pytest.mark.parametrize("generated", [0, 1])
@pytest.mark.parametrize("names", [(name,) for name in FILTERS] + [tuple(FILTERS)[:7], ("top_k", "top_p", "min_p")])
def test_draws_follow_the_filtered_distribution(names: tuple[str, ...], generated: int) -> None:
    fields = fields_of(*names, max_new_tokens=2)
    logits = random_logits(1, 12, seed=5, scale=1.0)[0]
    probabilities = exact(logits, fields, generated)
    tokens = draw(logits.expand(DRAWS, -1), settings_of(fields), generated=generated, entropy=False).tokens
    assert (probabilities[tokens] > 0).all(), "an excluded token was drawn"
    assert p_value(tokens, probabilities) > 1e-4


@pytest.mark.parametrize("names", [("temperature",), ("top_p",), ("repetition_penalty",), ("suppress_tokens",)])
def test_the_chi_square_notices_a_wrong_distribution(names: tuple[str, ...]) -> None:
    logits = random_logits(1, 12, seed=5, scale=1.0)[0]
    tokens = draw(logits.expand(DRAWS, -1), settings_of(fields_of(*names)), entropy=False).tokens
    assert p_value(tokens, logits.double().softmax(-1)) < 1e-4
    slightly_warm = (logits.double() / 0.95).softmax(-1)
    plain = draw(logits.expand(DRAWS, -1), settings_of(fields_of()), entropy=False).tokens
    assert p_value(plain, slightly_warm) < 1e-4
    assert p_value(plain, logits.double().softmax(-1)) > 1e-4


@pytest.mark.parametrize("names", [(), *PAIRS], ids="+".join)
def test_log_probs_and_entropies_are_those_of_float64(names: tuple[str, ...]) -> None:
    settings = settings_of(fields_of(*names))
    logits = random_logits(64, 3000, scale=4.0)
    logits[:, 11] = -math.inf  # as models do whose vocabulary is padded
    choice = draw(logits, settings)
    tempered = (logits.double() / settings.temperature).log_softmax(-1)
    seen = seen_in(torch.tensor([[3, 6]]).expand(64, 2), 3000)
    scores = filter_logits(
        logits,
        settings,
        generated=torch.zeros(64, dtype=torch.long),
        seen=seen,
        inverse_temperature=torch.tensor([1 / settings.temperature]),
        prompt_lengths=torch.full((64,), 2),
    )
    actual = scores.double().log_softmax(-1)
    index = choice.tokens[:, None]
    assert choice.entropies is not None
    close: dict[str, Any] = dict(rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(choice.plain_logps, tempered.gather(1, index)[:, 0], **close)
    torch.testing.assert_close(choice.logps, actual.gather(1, index)[:, 0], **close)
    entropies = torch.special.entr(tempered.exp()).sum(-1)
    torch.testing.assert_close(choice.entropies, entropies, **close)
    assert {choice.logps.dtype, choice.plain_logps.dtype, choice.entropies.dtype} == {torch.float32}
    assert draw(logits, settings, entropy=False).entropies is None


@pytest.mark.parametrize("names", [(), ("repetition_penalty",), ("suppress_tokens",), ("top_k",)])
def test_greedy_takes_the_best_token_and_reports_the_tempered_log_prob(names: tuple[str, ...]) -> None:
    fields = fields_of(*names, do_sample=False, temperature=0.5)
    settings, logits = settings_of(fields), random_logits(32, 40)
    choice = draw(logits, settings)
    assert torch.equal(choice.tokens, by_transformers(logits, fields, torch.tensor([[3, 6]] * 32), 2).argmax(-1))
    tempered = (logits.double() / 0.5).log_softmax(-1).gather(1, choice.tokens[:, None])[:, 0].float()
    torch.testing.assert_close(choice.plain_logps, tempered)
    torch.testing.assert_close(choice.logps, tempered)


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("names", [(), *PAIRS], ids="+".join)
def test_a_row_that_cannot_be_sampled_from_is_marked(names: tuple[str, ...], do_sample: bool) -> None:
    settings = settings_of(fields_of(*names, do_sample=do_sample))
    logits = random_logits(5, 12)
    sound = draw(logits, settings)
    logits[1, 7] = math.nan  # a token that some filters ban
    logits[2] = -math.inf
    logits[3, 3] = math.inf
    choice = draw(logits, settings)
    assert choice.tokens.tolist() == [int(sound.tokens[0]), -1, -1, -1, int(sound.tokens[4])]
    for values, before in zip(choice[1:], sound[1:], strict=True):
        assert values is not None
        assert before is not None
        assert values[1:4].isnan().all()
        assert torch.equal(values[[0, 4]], before[[0, 4]])


def test_half_precision_logits_are_widened_first() -> None:
    logits = random_logits(16, 50).bfloat16()
    for names in ((), ("temperature", "repetition_penalty")):
        settings = settings_of(fields_of(*names))
        for ours, wide in zip(draw(logits, settings), draw(logits.float(), settings), strict=True):
            assert torch.equal(ours, wide)


# ---- a few bans and nothing else: on their columns, beside the filters

BANS: dict[str, dict[str, Any]] = {
    "min_new_tokens": dict(min_new_tokens=2, stop_ids=(2, 3)),
    "suppress_tokens": dict(suppress_tokens=(0, 7, 7)),
    "begin_suppress_tokens": dict(begin_suppress_tokens=(1, 8)),
    "all, which overlap": dict(
        min_new_tokens=2, stop_ids=(2, 3, 99_999_999, -1), suppress_tokens=(0, 3), begin_suppress_tokens=(2, 0, 8)
    ),
}


def banned(more: dict[str, Any], **fields: Any) -> SamplingSettings:
    return SamplingSettings(**dict(max_new_tokens=4) | more | fields)


def choose_at_ages(logits: Tensor, settings: SamplingSettings, seed: int = 0) -> Choice:
    """One token for each row of logits [B, V]; row b has b mod 4 tokens already."""
    ages = torch.arange(len(logits), device=logits.device) % 4
    keys = torch.arange(len(logits), device=logits.device) * 7919 + seed
    inverse = torch.tensor([1 / settings.temperature], device=logits.device)
    return choose(logits, settings, keys, ages, inverse, ages, seen=None, entropy=True)


def assert_both_ways_agree(logits: Tensor, settings: SamplingSettings, seed: int = 0) -> Choice:
    """Bans by columns give what filters give, and leave the logits as they were."""
    before = logits.clone()
    with mock.patch.object(sampling, "filter_logits", side_effect=AssertionError("the slow way was taken")):
        columns = choose_at_ages(logits, settings, seed)
    assert torch.equal(logits.nan_to_num(123.0), before.nan_to_num(123.0))
    with (
        mock.patch.object(sampling, "_FEW", 0),
        mock.patch.object(sampling, "filter_logits", wraps=filter_logits) as slow,
    ):
        filters = choose_at_ages(logits, settings, seed)
    assert slow.call_count == 1
    assert torch.equal(columns.tokens, filters.tokens)
    for ours, theirs in zip(columns[1:], filters[1:], strict=True):
        assert ours is not None
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5, equal_nan=True)
    return columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bans", BANS)
def test_bans_by_columns_are_bans(bans: str, greedy: bool, temperature: float, dtype: torch.dtype) -> None:
    settings = banned(BANS[bans], greedy=greedy, temperature=temperature)
    logits = random_logits(64, 3000, scale=3.0)
    logits[:, :10] += 8  # or the banned would hardly be missed
    logits[:, 11] = -math.inf
    choice = assert_both_ways_agree(logits.to(dtype), settings)
    assert (choice.tokens >= 0).all()
    if not greedy:
        assert (choice.logps > choice.plain_logps + 1e-3).any(), "nothing was banned"
        oldest = choice.logps[3::4], choice.plain_logps[3::4]  # of them, only what is suppressed for good is taken
        assert torch.equal(*oldest) == (not settings.suppress_tokens)


def odd_rows(vocabulary: int) -> Tensor:
    """Rows that a ban of the tokens 2, 3, 5 and 9 may go wrong on, each four times: for four ages."""
    rows = random_logits(14, vocabulary)
    low = torch.finfo(torch.bfloat16).min / 2  # the lowest would not survive a temperature below 1
    rows[0, 5] = math.nan  # banned
    rows[1, 6] = math.nan  # free
    rows[2, 5] = math.inf
    rows[3, 6] = math.inf
    rows[4] = -math.inf
    rows[5, [2, 3, 5, 9]] = -math.inf  # nothing to ban
    rows[6, [2, 5]] = 200.0  # all but everything is banned
    rows[7, [2, 3, 5, 9]] = -200.0  # all but nothing
    rows[8:12] = -math.inf  # nothing is left:
    rows[8, [2, 3, 5, 9]] = torch.tensor([1.0, 2.0, 3.0, 2.5])
    rows[9, [2, 3, 5, 9]] = 1.5  # and the best are several
    rows[10, [3, 9]] = torch.tensor([-4.0, low])
    rows[11, [2, 3, 5, 9]] = torch.tensor([math.nan, 1.0, 1.0, math.inf])
    rows[12] = low  # as masks are written that shall not be infinite
    rows[12, [2, 9]] = 1.0
    rows[13, 5] = low
    return rows.repeat_interleave(4, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
@pytest.mark.parametrize("greedy", [False, True])
def test_bans_by_columns_know_the_odd_rows(greedy: bool, temperature: float, dtype: torch.dtype) -> None:
    settings = banned(
        dict(min_new_tokens=1, stop_ids=(2,), suppress_tokens=(3, 5), begin_suppress_tokens=(9,)),
        greedy=greedy,
        temperature=temperature,
    )
    tokens = torch.stack(
        [assert_both_ways_agree(odd_rows(24).to(dtype), settings, seed).tokens for seed in range(20)], 1
    )
    broken = (tokens < 0).all(1).unflatten(0, (14, 4))
    assert broken[[0, 1, 2, 3, 4, 11]].all()
    assert torch.equal(tokens[32], torch.full((20,), 5)), "of what is banned, the best"
    drawn = set(tokens[36].tolist())  # of four equal ones, age 0
    assert drawn == ({2} if greedy else {2, 3, 5, 9})
    assert set(tokens[37].tolist()) <= {2, 9}, "later, two of them are free"


@st.composite
def ban_cases(draw: st.DrawFn) -> tuple[Tensor, SamplingSettings]:
    """Small vocabularies, coarse logits, and any number of bans: now and then, all there is."""
    vocabulary = draw(st.integers(2, 12))
    values = st.sampled_from([-math.inf, -math.inf, -3.0, 0.0, 0.5, 2.0, 100.0])
    odd = draw(st.sampled_from([0.0, 0.0, 0.0, math.nan, math.inf]))
    logits = torch.tensor(draw(st.lists(st.lists(values, min_size=vocabulary, max_size=vocabulary), min_size=4)))
    logits = logits.reshape(-1, vocabulary)
    if len(logits):
        logits[draw(st.integers(0, len(logits) - 1)), draw(st.integers(0, vocabulary - 1))] += odd
    tokens = st.lists(st.integers(0, vocabulary - 1), max_size=vocabulary).map(tuple)
    settings = SamplingSettings(
        max_new_tokens=4,
        greedy=draw(st.booleans()),
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
        min_new_tokens=draw(st.integers(0, 3)),
        stop_ids=draw(tokens),
        suppress_tokens=(*draw(tokens), 0),
        begin_suppress_tokens=draw(tokens),
    )
    return logits, settings


@given(ban_cases())
@hypothesis_settings(max_examples=200, deadline=None)
def test_bans_by_columns_agree_on_anything(case: tuple[Tensor, SamplingSettings]) -> None:
    assert_both_ways_agree(*case)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*", "ignore::RuntimeWarning:numpy.*")
def test_bans_by_columns_agree_in_the_kernels(greedy: bool) -> None:
    from gruppo.engine import kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = banned(BANS["all, which overlap"], greedy=greedy, temperature=0.8)
    logits = torch.cat([random_logits(8, 150), odd_rows(150)[::3]]).to(device)
    with mock.patch.object(sampling, "sample_tokens", kernels.sample_tokens):
        tokens = assert_both_ways_agree(logits, settings).tokens
    assert (tokens[:8] >= 0).all()


def test_which_bans_are_few() -> None:
    example = dict(min_new_tokens=4, stop_ids=(2,), begin_suppress_tokens=(2, 7), suppress_tokens=(5,))
    assert few_bans(banned(example, max_new_tokens=9), 10) == ((2, 4), (5, sys.maxsize), (7, 1))
    for bans in BANS.values():
        assert few_bans(banned(bans), 12)
        assert few_bans(banned(bans, temperature=0.5), 12)
        assert few_bans(banned(bans, greedy=True, top_k=5, top_p=0.5, min_p=0.1), 12), "greedy looks at none of these"
        for other in (
            dict(repetition_penalty=1.1),
            dict(forced_bos_token_id=4),
            dict(forced_eos_token_id=(2,)),
            dict(top_k=5),
            dict(top_p=0.5),
            dict(min_p=0.1),
        ):
            assert not few_bans(banned(bans, **other), 12), other
    assert not few_bans(banned({}), 12)
    assert not few_bans(banned({}, min_new_tokens=2), 12), "there is no end to forbid"
    assert not few_bans(banned({}, stop_ids=(2, 3)), 12), "ends are not forbidden"
    assert not few_bans(banned({}, min_new_tokens=2, stop_ids=(12, -1)), 12), "none of them can be drawn"
    many = banned({}, suppress_tokens=tuple(range(64)))
    assert len(few_bans(many, 100)) == 64
    assert not few_bans(banned({}, suppress_tokens=tuple(range(65))), 100)
    assert few_bans(banned({}, suppress_tokens=(5,), stop_ids=tuple(range(100))), 100) == ((5, sys.maxsize),)


def test_bans_by_columns_depend_on_no_value() -> None:
    """As the filters do not: on the meta device there are none."""
    for greedy in (False, True):
        settings = banned(BANS["all, which overlap"], greedy=greedy)
        choice = choose_at_ages(torch.empty(6, 50, device="meta"), settings)
        assert [x.shape for x in choice if x is not None] == [(6,)] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bans", BANS)
def test_captured_bans_agree_with_filters(bans: str, greedy: bool, dtype: torch.dtype) -> None:
    settings = banned(BANS[bans], greedy=greedy, temperature=0.9)
    logits = torch.cat([random_logits(24, 60_000, scale=3.0), odd_rows(60_000)]).to("cuda", dtype)
    logits[:24, :10] += 8
    ages = torch.arange(len(logits), device="cuda") % 4
    inverse = torch.tensor([1 / 0.9], device="cuda")
    static = torch.zeros_like(logits)

    def run(logits: Tensor) -> Choice:
        return choose(logits, settings, ages + 7919, ages, inverse, ages, seen=None, entropy=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    static.copy_(logits)
    graph.replay()
    assert torch.equal(static.nan_to_num(123.0), logits.nan_to_num(123.0))
    with mock.patch.object(sampling, "_FEW", 0):
        filters = run(logits)
    same = captured.tokens == filters.tokens  # products and sums may be contracted, which decides near ties
    assert same.float().mean() >= 0.95
    for ours, theirs in zip(captured[1:], filters[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours[same], theirs[same], rtol=1e-4, atol=1e-4, equal_nan=True)


# ---- as a CUDA graph


@pytest.mark.gpu
@pytest.mark.parametrize("names", [(name,) for name in FILTERS] + [tuple(FILTERS)[:7], ("top_k", "top_p")])
def test_a_captured_choice_is_that_of_the_cpu(names: tuple[str, ...]) -> None:
    settings = settings_of(fields_of(*names))
    logits = random_logits(32, 60_000, scale=3.0).bfloat16().float()
    seen = torch.zeros(32, 60_000, dtype=torch.bool)
    seen[:, ::2] = True
    on_cpu = [logits, torch.arange(32), torch.zeros(32).long(), torch.tensor([1 / settings.temperature])]

    def run(logits: Tensor, keys: Tensor, zeros: Tensor, inverse: Tensor, seen: Tensor) -> list[Tensor]:
        options = dict(generated=zeros, seen=seen, inverse_temperature=inverse, prompt_lengths=zeros + 1)
        scores = filter_logits(logits, settings, **options)
        return [scores, *choose(logits, settings, keys, zeros, inverse, zeros, seen, True, zeros + 1)]  # type: ignore[list-item]

    expected = run(*on_cpu, seen)
    static = [x.cuda() for x in (*on_cpu, seen)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*[torch.zeros_like(x) if i == 0 else x for i, x in enumerate(static)])  # warm-up
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(*static)
    graph.replay()
    differ = support(result[0].cpu()) != support(expected[0])
    assert differ.sum(-1).max() <= 2, "a sum in another order moves a cut by a token at most"
    same = result[1].cpu() == expected[1]
    assert same.float().mean() > 0.9
    for ours, theirs in zip(result[2:], expected[2:], strict=True):
        torch.testing.assert_close(ours.cpu()[same], theirs[same], rtol=1e-3, atol=1e-3)
