"""Which models the engine refuses and why, and the backend that the trainer sees."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb

from gruppo.engine.cache import EngineCache
from gruppo.engine.support import trial, unsupported_model
from gruppo.plan import RolloutPlan
from gruppo.policy.packed import PackedPolicy
from gruppo.policy.support import hidden_window, why_not_packed
from gruppo.rollout.builtin import BuiltinBackend, why_not
from gruppo.rollout.hf import TransformersBackend
from gruppo.types import Completion, SampleRequest, StopReason
from tests.engine.models import build
from tests.helpers import in_double, tiny_tokenizer
from tests.policy.families import family

SIZE: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)

# ---- what is known to be missing


def rope(kind: str) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | (factors if kind == "longrope" else {})


def encoder_decoder() -> Any:
    size = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return tf.T5ForConditionalGeneration(tf.T5Config(**size))


def state_space() -> Any:
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1))


def convolutions() -> Any:
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**SIZE, layer_types=["conv", "full_attention"]))


def chunks() -> Any:
    return tf.Llama4ForCausalLM(tf.Llama4TextConfig(**SIZE, num_local_experts=2, intermediate_size_mlp=32))


def recurrence() -> Any:
    return tf.RecurrentGemmaForCausalLM(
        tf.RecurrentGemmaConfig(**SIZE, block_types=["recurrent", "attention"], attention_window_size=8)
    )


def bidirectional() -> Any:
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**SIZE, head_dim=16, use_bidirectional_attention=True))


def dynamic() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZE, rope_parameters=rope("dynamic")))


def longrope() -> Any:
    size = SIZE | dict(original_max_position_embeddings=32)
    return tf.Phi3ForCausalLM(tf.Phi3Config(**size, rope_parameters=rope("longrope")))


def dynamic_in_one_kind_of_layer() -> Any:
    kinds = {"full_attention": rope("dynamic"), "sliding_attention": rope("default")}
    model = build("gemma3")
    model.config.rope_parameters = kinds
    return model


def virtual_prompt() -> Any:
    return get_peft_model(build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def in_two_places() -> Any:
    model = build("llama")
    model.model.layers[2].to("meta")  # as with device_map="auto" and a model that one device cannot hold
    return model


class Wrapped(nn.Module):
    """What DDP looks like from outside."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module


def own_attention() -> Any:
    size = dict(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    return tf.BloomForCausalLM(tf.BloomConfig(**size))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (encoder_decoder, "it is an encoder-decoder model"),
        (encoder_decoder, "its forward takes no logits_to_keep, position_ids"),
        (state_space, "it keeps a recurrent state"),
        (state_space, "its forward takes no past_key_values, position_ids"),
        (recurrence, "it keeps a recurrent state"),
        (convolutions, "it has layers of the kind conv"),
        (chunks, "it has layers of the kind chunked_attention"),
        (bidirectional, "its attention is not causal"),
        (lambda: family("gemma4"), "its last 2 layers attend to the keys and values of earlier ones"),
        (lambda: family("gemma3n"), "its last 2 layers attend to the keys and values of earlier ones"),
        (dynamic, "its rotary embedding (dynamic) depends on the longest sequence of a batch"),
        (dynamic_in_one_kind_of_layer, "its rotary embedding (dynamic) depends on the longest sequence of a batch"),
        (longrope, "its rotary embedding (longrope) depends on the longest sequence of a batch"),
        (virtual_prompt, "its adapter learns virtual prompt tokens"),
        (lambda: Wrapped(virtual_prompt()), "its adapter learns virtual prompt tokens"),
        (in_two_places, "its weights are on several devices (cpu, meta)"),
        (lambda: build("llama").to("meta"), "there are no kernels for meta"),
        (own_attention, "BloomForCausalLM does not support custom attention functions"),
        (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
    ],
)
def test_what_the_engine_lacks_is_named(make: Callable[[], Any], reason: str) -> None:
    assert reason in unsupported_model(make())


def test_nothing_is_held_against_a_decoder_with_or_without_adapters() -> None:
    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert unsupported_model(model) == unsupported_model(Wrapped(model)) == unsupported_model(build("llama")) == []
    assert trial(model) is trial(Wrapped(model)) is trial(build("llama").double()) is None


def test_reasons_of_settings_and_model_come_together() -> None:
    config = GenerationConfig(max_new_tokens=4, num_beams=2)
    assert [reason.partition(":")[0] for reason in why_not(dynamic(), config)] == [
        "num_beams=2",
        "its rotary embedding (dynamic) depends on the longest sequence of a batch",
    ]
    assert why_not(build("llama"), GenerationConfig(max_new_tokens=4)) == []
    assert why_not(build("llama"), GenerationConfig(max_new_tokens=4), autocast_dtype=torch.bfloat16) == []


# ---- what only a trial finds


