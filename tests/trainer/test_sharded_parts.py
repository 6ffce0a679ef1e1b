"""What is decided where weights are sharded over processes, without processes."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy

from gruppo.algo.reduce import UpdateSize
from gruppo.audit.weights import WeightProbe
from gruppo.errors import ConfigError
from gruppo.plan import UpdatePlan, plan_whole_weights, training_bytes
from gruppo.policy.sharding import Sharding, WholeWeights, compute_dtype, shape_of, sharding_of
from gruppo.trainer.processes.sharded import SAVES_WHOLE, find_sharding, least_plan, reject_together
from gruppo.trainer.update.rows import PackedUpdate
from tests.helpers import tiny_gpt2, tiny_model
from tests.trainer.scripted import make_trainer
from tests.trainer.test_parity import rows
from tests.vision.families import FAMILIES


def accelerator(kind: DistributedType, processes: int = 2, **state: Any) -> Any:
    return SimpleNamespace(
        distributed_type=kind, num_processes=processes, state=SimpleNamespace(**state), parallelism_config=None
    )


ARGS = {
    "ds3_gather_for_generation": True,
    "gradient_checkpointing": None,
    "gradient_checkpointing_kwargs": None,
    "ddp_find_unused_parameters": None,
    "cast_lm_head_to_fp32": False,
}


def trainer_on(processes: Any, model: Any = None, *, images: bool = False, **args: Any) -> Any:
    """As far as `find_sharding` looks at it."""
    return SimpleNamespace(
        accelerator=processes,
        model=model or tiny_model(),
        args=SimpleNamespace(**(ARGS | args)),
        prompt_encoder=SimpleNamespace(takes_images=images),
    )


@pytest.mark.parametrize(
    ("kind", "state", "expected"),
    [
        (DistributedType.NO, {}, Sharding.NONE),
        (DistributedType.MULTI_GPU, {}, Sharding.NONE),
        (DistributedType.FSDP, {"fsdp_plugin": SimpleNamespace(fsdp_version=2)}, Sharding.FSDP2),
        (DistributedType.DEEPSPEED, {"deepspeed_plugin": SimpleNamespace(zero_stage=2)}, Sharding.NONE),
        (DistributedType.DEEPSPEED, {"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, Sharding.ZERO3),
    ],
)
def test_who_holds_the_weights(kind: DistributedType, state: dict[str, Any], expected: Sharding) -> None:
    assert sharding_of(accelerator(kind, **state)) is expected
    assert expected.is_sharded == (expected is not Sharding.NONE)


def test_the_first_kind_of_fsdp_is_refused_with_the_line_to_change() -> None:
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        sharding_of(accelerator(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(fsdp_version=1)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"dynamic_sampling": True}, "dynamic_sampling=True cannot work"),
        ({"eval_benchmarks": ["gsm8k"]}, "eval_benchmarks cannot work"),
        ({"tool_loop": object()}, "tools .* cannot work"),
        ({"tool_loop": object(), "max_tool_calling_iterations": 0}, None),
        ({"dynamic_sampling": True, "together": False}, None),
        ({"dynamic_sampling": True, "custom_rollout": object()}, None),
        ({"dynamic_sampling": True, "num_processes": 1}, None),
        ({"dynamic_sampling": True, "sharding": Sharding.ZERO3}, "ds3_gather_for_generation=True"),
    ],
)
def test_features_in_which_only_some_processes_sample(change: dict[str, Any], named: str | None) -> None:
    facts = {
        "dynamic_sampling": False,
        "eval_benchmarks": None,
        "max_tool_calling_iterations": None,
        "tool_loop": None,
        "custom_rollout": None,
        "together": True,
        "num_processes": 2,
        "sharding": Sharding.FSDP2,
        **change,
    }
    trainer = SimpleNamespace(
        args=SimpleNamespace(**facts),
        backend=SimpleNamespace(lockstep=facts["together"]),
        accelerator=SimpleNamespace(num_processes=facts["num_processes"]),
        tool_loop=facts["tool_loop"],
        custom_rollout=facts["custom_rollout"],
        sharding=facts["sharding"],
    )
    if named is None:
        reject_together(trainer)
    else:
        with pytest.raises(ConfigError, match=named):
            reject_together(trainer)


def test_processes_agree_on_the_smallest_plan() -> None:
    others = torch.tensor([[50, 900, 0], [70, 80, -1]])
    together = SimpleNamespace(device="cpu", gather=lambda mine: torch.cat([mine, others]))
    assert least_plan(together, UpdatePlan(60, 100, checkpointing=False)) == UpdatePlan(50, 80, checkpointing=True)


@pytest.mark.parametrize(
    ("size", "free", "expected"),
    [(30, 100, "keep"), (31, 100, "free"), (60, 100, "free"), (61, 100, None), (1, 0, None)],
)
def test_what_becomes_of_gathered_weights(size: int, free: int, expected: str | None) -> None:
    assert plan_whole_weights(size, free) == expected


def test_only_ones_own_share_of_gradients_is_counted() -> None:
    class Share(torch.Tensor):
        def to_local(self) -> Any:
            return torch.zeros(3)

    share = torch.zeros(6).as_subclass(Share).requires_grad_()
    assert training_bytes([share]) == 3 * 3 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_whole_weights_follow_the_model_and_can_be_given_back(tied: bool) -> None:
    model = tiny_model(seed=1, tie_word_embeddings=tied)
    whole = WholeWeights(model, lambda: model, dtype=torch.bfloat16, device=torch.device("cpu"))
    asked: list[int] = []
    whole.plan = lambda size: asked.append(size) or "free"  # type: ignore[func-returns-value]
    assert not whole.is_held
    assert whole.bytes == 2 * sum(p.numel() for p in model.parameters())
    whole.refresh()
    first = whole.version
    assert asked == [whole.bytes]
    ids = torch.arange(7)[None]
    assert torch.equal(whole.module(ids).logits, tiny_model(seed=1, tie_word_embeddings=tied).bfloat16()(ids).logits)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    whole.refresh()
    assert whole.version != first
    assert torch.equal(whole.module.lm_head.weight, model.lm_head.weight.bfloat16())
    assert (whole.module.lm_head.weight is whole.module.model.embed_tokens.weight) == tied
    whole.drop()
    assert not whole.is_held
    whole.refresh()
    assert whole.is_held
    assert asked == [whole.bytes], "it is planned once"
    assert whole.module.generation_config is model.generation_config


FULLY = accelerator(DistributedType.FSDP, fsdp_plugin=SimpleNamespace(fsdp_version=2))
STAGE_2 = accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=SimpleNamespace(zero_stage=2))
STAGE_3 = accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=SimpleNamespace(zero_stage=3))


@pytest.mark.parametrize(
    ("has", "processes", "named"),
    [
        ({"cast"}, FULLY, "cast_lm_head_to_fp32=True is not available under FSDP2"),
        ({"quantised"}, STAGE_3, "A quantised model is not available under DeepSpeed ZeRO-3"),
        ({"images"}, FULLY, "Prompts with images are not available under FSDP2"),
        ({"images"}, STAGE_2, "Prompts with images are not available under DeepSpeed with several processes"),
        ({"images", "reentrant"}, accelerator(DistributedType.MULTI_GPU), "'use_reentrant': False}"),
        ({"images", "reentrant model"}, accelerator(DistributedType.MULTI_GPU), "Use gradient_checkpointing_kwargs="),
        ({"images", "used"}, accelerator(DistributedType.MULTI_GPU), "ddp_find_unused_parameters=False is not avail"),
        ({"images", "used"}, accelerator(DistributedType.NO, processes=1), None),
        ({"reentrant", "used"}, accelerator(DistributedType.MULTI_GPU), None),
        (
            {"reentrant", "search"},
            accelerator(DistributedType.MULTI_GPU),
            "ddp_find_unused_parameters=True cannot work",
        ),
        ({"reentrant model", "search"}, accelerator(DistributedType.MULTI_CPU), "parameters=True cannot work"),
        ({"reentrant", "search"}, accelerator(DistributedType.NO, processes=1), None),
        ({"reentrant", "search"}, STAGE_2, None),
        ({"images", "reentrant"}, accelerator(DistributedType.NO, processes=1), None),
        ({"cast", "quantised", "images"}, accelerator(DistributedType.MULTI_GPU), None),
        ({"vision", "reentrant"}, accelerator(DistributedType.MULTI_GPU), "Freeze them .requires_grad_"),
        ({"vision", "used"}, accelerator(DistributedType.MULTI_CPU), "leave out use_reentrant=True and ddp_find_unus"),
        ({"vision", "reentrant", "frozen"}, accelerator(DistributedType.MULTI_GPU), None),
        ({"vision", "reentrant"}, accelerator(DistributedType.NO, processes=1), None),
        ({"vision"}, accelerator(DistributedType.MULTI_GPU), None),
        (set(), FULLY, None),
    ],
)
def test_models_that_cannot_be_spread(has: set[str], processes: Any, named: str | None) -> None:
    model = FAMILIES["qwen2_vl"].model() if "vision" in has else tiny_model()
    model.is_quantized = "quantised" in has
    if "frozen" in has:
        model.model.visual.requires_grad_(False)
    if "reentrant model" in has:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    args = {"gradient_checkpointing_kwargs": {"use_reentrant": True}} if "reentrant" in has else {}
    args |= {"ddp_find_unused_parameters": "search" in has} if has & {"used", "search"} else {}
    trainer = trainer_on(processes, model, images="images" in has, cast_lm_head_to_fp32="cast" in has, **args)
    with nullcontext() if named is None else pytest.raises((NotImplementedError, ConfigError), match=named):
        find_sharding(trainer)


class Cut(torch.Tensor):
    """A share of a weight, as far as one is recognised."""

    def full_tensor(self) -> Any:
        raise AssertionError("nobody asks for it")


@pytest.mark.parametrize(
    ("asked", "cut", "named"),
    [
        (ParallelismConfig(tp_size=2), False, "tp_size above 1 .*Pass a whole model and use data parallelism"),
        (ParallelismConfig(cp_size=2), False, "cp_size above 1"),
        (ParallelismConfig(dp_shard_size=2), False, None),
        (None, True, "The model's weights: tensor, .* cannot work here"),
        (None, False, None),
    ],
)
@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_GPU])
def test_parallelism_that_no_config_of_ours_has_seen(
    kind: DistributedType, asked: Any, cut: bool, named: str | None
) -> None:
    processes, model = accelerator(kind), tiny_model()
    processes.parallelism_config = asked
    if cut:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.as_subclass(Cut))
    with nullcontext() if named is None else pytest.raises(ConfigError, match=named):
        assert find_sharding(trainer_on(processes, model)) is Sharding.NONE


def test_fsdp_that_accelerate_would_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpus = accelerator(DistributedType.MULTI_CPU)
    with pytest.raises(ConfigError, match="FSDP was requested, but accelerate ignores it on CPUs"):
        find_sharding(trainer_on(on_cpus, fsdp_plugin_args={"fsdp_version": 2}))
    assert find_sharding(trainer_on(on_cpus)) is Sharding.NONE
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="FSDP was requested"):
        find_sharding(trainer_on(on_cpus))
    assert find_sharding(trainer_on(accelerator(DistributedType.NO, processes=1))) is Sharding.NONE


@pytest.mark.parametrize("gathers", [True, False])
def test_only_zero3_can_leave_weights_where_they_are(gathers: bool, caplog: pytest.LogCaptureFixture) -> None:
    for processes, effect in ((accelerator(DistributedType.NO), False), (FULLY, False), (zero3(), True)):
        caplog.clear()
        find_sharding(trainer_on(processes, ds3_gather_for_generation=gathers))
        assert ("ds3_gather_for_generation=False has no effect" in caplog.text) == (not gathers and not effect)


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_layers_that_are_computed_again_without_their_noise(recomputes: bool, share: float) -> None:
    plugin = SimpleNamespace(fsdp_version=2, activation_checkpointing=recomputes)
    for model in (tiny_model(attention_dropout=share), tiny_gpt2(resid_pdrop=share, embd_pdrop=0.0, attn_pdrop=0.0)):
        trainer = trainer_on(accelerator(DistributedType.FSDP, fsdp_plugin=plugin), model)
        refused = pytest.raises(ConfigError, match="Set gradient_checkpointing=True instead, or train without")
        with refused if recomputes and share else nullcontext():
            find_sharding(trainer)


def in_type(dtype: torch.dtype | None, **other: torch.dtype | None) -> MixedPrecisionPolicy:
    """The policy that accelerate makes from mixed_precision, or another."""
    return MixedPrecisionPolicy(**{"param_dtype": dtype, "reduce_dtype": dtype, "output_dtype": dtype, **other})


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("policy", "args", "expected"),
    [
        (in_type(BF16), {}, in_type(BF16, reduce_dtype=FP32)),
        (in_type(FP16), {"fsdp_plugin_args": None}, in_type(FP16, reduce_dtype=FP32)),
        (in_type(BF16), {"fsdp_plugin_args": {"fsdp_version": 2}}, in_type(BF16, reduce_dtype=FP32)),
        (in_type(BF16), {"fsdp_plugin_args": {"mixed_precision_policy": "bf16"}}, in_type(BF16)),
        (in_type(BF16, output_dtype=FP32), {}, in_type(BF16, output_dtype=FP32)),
        (in_type(BF16, reduce_dtype=None), {}, in_type(BF16, reduce_dtype=None)),
        (in_type(FP32), {}, in_type(FP32)),
        (None, {}, None),
    ],
)
def test_fsdp2_sums_gradients_in_float32(policy: Any, args: dict[str, Any], expected: Any) -> None:
    plugin = SimpleNamespace(fsdp_version=2, mixed_precision_policy=policy)
    find_sharding(trainer_on(accelerator(DistributedType.FSDP, fsdp_plugin=plugin), **args))
    assert plugin.mixed_precision_policy == expected


def zero3(**zero: Any) -> Any:
    plugin = SimpleNamespace(zero_stage=3, deepspeed_config={"zero_optimization": {"stage": 3, **zero}})
    made = accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
    made.is_main_process, made.mixed_precision = True, "bf16"
    return made


@pytest.mark.parametrize(("set_to", "says"), [({}, True), ({SAVES_WHOLE: False}, True), ({SAVES_WHOLE: True}, False)])
def test_saved_models_are_whole_under_zero3(
    set_to: dict[str, Any], says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    processes = zero3(**set_to)
    find_sharding(trainer_on(processes))
    assert processes.state.deepspeed_plugin.deepspeed_config["zero_optimization"][SAVES_WHOLE] is True
    assert ("zero3_save_16bit_model" in caplog.text) == says


def test_deepspeed_that_is_passed_over_is_an_error() -> None:
    trainer = trainer_on(accelerator(DistributedType.MULTI_CPU), deepspeed_plugin=object())
    with pytest.raises(ConfigError, match="ignores it with ACCELERATE_USE_CPU=true"):
        find_sharding(trainer)


@pytest.mark.parametrize(("precision", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", None)])
def test_zero3_samples_in_the_type_that_it_trains_in(precision: str, expected: Any) -> None:
    processes = zero3()
    processes.mixed_precision = precision
    assert compute_dtype(processes, Sharding.ZERO3) is expected


def test_a_share_of_zero3_is_known_by_its_whole() -> None:
    share = torch.nn.Parameter(torch.empty(0))
    share.ds_shape, share.ds_tensor = torch.Size([6, 2]), torch.zeros(6)
    assert shape_of(share) == (6, 2)
    assert shape_of(torch.zeros(3, 2)) == (3, 2)
    assert training_bytes([share]) == 3 * 6 * 4
    probe = WeightProbe([share])
    share.ds_tensor[:3] = 1
    assert probe.changed() == 0.5


@pytest.mark.parametrize("spread", [True, False])
def test_a_process_that_knows_its_entropies_enters_the_collectives_of_one_that_does_not(
    spread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other waits for it: rows that stand still are run for their entropies, and sharded weights in step."""
    trainer = make_trainer("grpo", tmp_path)
    trainer.sharding = Sharding.FSDP2 if spread else Sharding.NONE
    entered: list[str] = []
    for name in ("gather", "reduce"):
        monkeypatch.setattr(
            trainer.accelerator, name, lambda value, name=name, **options: entered.append(name) or value
        )
    seen = []
    for known in (True, False):
        batch = rows()
        batch.advantages = torch.zeros(len(batch))
        batch.engine_entropies = torch.ones(batch.completion_ids.shape) if known else None
        update = PackedUpdate.of([batch], UpdateSize(4, 24, 1))
        with trainer.packed.active(trainer.model):
            trainer._run_skipped_rows(trainer.model, update, update.packer(share=True), UpdatePlan(99, 99, False))
        seen.append((list(entered), bool(update.ran_B.any())))
        entered.clear()
    assert seen == [(["gather"] * spread, False), (["gather"] * spread, True)]
