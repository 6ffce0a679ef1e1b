"""A row is scored the same alone and beside others, and as it was sampled: its images are its own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from gruppo.data.collate import collate
from gruppo.policy.loading import placeholder_ids
from gruppo.policy.logprobs import score_tokens
from gruppo.rollout.base import group_requests
from gruppo.rollout.hf import TransformersBackend
from gruppo.types import Completion, Prompt, Rollout, SampleRequest, StopReason, TrainBatch
from tests.helpers import sharp
from tests.vision.families import FAMILIES
from tests.vision.runs import encoder_of, rows

NAMES = list(FAMILIES)
MIXED = (1, 2, 0, 1)


def sharp_family(name: str) -> tuple[Any, list[Prompt]]:
    """A model whose every input shows in its output, and prompts with one, two and no images."""
    model, processor = FAMILIES[name].make()
    return sharp(model, 4.0), encoder_of(model, processor)(rows(MIXED))


def batch_of(prompts: Sequence[Prompt], lengths: Sequence[int] = (3, 5, 2, 4)) -> TrainBatch:
    completions = [[40 + 7 * i + 3 * t for t in range(n)] for i, n in enumerate(lengths)]
    rollouts = [Rollout(p, Completion(ids, StopReason.EOS), "") for p, ids in zip(prompts, completions, strict=False)]
    return collate(rollouts, 0, torch.device("cpu"))


def scores(model: Any, batch: TrainBatch, **options: Any) -> Tensor:
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], 1)
    return score_tokens(model, ids, mask, batch.completion_ids.shape[1], vision=batch.vision, **options).logps_BT


def alone(batch: TrainBatch, row: int) -> TrainBatch:
    """A row without padding."""
    one = batch.rows(slice(row, row + 1))
    prompt, completion = one.prompt_mask[0].bool(), one.completion_mask[0].bool()
    return TrainBatch(
        one.prompt_ids[:, prompt],
        one.prompt_mask[:, prompt],
        one.completion_ids[:, completion],
        one.completion_mask[:, completion],
        vision=one.vision,
    )


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_scored_as_if_they_were_alone(name: str) -> None:
    model, prompts = sharp_family(name)
    batch = batch_of(prompts)
    weights_BT = torch.randn(batch.completion_ids.shape, generator=torch.Generator().manual_seed(0)).double()
    together = scores(model, batch)
    (together * weights_BT).sum().backward()
    expected = {key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    for i in range(len(batch)):
        single = scores(model, alone(batch, i))
        length = single.shape[1]
        torch.testing.assert_close(together[i : i + 1, :length], single, rtol=1e-5, atol=1e-5)
        (single * weights_BT[i, :length]).sum().backward()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for key, weight in model.named_parameters():
        if key in expected:
            torch.testing.assert_close(weight.grad, expected[key], rtol=1e-4, atol=1e-6 * largest.item(), msg=key)
    seeing = [g for key, g in expected.items() if "visual" in key or "vision" in key]
    assert max(gradient.abs().max() for gradient in seeing) > 1e-6, "what sees is trained"


@pytest.mark.parametrize("name", NAMES)
def test_pieces_have_their_own_images(name: str) -> None:
    model, prompts = sharp_family(name)
    batch = batch_of(prompts)
    with torch.no_grad():
        whole = scores(model, batch)
        for size in (1, 3):
            torch.testing.assert_close(scores(model, batch, batch_size=size), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_another_image_gives_other_scores(name: str) -> None:
    model, prompts = sharp_family(name)
    batch = batch_of(prompts)
    swapped = batch_of(prompts)
    first, second = prompts[0].vision, encoder_of(model, FAMILIES[name].make()[1])([rows((0, 0, 0, 1))[3]])[0].vision
    swapped.vision[0] = second  # of an image of the same size
    assert {key: value.shape for key, value in first.pixels.items()} == {k: v.shape for k, v in second.pixels.items()}
    types = {key: first.types[key] for key in first.types}
    swapped.vision[0] = type(first)(second.pixels, types)
    with torch.no_grad():
        difference = (scores(model, batch) - scores(model, swapped)).abs().amax(1)
    assert difference[0] > 1e-3
    assert difference[1:].max() < 1e-5, "and leaves the others alone"


# ---- what was sampled


class Listening(TransformersBackend):
    """Keeps the logits that tokens were sampled from."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        model = self.policy()
        generate = model.generate

        def listen(**kwargs: Any) -> Tensor:
            self.given = set(kwargs)
            output = generate(**kwargs, return_dict_in_generate=True, output_logits=True)
            self.logits = torch.stack(output.logits, 1)
            return output.sequences

        model.generate = listen
        try:
            return super().sample(requests)
        finally:
            del model.generate


def sampler(model: Any, **options: Any) -> Listening:
    config = GenerationConfig(
        max_new_tokens=6,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        eos_token_id=[1],
        suppress_tokens=placeholder_ids(model),
        use_cache=True,
    )
    return Listening(lambda: model, config, stop_ids=[1], **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("counts", [MIXED, (0, 0)], ids=["mixed", "text"])
def test_completions_are_scored_as_they_were_sampled(name: str, share: bool, counts: tuple[int, ...]) -> None:
    model, prompts = sharp_family(name)
    backend = sampler(model, share_prefill=share)
    if counts != MIXED:
        backend.sample([SampleRequest(prompts[1].ids, 2, vision=prompts[1].vision)])  # a model may remember it
        prompts = encoder_of(model, FAMILIES[name].make()[1])(rows(counts))
    per_row = [prompt for prompt in prompts for _ in range(2)]
    requests = group_requests([p.ids for p in per_row], group_size=2, vision=[p.vision for p in per_row])
    assert [request.count for request in requests] == [2] * len(prompts)
    torch.manual_seed(0)
    completions = backend.sample(requests)
    assert ("pixel_values" in backend.given) == (not share and counts == MIXED), "images are seen once per prompt"
    rollouts = [Rollout(p, completion, "") for p, completion in zip(per_row, completions, strict=True)]
    batch = collate(rollouts, 0, torch.device("cpu"))
    width = batch.completion_ids.shape[1]
    drawn = backend.logits[:, :width].log_softmax(-1).gather(2, batch.completion_ids[..., None])[..., 0]
    with torch.no_grad():
        scored = scores(model, batch)
    mask = batch.completion_mask.bool()
    torch.testing.assert_close(scored[mask], drawn[mask].to(scored), rtol=1e-4, atol=1e-4)
    assert not {token for c in completions for token in c.ids} & set(placeholder_ids(model))


def test_equal_texts_with_other_images_are_other_requests() -> None:
    _, prompts = sharp_family("qwen2_vl")
    first, other = prompts[0].vision, prompts[3].vision
    ids = [5, 6]
    requests = group_requests([ids, ids, ids], group_size=3, vision=[first, first, other])
    assert [(request.count, request.vision) for request in requests] == [(2, first), (1, other)]
    assert requests[1].first_sample == 2
