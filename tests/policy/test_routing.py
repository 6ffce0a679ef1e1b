"""The load-balancing loss: by hand, as transformers computes it, and in packs."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from gruppo.errors import ConfigError
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.modes import has_reentrant_checkpoints
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.packing import Packer
from gruppo.policy.routing import Routing, check_router, router_coefficient
from gruppo.policy.support import why_not_packed, why_not_routed
from tests.engine.models import build
from tests.policy.experts import NAMES, SHOWS_ROUTER, experts
from tests.policy.twins import RAGGED, assert_same, gradients_of, in_double, run_packed, run_slowly

IDS = torch.cat([RAGGED.batch.prompt_ids, RAGGED.batch.completion_ids], 1)
MASK = torch.cat([RAGGED.batch.prompt_mask, RAGGED.batch.completion_mask], 1)
WIDTH = RAGGED.batch.completion_ids.shape[1]
ALL_ROWS = range(len(RAGGED.batch))


def test_by_hand() -> None:
    """Two layers, two experts, a token that counts twice and one that counts once."""
    logits = [torch.tensor([[0.0, 0.0], [0.0, torch.inf]]), torch.tensor([[torch.inf, 0.0], [0.0, torch.inf]])]
    logits = [x.nan_to_num(posinf=100.0) + torch.tensor([1e-3, 0.0]) for x in logits]  # ties go to the first
    routing = Routing.of(logits, torch.tensor([2, 1]), 1)
    assert routing.chosen_E.tolist() == [4.0, 2.0]
    assert routing.tokens.item() == 6.0
    # p = (2 · ½ + 2 · 1, 2 · ½ + 1 + 1) / 6
    assert routing.probability_E.tolist() == pytest.approx([3.0, 3.0], abs=1e-2)
    assert routing.loss().item() == pytest.approx(2 * (4 / 6 * 3 / 6 + 2 / 6 * 3 / 6), abs=1e-2)


def test_the_shares_of_parts_add_up() -> None:
    torch.manual_seed(0)
    logits, repeats = torch.randn(6, 4), torch.tensor([3, 1, 1, 2, 1, 1])
    whole = Routing.of([logits], repeats, 2)
    parts = [Routing.of([logits[part]], repeats[part], 2) for part in (slice(0, 2), slice(2, 6))]
    assert (parts[0] + parts[1]).loss().item() == pytest.approx(whole.loss().item(), rel=1e-6)
    assert sum(whole.loss(part).item() for part in parts) == pytest.approx(whole.loss().item(), rel=1e-6)


def slow_loss(router_logits: Any, experts: int, top_k: int, mask: Tensor | None = None) -> Tensor:
    """In float64, token by token; transformers' own computes in float32."""
    chosen, given, tokens = torch.zeros(experts).double(), torch.zeros(experts).double(), 0
    for logits in router_logits:
        counts = torch.ones(len(logits)) if mask is None else mask.flatten()
        for row, count in zip(logits.view(-1, experts), counts, strict=True):
            if count:
                probabilities = row.softmax(-1)
                chosen[probabilities.topk(top_k).indices] += 1
                given, tokens = given + probabilities, tokens + 1
    return experts * (chosen / tokens * given / tokens).sum()


def in_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    model = experts(name).double().train()
    model.set_experts_implementation("eager")
    monkeypatch.setattr(sys.modules[type(model).__module__], "load_balancing_loss_func", slow_loss)
    return model


