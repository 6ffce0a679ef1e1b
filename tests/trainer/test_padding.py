"""Padded rows against single ones, for models whose layers are not all standard attention."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor

from gruppo import GRPOTrainer
from gruppo.errors import ParityError
from gruppo.policy import widening
from gruppo.policy.logprobs import score_tokens
from gruppo.policy.support import batch_of
from gruppo.rollout.hf import TransformersBackend
from gruppo.trainer.update import padding
from gruppo.trainer.update.padding import PaddingGuard, PaddingReport, compare_padding
from gruppo.types import SampleRequest, TrainBatch
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


def spread(completions: Any, **_: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def trainer(folder: Path, name: str, prompts: Any = LONG, model: Any = None, **settings: Any) -> Any:
    model = family(name) if model is None else model
    dataset = Dataset.from_list(prompts)
    return make(folder, GRPOTrainer, model=model, dataset=dataset, rewards=spread, **settings)


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"beta": 0.1}])
@pytest.mark.parametrize("name", SPARSE)
def test_a_run_that_would_learn_from_wrong_log_probs_stops(name: str, settings: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, name, **settings)
    before = {key: weight.detach().clone() for key, weight in run.model.named_parameters()}
    with pytest.raises(ParityError, match=r"nats.*layers of the kind \w+_attention.*parity_check='off'"):
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


@pytest.mark.parametrize("name", ["lfm2", "deepseek_v4"])
def test_rows_without_tokens_are_not_compared(name: str, tmp_path: Path) -> None:
    """All completions cut off and masked, or empty: there is nothing to compare, now."""
    cut = {"mask_truncated_completions": True, "generation_kwargs": {"suppress_tokens": [1]}}
    run = trainer(tmp_path / "cut", name, max_steps=1, **cut)
    run.train()
    assert (run.padding.longest, run.padding.padding, run.padding.alone) == (0, -1, False)

    def nothing(prompts: Any, trainer: Any) -> Any:
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[] for _ in prompts], "logprobs": None}

    trainer(tmp_path / "empty", name, max_steps=1, rollout_func=nothing).train()


def test_evaluation_is_checked_too(tmp_path: Path) -> None:
    evaluated = Dataset.from_list(LONG)
    with pytest.raises(ParityError):
        trainer(tmp_path / "wrong", "deepseek_v32", eval_dataset=evaluated).evaluate()
    run = trainer(tmp_path / "alone", "deepseek_v4", eval_dataset=evaluated)
    run.evaluate()
    assert run.padding.alone


def test_a_subclass_that_runs_padded_rows_itself_is_refused(tmp_path: Path) -> None:
    class Own(GRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
        ) -> Any:
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            logps = logits.log_softmax(-1)
            entropies = -(logps.exp() * logps).sum(-1)
            return logps.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropies, None

    class Wrapped(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    settings = {"router_aux_loss_coef": 0.0, "max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2}
    options = dict(model=family("deepseek_v4"), dataset=Dataset.from_list(LONG), rewards=spread, **settings)
    with pytest.raises(ParityError, match=r"runs \d padded rows in one pass.*_get_per_token_logps_and_entropies"):
        make(tmp_path / "own", Own, **options).train()
    make(tmp_path / "wrapped", Wrapped, **options).train()


def longrope() -> Any:
    """A random model whose frequencies change at 32 tokens."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 8.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 8.0, 16.0]}
    size = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    size |= {"num_hidden_layers": 3, "vocab_size": 101, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 32}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**size, **lengths, rope_parameters=rope)).eval()
    for weight in model.parameters():
        weight.data.mul_(8 if weight.ndim > 1 else 1)
    return model


def test_frequencies_that_depend_on_the_longest_row_are_found(tmp_path: Path) -> None:
    assert compare(longrope(), rows((2, 4), (50, 4))).scoring > 0.01
    prompts = [{"prompt": "ab"}, {"prompt": "abcdefgh" * 6}] * 2
    settings = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    run = trainer(tmp_path, "", prompts, longrope(), max_steps=1, shuffle_dataset=False, **settings)
    run.train()
    assert run.padding.alone