class OwnScores(LlamaAttention):
    """Attention that never asks which function it should use."""

    def forward(self, hidden_states: Any, position_embeddings: Any, past_key_values: Any = None, **_: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class OwnMask(LlamaAttention):
    """Attention that sees no further back than three tokens, by a mask that it makes itself."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        n = hidden_states.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1) + torch.full((n, n), -torch.inf).tril(-3)
        return super().forward(hidden_states, position_embeddings, attention_mask=mask[None, None], **kwargs)


class Reserved(LlamaDecoderLayer):
    """A layer that keeps what it does not know to itself."""

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        embeddings = kwargs["position_embeddings"]
        return super().forward(
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=embeddings,
        )


class OwnPositions(tf.LlamaForCausalLM):
    """Counts positions by itself, as if a batch were one sequence."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)


class Drifting(tf.LlamaForCausalLM):
    """A little different for one token in the engine's hands; by rows, so that tokens of a batch differ."""

    drift = 0.02

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids, past_key_values=past_key_values, **kwargs)
        if isinstance(past_key_values, EngineCache):
            out.logits[..., ::2] += self.drift
        return out


def disguised(as_what: type, depth: str = "model") -> Any:
    """A Llama, some parts of which have become something else."""
    model = build("llama")
    parts = {
        "attention": [layer.self_attn for layer in model.model.layers],
        "layer": list(model.model.layers),
        "model": [model],
    }
    for part in parts[depth]:
        part.__class__ = as_what
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: disguised(OwnScores, "attention"), "in a trial its log-probs differ"),
        (lambda: disguised(OwnMask, "attention"), "OwnMask makes its own attention mask"),
        (lambda: disguised(Reserved, "layer"), "LlamaAttention does not pass forward arguments on"),
        (lambda: disguised(OwnPositions), "in a trial its log-probs differ"),
        (lambda: disguised(Drifting), "in a trial its log-probs differ from a plain forward pass by 0.0"),
    ],
)
def test_a_trial_finds_what_nobody_thought_of(make: Callable[[], Any], reason: str) -> None:
    model = make()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert model(ids).logits.isfinite().all(), "by itself it works"
    failure = trial(model)
    assert failure is not None
    assert reason in failure


def masked_window(**changes: Any) -> Any:
    """Its layers get the window in their mask only."""
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    return tf.PhimoeForCausalLM(tf.PhimoeConfig(**size, **heads, **ids, **changes)).eval()


def test_a_window_that_only_the_mask_applies_is_found_before_any_row_is_longer() -> None:
    model = masked_window(sliding_window=100)
    assert "its sliding window of 100 tokens, which only its mask applies" in (trial(model) or "")
    assert why_not_packed(model, PackedPolicy()) == [trial(model)]
    assert trial(masked_window(sliding_window=None)) is None


@pytest.mark.parametrize("name", ["mistral", "qwen2-sliding", "gemma2", "gemma3", "gpt-oss"])
def test_a_window_that_layers_are_told_of(name: str) -> None:
    assert hidden_window(build(name)) is None


def test_a_trial_forgives_rounding_only() -> None:
    model = disguised(Drifting)
    model.drift = 1e-5
    assert trial(model) is None


def latents() -> Any:
    """Multi-head latent attention caches something else than what it attends to."""
    experts = dict(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16)
    ranks = dict(kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
    size = SIZE | dict(num_key_value_heads=4, first_k_dense_replace=1)
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**size, **experts, **ranks))


def broken() -> Any:
    model = build("llama")
    model.lm_head.weight.data.fill_(torch.nan)
    return model


@pytest.mark.parametrize("make", [latents, own_attention, convolutions, recurrence, state_space, broken])
def test_a_trial_gives_a_reason_whatever_the_model_does(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # fresh weights are so small that all models say the same
    failure = trial(model)
    assert failure is not None
    assert failure.startswith(("a trial of it failed: ", "in a trial its log"))


# ---- the backend


PROMPTS = [[9, 10, 11, 12], [20], [30, 31], [9, 10, 11, 12]]
REQUESTS = [SampleRequest(ids, count, i) for i, (ids, count) in enumerate(zip(PROMPTS, (2, 3, 1, 1), strict=True))]


def config(**fields: Any) -> GenerationConfig:
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=[1], use_cache=True)
    return GenerationConfig(**(settings | fields))


def builtin(model: Any, stop_ids: Any = (1,), **fields: Any) -> BuiltinBackend:
    return BuiltinBackend(lambda: model, config(**fields), stop_ids=stop_ids, tokenizer=tiny_tokenizer())


def ends(completions: list[Completion]) -> list[tuple[list[int], StopReason]]:
    return [(list(c.ids), c.stop) for c in completions]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.4},
        {"eos_token_id": list(range(1, 40, 3))},
        {"min_new_tokens": 4, "eos_token_id": list(range(1, 40, 3))},
        {"max_new_tokens": 1},
        {"temperature": 0.0, "top_k": 3},
    ],
)
def test_greedy_is_what_the_transformers_backend_gives(name: str, fields: dict[str, Any]) -> None:
    model = build(name).double()
    stop_ids = fields.get("eos_token_id", [1])
    theirs = TransformersBackend(lambda: model, config(**fields), stop_ids=stop_ids, share_prefill=False)
    one_by_one = [theirs.sample([SampleRequest(request.prompt_ids, 1)])[0] for request in REQUESTS]
    expected = [one for request, one in zip(REQUESTS, one_by_one, strict=True) for _ in range(request.count)]
    assert ends(builtin(model, stop_ids, **fields).sample(REQUESTS)) == ends(expected)


