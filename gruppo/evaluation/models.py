"""Load the model to evaluate: a name, a folder, an adapter, or the output of a training run."""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig

from gruppo.errors import ConfigError, install_line
from gruppo.evaluation.weights import find_weights
from gruppo.policy import loading
from gruppo.policy.unwrap import inner_model
from gruppo.rollout import builtin
from gruppo.rollout.base import RolloutBackend
from gruppo.rollout.hf import TransformersBackend

__all__ = ["Backend", "Subject", "load_subject", "make_backend", "weights_fingerprint"]

Backend = Literal["auto", "builtin", "transformers", "vllm"]

VALUES_AT_ONCE = 1 << 24
VLLM_ROWS, VLLM_MEMORY = 512, 0.5  # sequences at once; share of the GPU memory, which the model itself uses as well


@dataclass(frozen=True)
class Subject:
    """The model under evaluation, with its tokenizer."""

    name: str  # for tables and folders
    source: str  # the name or folder it was loaded from; empty for an object
    model: Any
    tokenizer: Any
    dtype: str

    @property
    def size(self) -> str:
        """The number of parameters as tables print it: 135M, 1.5B."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{count / 1e9:.1f}".removesuffix(".0") + "B" if count >= 0.95e9 else f"{count / 1e6:.0f}M"


def load_subject(
    model: Any,
    tokenizer: Any = None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Subject:
    """Load a model by name or folder, or use an object as it is.

    A folder may hold a model, an adapter, or a training run. Of a run, the final model is used, otherwise its newest
    complete checkpoint (`find_weights`). `dtype="auto"` is bfloat16 on a GPU and float32 on a CPU.
    """
    if not isinstance(model, str | Path):
        if tokenizer is None:
            raise ConfigError("A model that is passed as an object needs its tokenizer: evaluate(model, tokenizer=…).")
        if (dtype, device, trust_remote_code) != ("auto", None, False):
            raise ConfigError(
                "dtype, device and trust_remote_code are for loading a model; leave them out for an object."
            )
        name = Path(loading.model_name(inner_model(model))).name or type(model).__name__
        return Subject(name, "", model, _checked(copy.deepcopy(tokenizer), model), _dtype_of(model))
    source = find_weights(model)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = getattr(torch, _default_dtype(place) if dtype == "auto" else dtype, None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ConfigError(f"dtype={dtype!r} must be 'auto', 'float32', 'bfloat16' or 'float16'.")
    try:
        loaded = _load(source, wanted, trust_remote_code).to(place).eval()
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(_tokenizer_source(source), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = "could not be loaded" if Path(source).is_dir() else "is not a folder, and could not be loaded by name"
        raise ConfigError(f"{str(model)!r} {what}: {error}") from error
    return Subject(_short_name(model, source), str(source), loaded, _checked(tokenizer, loaded), _dtype_of(loaded))


def _load(source: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    if not (Path(source) / "adapter_config.json").exists():
        kind = loading.model_class(source, {"trust_remote_code": trust_remote_code})
        return kind.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        from peft import AutoPeftModelForCausalLM
    except ImportError as error:
        raise ImportError(
            f"{source} holds an adapter, which needs the package peft: {install_line('peft')}"
        ) from error
    # A merged adapter adds no cost per token.
    adapted = AutoPeftModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code)
    return adapted.merge_and_unload()


def _tokenizer_source(source: str) -> str:
    """An adapter folder without a tokenizer uses that of its base model."""
    adapter = Path(source) / "adapter_config.json"
    if adapter.exists() and not (Path(source) / "tokenizer_config.json").exists():
        return str(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    return source


def _default_dtype(device: str) -> str:
    return "bfloat16" if device.startswith("cuda") else "float32"


def _dtype_of(model: Any) -> str:
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _short_name(model: str | Path, source: str) -> str:
    path = Path(source)
    if path.name.startswith("checkpoint-") and path.is_dir():
        return f"{path.parent.name}/{path.name}"
    return Path(model).name if Path(model).is_dir() else str(model)


def _checked(tokenizer: Any, model: Any) -> Any:
    if tokenizer.eos_token_id is None:
        raise ConfigError("The tokenizer has no end-of-sequence token, so no completion could end. Set its eos_token.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    loading.check_vocabulary(inner_model(model), tokenizer)
    return tokenizer


def weights_fingerprint(model: Any, *, adapters: bool = True) -> str:
    """A short hash of the weights, independent of the folder they came from; any changed bit changes it.

    Without `adapters`, only the base weights are hashed, i.e. what training started from. For a model that has no
    adapters both hashes are equal.
    """
    inner = inner_model(model)
    state = inner.state_dict()
    names = [name for name in state if adapters or ".lora_" not in name]
    tensors = sorted(((name.replace(".base_layer", ""), state[name]) for name in names), key=lambda pair: pair[0])
    sums = torch.stack([_checksum(tensor) for _, tensor in tensors]).tolist()
    facts = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {total}"
        for (name, tensor), total in zip(tensors, sums, strict=True)
    ]
    facts += _adapters_in_use(inner) if adapters else []
    return blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def _adapters_in_use(inner: Any) -> list[str]:
    """The active adapters and their scales: with another scale the same tensors compute something else."""
    return [
        f"{name} {layer.active_adapters} {layer.disable_adapters} {sorted(getattr(layer, 'scaling', {}).items())}"
        for name, layer in inner.named_modules()
        if hasattr(layer, "base_layer") and hasattr(layer, "disable_adapters")
    ]


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the bit patterns of all values, each times its position, modulo 2^64; on the device, as copying is slow."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), VALUES_AT_ONCE):
        part = bits[start : start + VALUES_AT_ONCE].long()
        total += (part * torch.arange(start + 1, start + 1 + len(part), device=flat.device)).sum()
    return total.cpu()


# ---- the sampler


def make_backend(subject: Subject, backend: Backend = "auto") -> RolloutBackend:
    """The sampler of a model: "auto" is the built-in engine if it can run the model, else transformers' `generate`."""
    stop_ids = loading.stop_token_ids(inner_model(subject.model), subject.tokenizer)
    config = decoding_config(subject.tokenizer, stop_ids, max_new_tokens=1)
    if backend not in ("auto", "builtin", "transformers", "vllm"):
        raise ConfigError(f"backend={backend!r} must be 'auto', 'builtin', 'transformers' or 'vllm'.")
    if backend == "vllm":
        return _vllm(subject, config, stop_ids)
    with bare_generation_config(subject.model):
        tried = backend != "transformers"
        reasons = builtin.why_not(subject.model, config) if tried else ["transformers was asked for"]
    if not reasons:
        return builtin.BuiltinBackend(lambda: subject.model, config, stop_ids=stop_ids, tokenizer=subject.tokenizer)
    if backend == "builtin":
        raise ConfigError(f"backend='builtin' cannot sample from this model: {'; '.join(reasons)}.")
    return TransformersBackend(lambda: subject.model, config, stop_ids=stop_ids, tokenizer=subject.tokenizer)


