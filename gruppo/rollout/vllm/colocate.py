"""Sampling with a vLLM engine in this process, on the trainer's own GPU.

There is one engine per process, or one across `tensor_parallel_size` neighbouring processes. The latter gather their
requests, sample all of them in lockstep, and each keeps its own completions. With sleep mode the engine frees its
memory between generations, including its weights, which are loaded again before the next generation.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState

from gruppo.errors import ConfigError, RolloutError, install_line
from gruppo.policy.loading import context_length, model_name
from gruppo.policy.sharding import is_sharded
from gruppo.policy.unwrap import inner_model
from gruppo.policy.weights import named_weights
from gruppo.rollout.vllm.base import VLLMBackend
from gruppo.rollout.vllm.requests import Answer, Ask, engine_answers, with_lengths_of
from gruppo.rollout.vllm.versions import check_version

__all__ = ["EngineSettings", "VLLMColocateBackend", "engine_arguments"]

BATCHED_TOKENS = 4096


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is set up: fields of the config, and values that depend on the run."""

    rows: int  # completions per generation and process
    dtype: torch.dtype
    tensor_parallel_size: int = 1
    memory_share: float = 0.3
    context_length: int | None = None
    sleeps: bool = False
    model_impl: str = "vllm"
    revision: str | None = None
    trust_remote_code: bool = False


def engine_arguments(model: str, settings: EngineSettings, *, rank: int, processes: int) -> dict[str, Any]:
    """The arguments of vllm.LLM.

    Example:
        engine_arguments("Qwen/Qwen2.5-0.5B", EngineSettings(512, torch.bfloat16), rank=0, processes=1) ->
            {"model": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", "max_num_seqs": 512, …}
    """
    sequences = settings.rows * settings.tensor_parallel_size
    arguments: dict[str, Any] = {
        "model": model,
        "revision": settings.revision,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.memory_share,
        "max_model_len": settings.context_length,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(BATCHED_TOKENS, sequences),  # vLLM requires one token per sequence
        "enable_sleep_mode": settings.sleeps,
        "model_impl": settings.model_impl,
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "generation_config": "vllm",  # defaults are neutral, whatever the model's own generation config says
        "seed": rank // settings.tensor_parallel_size,
    }
    if processes > 1:  # one worker in each process; they use the existing process group
        arguments["distributed_executor_backend"] = "external_launcher"
    return arguments


class VLLMColocateBackend(VLLMBackend):
    """Samples with an engine in this process."""

    def __init__(
        self,
        policy: Callable[[], Any],
        config: Any,
        *,
        stop_ids: Sequence[int],
        settings: EngineSettings,
        logps: bool = True,
        seeded: bool = True,
    ):
        super().__init__(policy, config, stop_ids=stop_ids, logps=logps, seeded=seeded)
        self.settings = settings
        state = PartialState()
        self._group, self._place = _neighbours(settings.tensor_parallel_size, state.num_processes, state.process_index)
        model = inner_model(policy())
        self.vllm, self.llm = make_engine(
            engine_arguments(_folder(model), settings, rank=state.process_index, processes=state.num_processes)
        )
        self.context_length = settings.context_length or context_length(model)
        self._asleep: set[str] = set()
        self._in_turns = False
        self._sleep()

    @property
    def needs_every_process(self) -> bool:
        return self.settings.tensor_parallel_size > 1 or is_sharded(self.policy())

    # ---- weights

    def refresh(self) -> None:
        """Every process has its own engine, or its part of one, and need not consult the others."""
        if self._is_stale():
            self._refresh()

    _ensure_fresh = refresh

    def _renew(self) -> None:
        self._wake("weights")
        try:
            self._load(named_weights(self.policy()))
        except BaseException:
            with suppress(Exception):  # an empty load resets vLLM, else loaded parts count towards the next load
                self._load(())
            raise
        self._wake("kv_cache")
        if self.llm.reset_prefix_cache() is False:
            raise RolloutError(
                "vLLM did not reset its prefix cache, whose entries were computed with the old weights."
            )

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self.working("sending weights"):
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the engine can only take memory that torch has released
            self.llm.wake_up(tags=[tag])
            self._asleep.discard(tag)

    def _sleep(self) -> None:
        """Free the engine's memory, if the config asks for it. This discards its weights."""
        if self.settings.sleeps and not self._asleep and not self._in_turns:
            self.llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}
            self._held = None  # weights_version stays: it belongs to the last samples

    def release(self) -> None:
        self._sleep()

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Keep the engine awake until the block ends."""
        self._in_turns = True
        try:
            yield
        finally:
            self._in_turns = False
            self._sleep()

    # ---- samples

    def _ask(self, asks: Sequence[Ask], settings: dict[str, Any]) -> list[list[Answer]]:
        self._ensure_fresh()
        everybody = self._gathered(asks)
        mine = slice(sum(map(len, everybody[: self._place])), sum(map(len, everybody[: self._place + 1])))
        together = [ask for part in everybody for ask in part]
        outputs = []
        if together:
            outputs = self.llm.generate(
                [{"prompt_token_ids": ask.prompt_ids} for ask in together],
                sampling_params=[self._sampling_params(ask, settings) for ask in together],
                use_tqdm=False,
            )
        self._sleep()
        if len(outputs) != len(together):
            raise RolloutError(f"vLLM returned {len(outputs)} answers to {len(together)} requests.")
        return [engine_answers(output) for output in outputs[mine]]

    def _sampling_params(self, ask: Ask, settings: Mapping[str, Any]) -> Any:
        words = with_lengths_of(ask, settings)
        return self.vllm.SamplingParams(
            **words | _as_objects(words),
            seed=ask.seed,
            skip_special_tokens=False,  # a stop string may be one
            detokenize=bool(words.get("stop") or words.get("bad_words")),
        )

    def _gathered(self, asks: Sequence[Ask]) -> list[list[Ask]]:
        """The requests of each process that shares the engine, in order."""
        if self._group is None:
            return [list(asks)]
        parts: list[Any] = [None] * self.settings.tensor_parallel_size
        torch.distributed.all_gather_object(parts, list(asks), group=self._group)
        return parts


def _as_objects(words: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with fields as vLLM's objects: a server converts the dicts, SamplingParams does not."""
    if not any(isinstance(words.get(name), Mapping) for name in ("structured_outputs", "repetition_detection")):
        return {}
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    kinds = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
    return {name: kind(**words[name]) for name, kind in kinds.items() if isinstance(words.get(name), Mapping)}


def _neighbours(size: int, processes: int, rank: int) -> tuple[Any, int]:
    """The group of processes that share an engine, and this process's rank in it."""
    if size == 1:
        return None, 0
    ranks = [list(range(first, first + size)) for first in range(0, processes, size)]
    group, _ = torch.distributed.new_subgroups_by_enumeration(ranks)
    return group, rank % size


def _folder(model: Any) -> str:
    name = model_name(model)
    if not name:
        raise ConfigError(
            "vLLM loads the model by its name or from a folder, but this one has neither. Save it and its tokenizer "
            "with save_pretrained, and pass the folder."
        )
    return name


def make_engine(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """The vllm package, if its release is supported, and an engine in this process."""
    # Set before vLLM reads them: the engine must run in this process, and a single one needs no reachable address.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if arguments.get("distributed_executor_backend") is None:
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            f"vLLM was requested but cannot be imported: {error}. Install it ({install_line('vllm')}), use a server "
            "(vllm_mode='server'), or sample with the built-in engine, which needs no extra package."
        ) from error
    check_version(vllm.__version__, "this environment")
    return vllm, vllm.LLM(**{name: value for name, value in arguments.items() if value is not None})