def test_settings_are_read_anew_for_every_call() -> None:
    backend = builtin(build("llama"))
    assert {len(c.ids) for c in backend.sample(REQUESTS[:2])} == {8}
    backend.config.max_new_tokens = 3
    assert {len(c.ids) for c in backend.sample(REQUESTS[:2])} == {3}
    assert backend.counters["decode_tokens"] == 5 * 3


def test_a_padding_token_written_last_counts_as_an_end() -> None:
    model = in_double(build("llama"))
    plain = builtin(model).sample(REQUESTS)
    assert {c.stop for c in plain} == {StopReason.LENGTH}
    pad = plain[0].ids[-1]
    fields = {"pad_token_id": pad, "eos_token_id": [1]}
    ours = builtin(model, **fields).sample(REQUESTS)
    assert [list(c.ids) for c in ours] == [list(c.ids) for c in plain]
    assert [c.stop for c in ours] == [StopReason.EOS if c.ids[-1] == pad else StopReason.LENGTH for c in plain]
    assert {c.stop for c in ours} == {StopReason.EOS, StopReason.LENGTH}
    theirs = TransformersBackend(lambda: model, config(**fields), stop_ids=[1])
    assert ends(theirs.sample([SampleRequest(PROMPTS[0], 1)])) == ends(ours[:1])


def test_stop_strings() -> None:
    model, tokenizer = in_double(build("llama")), tiny_tokenizer()
    free = builtin(model).sample(REQUESTS)
    string = tokenizer.decode(free[0].ids[3:5])
    for strings in (string, [string, "never"]):
        first, *_, last = builtin(model, stop_strings=strings).sample(REQUESTS)
        assert ends([first]) == ends([last]) == [(list(free[0].ids[:5]), StopReason.STOP_STRING)]
    theirs = TransformersBackend(
        lambda: model, config(stop_strings=string), stop_ids=[1], tokenizer=tokenizer, share_prefill=False
    )
    assert ends(theirs.sample([SampleRequest(PROMPTS[0], 1)])) == ends([first])


def test_stop_strings_of_characters_that_are_many_tokens() -> None:
    """A byte-level tokenizer writes one of these characters as four tokens."""
    from gruppo.engine.stopping import StopStrings

    class Bytes:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode(errors="replace")

    for string in ("END", "🙂" * 9):
        text = "x" * 50 + string
        found = StopStrings(Bytes(), ["never", string]).feed(0, (text + "yz").encode())
        assert found == len(text.encode())


def test_learned_positions_end_and_rotary_ones_go_on() -> None:
    gpt2, llama = builtin(build("gpt2")), builtin(build("llama"))
    prompts = [[5] * 125, [5] * 128]
    assert [(len(c.ids), c.stop) for c in gpt2.sample([SampleRequest(ids, 1) for ids in prompts])] == [
        (3, StopReason.LENGTH),
        (0, StopReason.NO_ROOM),
    ]
    assert [len(c.ids) for c in llama.sample([SampleRequest(ids, 1) for ids in prompts])] == [8, 8]


def test_a_resumed_run_samples_under_the_saved_plan() -> None:
    model = build("llama")
    fields = dict(do_sample=True, temperature=1.0, top_k=0)
    first = builtin(model, **fields)
    assert first.state_dict() == {"plan": None, "may_grow": True}
    first.engine.plan, first.engine.may_grow = RolloutPlan(kv_tokens=40, rows=2, prefill_tokens=16), False
    expected = first.sample(REQUESTS)
    saved = json.loads(json.dumps(first.state_dict()))
    assert saved == {"plan": {"kv_tokens": 40, "rows": 2, "prefill_tokens": 16}, "may_grow": False}

    resumed = builtin(model, **fields)
    resumed.load_state_dict(saved)
    assert resumed.sample(REQUESTS) == expected
    assert resumed.engine.plan == first.engine.plan
    resumed.load_state_dict({"plan": None, "may_grow": True})
    resumed.sample(REQUESTS)
    assert resumed.engine.plan is not None
    assert resumed.engine.plan.rows == 7


def test_entropies_are_passed_on_where_asked_for() -> None:
    model = build("llama")
    backend = BuiltinBackend(lambda: model, config(), stop_ids=[1], entropies=True)
    assert all(len(c.entropies) == len(c.ids) for c in backend.sample(REQUESTS))  # type: ignore[arg-type]
    assert all(c.entropies is None for c in builtin(model).sample(REQUESTS))