@pytest.mark.parametrize("name", SHOWS_ROUTER)
def test_the_slow_loss_is_that_of_transformers(name: str) -> None:
    model = experts(name)
    with torch.no_grad():
        output = model(input_ids=IDS, attention_mask=MASK, output_router_logits=True)
    slow = slow_loss(output.router_logits, 4, 2, MASK)
    assert slow.item() == pytest.approx(output.aux_loss.item(), rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("budget", [1, 20, 10**6])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", SHOWS_ROUTER)
def test_packed_rows_have_the_loss_and_the_gradient_of_padded_ones(
    name: str, share: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_double():
        model = in_float64(name, monkeypatch)
        padded = score_tokens(model, IDS, MASK, WIDTH, router_loss=True)
        padded.router_loss.backward()
        expected = gradients_of(model)
        model.zero_grad(set_to_none=True)
        policy = PackedPolicy()
        packs = Packer(RAGGED.batch, share=share, whole=True).packs(ALL_ROWS, budget)
        assert (len(packs) > 1) == (budget < 10**6)
        with policy.active(model):
            with torch.no_grad():
                first, *others = (policy.score_routed(model, pack)[1] for pack in packs)
                whole = sum(others, first)
            for pack in packs:
                whole.loss(policy.score_routed(model, pack)[1]).backward()
    assert whole.loss().item() == pytest.approx(padded.router_loss.item(), rel=1e-9)
    found = gradients_of(model)
    assert found.keys() == expected.keys()
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert total > 1e-3
    for key, gradient in expected.items():
        assert (found[key] - gradient).norm() <= 1e-9 * total, key


@pytest.mark.parametrize("name", SHOWS_ROUTER)
def test_the_loss_is_that_of_transformers(name: str) -> None:
    model = experts(name)
    with torch.no_grad():
        output = model(input_ids=IDS, attention_mask=MASK, output_router_logits=True)
        scores = score_tokens(model, IDS, MASK, WIDTH, entropy=True, router_loss=True)
        plain = score_tokens(model, IDS, MASK, WIDTH, entropy=True)
    # Positions of padded rows count from their first token; the router sees other numbers at padding only.
    assert scores.router_loss.item() == pytest.approx(output.aux_loss.item(), rel=1e-2)
    assert torch.equal(scores.logps_BT, plain.logps_BT)
    assert plain.entropy_BT is not None
    assert torch.equal(scores.entropy_BT, plain.entropy_BT)
    assert why_not_routed(model, PackedPolicy()) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", NAMES)
def test_packed_log_probs_of_experts(name: str, reentrant: bool | None) -> None:
    with in_double():
        model = experts(name).double().train()
        model.set_experts_implementation("eager")
        slow = run_slowly(model)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        assert has_reentrant_checkpoints(model) == bool(reentrant)
        assert_same(run_packed(model, PackedPolicy()), slow, 1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", NAMES)
def test_however_experts_are_multiplied(name: str, implementation: str) -> None:
    model = experts(name)
    model.set_experts_implementation(implementation)
    assert why_not_packed(model, PackedPolicy()) == []


# ---- the coefficient


def mixtral(**settings: Any) -> Any:
    return experts("mixtral", **settings)


@pytest.mark.parametrize(
    ("make", "asked", "coefficient"),
    [
        (lambda: build("llama"), None, 0.0),
        (lambda: build("llama"), 0.0, 0.0),
        (lambda: mixtral(router_aux_loss_coef=0.02), None, 0.02),
        (lambda: mixtral(router_aux_loss_coef=0.02, output_router_logits=True), None, 0.02),
        (lambda: mixtral(router_aux_loss_coef=0.02), 0.0, 0.0),
        (lambda: mixtral(router_aux_loss_coef=0.02), 0.5, 0.5),
    ],
    ids=["dense", "dense-0", "own", "own-shown", "off", "asked"],
)
def test_the_coefficient_is_the_one_asked_for_or_the_models_own(make: Any, asked: Any, coefficient: float) -> None:
    assert router_coefficient(make(), asked) == coefficient


def test_a_dense_model_has_no_router() -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.1 needs a mixture .*LlamaForCausalLM"):
        router_coefficient(build("llama"), 0.1)


def test_a_model_that_hides_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GraniteMoE did before transformers 5.18."""
    model = mixtral()
    check_router(model)
    forward = type(model).forward

    def hiding(self: Any, *args: Any, output_router_logits: Any = None, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.aux_loss = 0
        return output

    monkeypatch.setattr(type(model), "forward", hiding)
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM returns no router logits .* router_aux_loss_coef=0"):
        check_router(model)


def test_another_loss_than_this_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routing, "loss", lambda self, part=None: Tensor([7.0]))
    (reason,) = why_not_routed(mixtral(), PackedPolicy())
    assert "but 7" in reason
