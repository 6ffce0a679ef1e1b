"""Padded rows against single ones, for models whose layers are not all standard attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from gruppo import GRPOTrainer
from gruppo.errors import ParityError
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.support import batch_of
from gruppo.rollout.hf import TransformersBackend
from gruppo.trainer.update import padding
from gruppo.trainer.update.padding import PaddingReport, compare_padding
from gruppo.types import TrainBatch
from tests.policy.families import family
from tests.trainer.runs import make

SPARSE = ["deepseek_v32", "glm_moe_dsa"]
RIGHT = ["mamba2", "lfm2", "lfm2_moe", "lfm3", "llama4"]


def rows(*lengths: tuple[int, int]) -> TrainBatch:
    """Rows of random prompts and completions of these lengths."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 100, (count,), generator=generator).tolist()

    return batch_of([(ids(prompt), ids(completion)) for prompt, completion in lengths], torch.device("cpu"))


RAGGED = rows((29, 5), (3, 12), (12, 7), (20, 4))


def sampler_of(model: Any) -> Any:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    return TransformersBackend(lambda: model, config, stop_ids=(1,)).logps_of


def compare(model: Any, batch: TrainBatch = RAGGED, **options: Any) -> PaddingReport:
    return compare_padding(model, batch, sampler_of(model), rows=4, **options)


# ---- the comparison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT)
def test_models_that_leave_padding_out_pass(name: str, dtype: torch.dtype) -> None:
    report = compare(family(name).to(dtype))
    assert report.ok
    assert report.scoring < 1e-5
    assert report.sampling is not None
    assert report.sampling < 1e-5
    assert report.dtype == "float32"
    assert report.limit <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPARSE)
def test_keys_that_are_chosen_among_padding_are_found(name: str, dtype: torch.dtype) -> None:
    report = compare(family(name).to(dtype))
    assert not report.ok
    assert report.scoring > 0.01


@pytest.mark.parametrize("name", SPARSE)
def test_rows_too_short_for_a_choice_pass(name: str) -> None:
    assert compare(family(name, index_topk=64)).ok


def test_a_convolution_that_reads_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 too, whose rounding is as large."""
    from transformers.models.lfm2 import modeling_lfm2

    monkeypatch.setattr(modeling_lfm2, "apply_mask_to_padding_states", lambda hidden, mask: hidden)
    report = compare(family("lfm2").bfloat16())
    assert report.scoring > 1e-3
    assert not report.ok


def test_the_tokens_that_are_sampled_again_are_those_of_the_row() -> None:
    model = family("lfm2")
    batch = rows((9, 6), (9, 6))
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], 1)
    expected = score_tokens(model, ids, torch.ones_like(ids), 4).logps_BT
    assert torch.allclose(sampler_of(model)(ids.tolist(), 4), expected, atol=1e-5)
    ids[:, -2] = 1  # the end of a turn
    expected = score_tokens(model, ids, torch.ones_like(ids), 4).logps_BT
    assert torch.allclose(sampler_of(model)(ids.tolist(), 4), expected, atol=1e-5)


def test_a_sampler_that_computes_something_else_is_found() -> None:
    model = family("lfm2")

    def off(rows: Any, last: int) -> Tensor:
        return sampler_of(model)(rows, last) + 0.05

    report = compare_padding(model, RAGGED, off, rows=4)
    assert report.scoring < 1e-5
    assert report.sampling == pytest.approx(0.05, rel=1e-3)
    assert not report.ok


def test_enough_heads_that_choose_have_no_ties() -> None:
    """The choice is among equals, and so depends on padding, only where all heads score several keys 0."""
    assert compare(family("deepseek_v32", index_n_heads=32)).ok


# ---- in a run

LONG = [{"prompt": "abcdefgh" * (1 + 3 * (i % 3))} for i in range(4)]
SHORT = [{"prompt": "a" * (1 + i % 3)} for i in range(4)]


def trainer(folder: Path, name: str, prompts: Any = LONG, model: Any = None, **settings: Any) -> Any:
    spread = lambda completions, **_: [float(i % 2) for i in range(len(completions))]  # noqa: E731
    model = family(name) if model is None else model
    dataset = Dataset.from_list(prompts)
    return make(folder, GRPOTrainer, model=model, dataset=dataset, rewards=spread, **settings)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"beta": 0.1}])
@pytest.mark.parametrize("name", SPARSE)
def test_a_run_that_would_learn_from_wrong_log_probs_stops(name: str, settings: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, name, **settings)
    before = {key: weight.detach().clone() for key, weight in run.model.named_parameters()}
    with pytest.raises(ParityError, match=r"nats.*layers of the kind indexed_attention.*parity_check='off'"):
        run.train()
    assert all(torch.equal(weight, before[key]) for key, weight in run.model.named_parameters())
    trainer(tmp_path / "off", name, parity_check="off", max_steps=1, **settings).train()


@pytest.mark.parametrize("name", RIGHT)
def test_a_run_of_a_model_that_leaves_padding_out_goes_on(name: str, tmp_path: Path) -> None:
    trainer(tmp_path, name).train()


def test_prompts_are_sampled_alone_where_padding_changes_what_is_sampled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MiniMax-01 as published, linear layers first: with padding, every token but the first is sampled wrongly."""
    run = trainer(tmp_path, "minimax")
    run.train()
    assert "MiniMaxForCausalLM does not sample a prompt that is padded" in caplog.text
    assert "layers of the kind linear_attention" in caplog.text
    assert (run.backend.padding.alone, run.padding.alone) == (True, False)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"beta": 0.1}, {"gradient_accumulation_steps": 2}])
def test_rows_are_run_alone_where_padding_changes_their_scores(
    settings: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, "deepseek_v4", **settings)
    run.train()
    assert "Rows are run one at a time" in caplog.text
    assert (run.backend.padding.alone, run.padding.alone) == (True, True)
    assert run.state.global_step == 2


def test_a_row_alone_has_the_scores_and_gradients_of_no_padding(tmp_path: Path) -> None:
    """What a run computes after it has found out that padding matters."""
    run = trainer(tmp_path, "deepseek_v4", max_steps=1)
    run.train()
    ids = torch.cat([RAGGED.prompt_ids, RAGGED.completion_ids], 1)
    mask = torch.cat([RAGGED.prompt_mask, RAGGED.completion_mask], 1)
    logps, *_ = run._get_per_token_logps_and_entropies(run.model, ids, mask, RAGGED.completion_ids.shape[1])
    assert logps.requires_grad
    for i, ours in enumerate(logps):
        row, count = ids[i][mask[i].bool()][None], int(RAGGED.completion_mask[i].sum())
        expected = score_tokens(run.model, row, torch.ones_like(row), count).logps_BT[0]
        assert torch.allclose(ours[:count], expected, atol=1e-5)


def test_standard_attention_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "compare_padding", None)
    make(tmp_path, GRPOTrainer, packed_update=False).train()


def test_longer_rows_or_more_padding_are_checked_again(tmp_path: Path) -> None:
    """Rows within `index_topk` are right; a later generation has longer ones."""
    model = family("deepseek_v32", index_topk=12)
    order = [*SHORT, *LONG]
    run = trainer(tmp_path, "", order, model, shuffle_dataset=False, max_steps=4, num_generations=2)
    with pytest.raises(ParityError):
        run.train()
    assert 0 < run.state.global_step < 4
    assert run.padding.longest < 12