def _vllm(subject: Subject, config: GenerationConfig, stop_ids: Sequence[int]) -> RolloutBackend:
    """vLLM in this process, with the weights of the loaded model, including a merged adapter."""
    from gruppo.rollout.vllm.colocate import EngineSettings, VLLMColocateBackend

    settings = EngineSettings(rows=VLLM_ROWS, dtype=getattr(torch, subject.dtype), memory_share=VLLM_MEMORY)
    return VLLMColocateBackend(lambda: subject.model, config, stop_ids=stop_ids, settings=settings, logps=False)


@contextmanager
def bare_generation_config(model: Any) -> Iterator[None]:
    """Remove the model's own generation config, from which samplers would fill fields that ours leaves unset.

    Beams, penalties or banned words in it would make the evaluation differ from that of other models.
    """
    inner = inner_model(model)
    own = inner.generation_config
    inner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = own


def decoding_config(
    tokenizer: Any,
    stop_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop_strings: Sequence[str] = (),
) -> GenerationConfig:
    """The generation config of a pass; `bare_generation_config` keeps the model's own from filling unset fields."""
    shape = dict(temperature=temperature, top_p=top_p, top_k=0) if temperature else {}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=0,
        do_sample=temperature > 0,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=list(stop_ids),
        stop_strings=list(stop_strings) or None,
        use_cache=True,
        disable_compile=True,
        **shape,
    )
