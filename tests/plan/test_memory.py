"""The forecast of memory, on numbers worked out by hand, and what must hold of it whatever the numbers are."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.kernels.head import block_columns
from gruppo.plan import DEVICES, Device
from gruppo.plan.job import SHARDINGS, Adapter, Job
from gruppo.plan.memory import Memory, head_columns
from gruppo.plan.presets import CLASSES, preset
from gruppo.plan.terms import GIB, product

MODEL = preset("qwen2-1.5b")
EVERYWHERE = frozenset(MODEL.projections)
WEIGHTS = 1_543_714_304


def job(**changes: Any) -> Job:
    """32 prompts of 200 tokens × 16 completions of 512 on an H200, weights in bfloat16."""
    asked: dict[str, Any] = dict(rows=512, generations=16, prompt_tokens=200, completion_tokens=512, weight_bytes=2)
    return Job(MODEL, DEVICES["H200"], **(asked | changes))


def terms(memory: Memory, phase: str) -> dict[str, int]:
    (found,) = [one for one in memory.phases if one.name == phase]
    return {term.name: term.bytes for term in found.terms}


def test_an_update_term_by_term() -> None:
    memory = Memory(job())
    found = terms(memory, "update")
    program = found.pop("program")
    assert found == {
        "weights": 2 * WEIGHTS,
        "state of adamw_torch_fused": 4 * WEIGHTS,
        "gradients": 2 * WEIGHTS,
        "activations of layers": (200 + 16 * 511) * 28 * 55_296,
        "head: blocks of logits and of their gradient": 8192 * 8064 * 6,
        "head: hidden states": 8192 * 1536 * (4 + 2 + 4),
        "gradient of the head": 151_936 * 1536 * 2,
    }
    assert memory.peak.name == "update"
    assert memory.peak.bytes == program + sum(found.values())


def test_float32_weights_are_cast_for_sampling_and_for_passes() -> None:
    memory = Memory(job(weight_bytes=4))
    assert terms(memory, "sampling")["cast weights for sampling"] == 2 * MODEL.linear_weights
    assert terms(memory, "update")["cast weights"] == 2 * MODEL.shape.layer_weights
    assert "the model in a wider dtype" not in terms(memory, "parity check"), "float32 is wide enough for bfloat16"
    plain = Memory(job(weight_bytes=4, autocast=False))
    assert "cast weights for sampling" not in terms(plain, "sampling")
    assert terms(plain, "parity check")["the model in a wider dtype"] == 8 * WEIGHTS


def test_adapters_have_gradients_and_no_reference_of_their_own() -> None:
    adapter = Adapter(16, EVERYWHERE)
    trained = 28 * 16 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert adapter.weights(MODEL) == trained
    found = terms(Memory(job(adapter=adapter, reference=True)), "update")
    assert (found["adapter"], found["gradients"]) == (4 * trained, 4 * trained)
    assert found["state of adamw_torch_fused"] == 8 * trained
    assert "reference" not in found
    assert terms(Memory(job(reference=True)), "update")["reference"] == 2 * WEIGHTS


def test_quantised_layers() -> None:
    adapter = Adapter(16, EVERYWHERE)
    packed = MODEL.linear_weights - MODEL.head_weights
    for bits, width in ((4, 0.5625), (8, 1.0)):
        found = terms(Memory(job(adapter=adapter, bits=bits)), "update")
        assert found["weights"] == int(packed * width) + 2 * (WEIGHTS - packed)
        assert found["gradients"] == 2 * adapter.weights(MODEL), "adapters on packed layers are bfloat16"


@pytest.mark.parametrize(
    ("optimizer", "per_weight"),
    [
        ("adamw_torch", 4),
        ("adamw_8bit", 2),
        ("sgd", 0),
        ("lion_32bit", 4),
        ("paged_adamw_32bit", 8),
        ("unheard_of", 4),
    ],
)
def test_the_state_of_optimizers(optimizer: str, per_weight: int) -> None:
    memory = Memory(job(optimizer=optimizer))
    assert memory.states.bytes == per_weight * WEIGHTS
    assert memory.job.knows_optimizer is (optimizer != "unheard_of")


def test_what_processes_share() -> None:
    """Bytes per weight on one of eight, as in docs/scaling.md; DeepSpeed trains float32 copies of bfloat16 weights."""
    found = {}
    for sharding in SHARDINGS:
        memory = Memory(job(processes=8, sharding=sharding, weight_bytes=4))
        held = (memory.weights, memory.gradients, memory.states)
        found[sharding] = [round(term.bytes / WEIGHTS, 3) for term in held]
    assert found == {
        "none": [4, 4, 8],
        "ddp": [4, 4, 8],
        "zero1": [2, 2, 1.5],
        "zero2": [2, 0.25, 1.5],
        "zero3": [0.25, 0.25, 1.5],
        "fsdp2": [0.5, 0.5, 1],
    }
    spread = Memory(job(processes=8, sharding="fsdp2", weight_bytes=4))
    assert terms(spread, "sampling")["weights gathered for sampling"] == 2 * WEIGHTS
    assert spread.whole_weights == "keep"
    assert "parity check" in [phase.name for phase in spread.phases]
    crowded = Memory(spread.job.with_(device=Device("crowded", 989, 67, 4.8, memory=10)))
    assert "parity check" not in [phase.name for phase in crowded.phases], "no room for it: the run leaves it out"


def card(gib: float) -> Device:
    return Device("some card", 989, 67, 4.8, memory=gib)


def test_the_parity_check_takes_what_there_is() -> None:
    """Long prompts in a wide type take much; the run cuts them, and leaves the check out, before it fails with it."""
    long = job(prompt_tokens=4000, weight_bytes=4, checkpointing=False, tokens=5000, rows=16)
    values = 6 * 1536 + 5 * 1536 + 4 * 8960
    logits, head = 3 * 257 * 151_936 * 4, 151_936 * 1536 * 4
    rows = {tokens: tokens * 28 * (values + 12 * tokens) * 4 + head + logits for tokens in (4256, 512)}
    found = {gib: terms(Memory(long.with_(device=card(gib))), "parity check") for gib in (141, 50)}
    assert found[141]["one row's activations"] == rows[4256]
    assert rows[512] < 8 * WEIGHTS
    assert found[50]["one row's gradient"] == 4 * WEIGHTS + 2 * head, "of a row whose prompt is cut"
    for gib in (141, 50, 40, 20, 8):
        memory = Memory(long.with_(device=card(gib)))
        names = [phase.name for phase in memory.phases]
        assert ("parity check" in names) == (gib >= 20)
        assert memory.fits == Memory(memory.job.with_(parity=False)).fits


def test_the_parity_check_recomputes_layers_if_the_update_does() -> None:
    long = job(prompt_tokens=4000, weight_bytes=4, tokens=5000, rows=16)
    values = 6 * 1536 + 5 * 1536 + 4 * 8960 + 12 * 4256
    rest = 151_936 * 1536 * 4 + 3 * 257 * 151_936 * 4
    for checkpointing, per_token in ((False, 28 * values), (True, 28 * 1536 + values)):
        phase = next(p for p in Memory(long.with_(checkpointing=checkpointing)).phases if p.name == "parity check")
        assert phase.terms[-1].bytes == max(4256 * per_token * 4 + rest, 4 * WEIGHTS + 2 * 151_936 * 1536 * 4)
    adapter = Memory(long.with_(checkpointing=True, adapter=Adapter(16, EVERYWHERE)))
    formula = next(p for p in adapter.phases if p.name == "parity check").terms[-1].formula
    assert formula == "4,256 tokens × (28 layers × 1,536 + 103,808) × 4 B, and the head"


def test_vllm_beside_the_update_and_asleep() -> None:
    share = int(0.3 * DEVICES["H200"].memory_bytes)
    awake = Memory(job(sampler="vllm colocate", sampler_share=0.3))
    asleep = Memory(job(sampler="vllm colocate", sampler_share=0.3, sampler_sleeps=True))
    assert terms(awake, "update")["vLLM"] == terms(awake, "sampling")["vLLM"] == share
    assert "vLLM" not in terms(asleep, "update")
    assert terms(asleep, "sampling")["vLLM"] == share
    assert "vLLM" not in terms(Memory(job(sampler="vllm server")), "sampling")


def test_with_little_memory_the_run_recomputes_and_samples_in_waves() -> None:
    small = Device("small", 989, 67, 4.8, memory=22)
    memory = Memory(job().with_(device=small))
    assert memory.update_plan.checkpointing
    assert memory.rollout_plan.kv_tokens < Memory(job()).rollout_plan.kv_tokens
    assert memory.fits
    assert not Memory(job().with_(device=Device("tiny", 1, 1, 1, memory=12))).fits


def test_without_lent_memory_the_pool_stays() -> None:
    cpu = Device("CPU", 0.1, 0.1, 0.02, memory=64, kind="cpu")
    assert "KV cache" in terms(Memory(job(autocast=False).with_(device=cpu)), "update")
    assert "KV cache" not in terms(Memory(job()), "update")


@pytest.mark.parametrize("tokens", [1, 100, 4095, 8192, 30_000, 70_000])
@pytest.mark.parametrize("vocabulary", [1000, 49_152, 151_936])
def test_blocks_of_the_head_are_those_of_the_kernel(tokens: int, vocabulary: int) -> None:
    for device in ("cuda", "cpu"):
        assert head_columns(tokens, vocabulary, device) == block_columns(tokens, vocabulary, device == "cuda")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([8, 64, 512, 4096]),
    completion=st.sampled_from([1, 32, 512, 8192]),
    prompt=st.sampled_from([1, 100, 4000]),
    weight_bytes=st.sampled_from([2, 4]),
    packed=st.booleans(),
    reference=st.booleans(),
    name=st.sampled_from(CLASSES),
    memory=st.sampled_from([8.0, 24.0, 80.0, 500.0]),
)
def test_what_always_holds(
    rows: int, completion: int, prompt: int, weight_bytes: int, packed: bool, reference: bool, name: str, memory: float
) -> None:
    asked = job(
        rows=rows, completion_tokens=completion, prompt_tokens=prompt, weight_bytes=weight_bytes, packed=packed,
        reference=reference,
    ).with_(model=preset(name), device=Device("some", 300, 20, 2, memory))  # fmt: skip
    found = Memory(asked)
    for phase in found.phases:
        assert all(term.bytes >= 0 for term in phase.terms)
        assert phase.bytes <= found.peak.bytes
        assert len({term.name for term in phase.terms}) == len(phase.terms)
    assert found.pack_tokens >= min(asked.group_tokens, asked.prompt_tokens + asked.completion_tokens - 1)
    assert found.program.bytes <= found.between.bytes <= found.peak.bytes
    with_reference, without = (Memory(asked.with_(reference=choice)).between.bytes for choice in (True, False))
    assert with_reference == without + weight_bytes * asked.model.weights
    if found.fits:
        assert Memory(asked.with_(device=Device("more", 300, 20, 2, 2 * memory))).fits


def test_terms_say_how_they_were_counted() -> None:
    assert product("x", (1000, "weights"), (0.5, "B"), over=4).formula == "1,000 weights × 0.5 B / 4 processes"
    assert product("x", (1000, "weights"), (0.5, "B"), over=4).bytes == 125
    update = next(phase for phase in Memory(job()).phases if phase.name == "update")
    assert {term.formula for term in update.terms} >= {"8,376 tokens × 28 layers × 55,296 B"}
    assert Memory(job()).peak.bytes / GIB == pytest.approx(25.3, abs=0.1)