@pytest.mark.parametrize("name", ["minimax", "deepseek_v4"])
def test_a_resumed_run_makes_the_same_passes(name: str, tmp_path: Path) -> None:
    """Prompts with padding come before the checkpoint only."""
    equal = [letter * 10 for letter in "abcdefgh"]
    prompts = [{"prompt": prompt} for prompt in ["ab", "abcdefgh" * 5, "a", "abcdefgh" * 4, *equal]]
    settings = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    settings |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "shuffle_dataset": False}

    def trained(folder: str, resume: Any = None) -> Any:
        run = trainer(tmp_path / folder, name, prompts, **settings)
        run.train(resume_from_checkpoint=resume)
        return run

    whole = trained("whole")
    resumed = trained("resumed", str(tmp_path / "whole" / "checkpoint-2"))
    for ours, theirs in ((resumed.padding, whole.padding), (resumed.backend.padding, whole.backend.padding)):
        assert ours.state_dict() == theirs.state_dict()
    assert whole.backend.padding.alone
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_a_benchmark_finds_about_prompts_is_not_kept() -> None:
    """Benchmarks restore the state of the backend."""
    backend = sampler_of(family("minimax")).__self__
    before = backend.state_dict()
    backend.sample([SampleRequest([5, 6], 1), SampleRequest(list(range(5, 45)), 1)])
    assert backend.padding.alone
    backend.load_state_dict(before)
    assert backend.state_dict() == before
    assert not backend.padding.alone


def test_processes_run_rows_alone_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """These rows show nothing, but those of another process did."""
    guard = PaddingGuard(Accelerator(cpu=True), family("deepseek_v4"), active=True, sharded=False, autocast_dtype=None)
    model, batch = family("deepseek_v4"), rows((9, 6), (9, 6))
    guard.check(model, batch, sampler_of(model), rows=2)
    assert not guard.alone
    monkeypatch.setattr(padding, "any_process", lambda accelerator, flag: True)
    guard.check(model, batch, sampler_of(model), rows=2)
    assert guard.alone


@pytest.mark.parametrize("own", [RAGGED, rows((9, 6), (9, 6)), None], ids=["wrong", "right", "no tokens"])
def test_sharded_processes_make_equally_many_passes(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever each of them finds."""
    passes = []
    model, batch = family("deepseek_v32"), RAGGED if own is None else own
    if own is None:
        batch = replace(batch, completion_mask=torch.zeros_like(batch.completion_mask))
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    guard = PaddingGuard(Accelerator(cpu=True), model, active=True, sharded=True, autocast_dtype=None)
    monkeypatch.setattr(padding, "any_process", lambda accelerator, flag: True)
    with pytest.raises(ParityError) if own is RAGGED else nullcontext():
        guard.check(model, batch, None, rows=4)
    assert len(passes) == 5


def test_a_comparison_in_half_precision_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(widening, "can_widen", lambda model: False)
    model = family("lfm2").bfloat16()
    guard = PaddingGuard(Accelerator(cpu=True), model, active=True, sharded=False, autocast_dtype=None)
    for batch in (rows((4, 5), (3, 2)), RAGGED):
        guard.check(model, batch, sampler_of(model), rows=4)
    assert caplog.text.count("differences below 0.05 nats") == 1


def test_rows_keep_the_padding_that_was_asked_for(tmp_path: Path) -> None:
    widths = []
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    run = make(tmp_path, GRPOTrainer, pad_to_multiple_of=16, **settings)
    run.model.register_forward_pre_hook(
        lambda model, args, given: widths.append(given["input_ids"].shape[1]) if model.training else None,
        with_kwargs=True,
    )
    run.train()
    assert widths
    assert all(width % 16 == 0 for width in widths)


@pytest.mark.parametrize(
    "own", [{"num_beams": 2}, {"max_time": 1e-9}, {"min_new_tokens": 3}, {"prompt_lookup_num_tokens": 2}]
)
def test_own_settings_of_a_model_do_not_reach_the_comparison(own: Any) -> None:
    model = family("llama4")
    expected = sampler_of(model)([[5, 6, 7, 8, 9], [6, 7, 8, 9, 1]], 3)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert torch.equal(sampler_of(model)([[5, 6, 7, 8, 9], [6, 7, 8, 9, 1]], 3), expected)
    assert all(getattr(model.generation_config, name) == value for name, value in own.items())


def test_longer_rows_or_more_padding_are_checked_again(tmp_path: Path) -> None:
    """Rows within `index_topk` are right; a later generation has longer ones."""
    model = family("deepseek_v32", index_topk=12)
    order = [*SHORT, *LONG]
    run = trainer(tmp_path, "", order, model, shuffle_dataset=False, max_steps=4, num_generations=2)
    with pytest.raises(ParityError):
        run.train()
    assert 0 < run.state.global_step < 4
    assert run.padding.longest < 12


@pytest.mark.parametrize("backends", [("transformers", "builtin"), ("builtin", "transformers")])
def test_a_run_resumes_with_another_backend(backends: tuple[str, str], tmp_path: Path) -> None:
    """Each knows only its own state."""
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "resume_allow_changes": ["*"]}
    make(tmp_path, GRPOTrainer, rollout_backend=backends[0], **saving).train()
    run = make(tmp_path / "other", GRPOTrainer, rollout_backend=backends[1], **saving)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert run.state.global_step == 2
