"""Sharded weights, as far as they can be tried on one process; tests/trainer/test_deepspeed.py has the rest."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gruppo.errors import ConfigError
from gruppo.policy.loading import load_again
from gruppo.policy.sharding import Sharding, WholeWeights, inference_config
from gruppo.rewards.models import score_with_model
from gruppo.trainer.construct.frozen import InStep, prepare_reward_model
from tests.helpers import tiny_model, tiny_tokenizer

TRAINING = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    "optimizer": {"type": "AdamW"},
    "scheduler": {"type": "WarmupLR"},
    "bf16": {"enabled": True},
}


def test_a_model_that_is_not_trained_has_no_optimizer() -> None:
    config = inference_config(TRAINING, 8)
    assert config["bf16"] == {"enabled": True}
    assert config.keys() == {"bf16", "zero_optimization"}
    assert config["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 64,
        "stage3_param_persistence_threshold": 80,
        "stage3_prefetch_bucket_size": 57,
    }
    assert inference_config({"zero_optimization": {"stage": 2, "offload_optimizer": {}}}, 8) == {
        "zero_optimization": {"stage": 0}
    }
    assert "optimizer" in TRAINING, "the policy's own is left alone"


def test_weights_that_are_written_without_a_note() -> None:
    model, updates = tiny_model(), [0]
    whole = WholeWeights(model, lambda: model, dtype=None, device=torch.device("cpu"), clock=lambda: updates[0])
    whole.refresh()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(model.lm_head.weight):
        model.lm_head.weight.mul_(2)
    updates[0] += 1
    whole.refresh()
    assert torch.equal(whole.module.lm_head.weight, model.lm_head.weight)


def test_a_reference_that_cannot_be_copied_is_loaded_again(tmp_path: Any) -> None:
    model = tiny_model(seed=3)
    with pytest.raises(ConfigError, match="Pass it by name"):
        load_again(model, SimpleNamespace(model_init_kwargs=None, trust_remote_code=False))
    model.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    again = load_again(model, SimpleNamespace(model_init_kwargs=None, trust_remote_code=False))
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_reward_models_keep_in_step() -> None:
    """Two processes (threads here) with five texts and one, a pass each: in every pass both take part."""
    meet, sums = threading.Barrier(2, timeout=20), [0, 0]
    passes: list[list[int]] = [[], []]

    class Sharded(nn.Module):
        def __init__(self, rank: int):
            super().__init__()
            self.rank = rank

        def forward(self, input_ids: Any, **_: Any) -> Any:
            meet.wait()  # its weights are gathered
            passes[self.rank].append(int(input_ids.shape[1]))
            return SimpleNamespace(logits=input_ids.sum(1, keepdim=True).float())

    def reduced(rank: int) -> Any:
        def reduce(own: Any, reduction: str) -> Any:
            sums[rank] = int(own)
            meet.wait()
            total = torch.tensor(sum(sums))
            meet.wait()
            return total

        return reduce

    found: dict[int, Any] = {}

    def work(rank: int, texts: list[str]) -> None:
        device = torch.device("cpu")
        model = InStep(Sharded(rank), SimpleNamespace(reduce=reduced(rank), device=device))
        found[rank] = score_with_model(model, tiny_tokenizer(), texts, tokens=1, device=device)
        model.keep_up()

    texts = [["abc", "de", "fghi", "j", "klmno"], ["pq"]]
    threads = [threading.Thread(target=work, args=(rank, texts[rank])) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(found[rank]) for rank in (0, 1)] == [5, 1]
    assert all(isinstance(score, float) for rank in (0, 1) for score in found[rank])
    assert passes == [[5, 4, 3, 2, 1], [2, 1, 1, 1, 1]]


def test_a_reward_model_is_whole_where_it_can_be() -> None:
    prepared = SimpleNamespace(prepare_model=lambda model, evaluation_mode: (model, evaluation_mode))
    assert prepare_reward_model(prepared, Sharding.FSDP2, "model") == ("model", True)
