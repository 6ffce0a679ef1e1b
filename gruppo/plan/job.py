"""The input of a forecast: a model, a device, and the settings of a run that memory and time depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gruppo.plan.devices import Device
from gruppo.plan.shape import ModelShape, Passes

# Optimizer state: values per trained weight, and bytes per value (None: as many as the trained weight has).
_STATES: dict[str, tuple[float, int | None]] = {
    "adamw_torch": (2, None),
    "adamw_torch_fused": (2, None),
    "adamw_torch_8bit": (2, 1),
    "adamw_torch_4bit": (1, 1),
    "adamw_apex_fused": (2, None),
    "adamw_anyprecision": (2, None),
    "adamw_8bit": (2, 1),
    "adamw_bnb_8bit": (2, 1),
    "paged_adamw_32bit": (2, 4),
    "paged_adamw_8bit": (2, 1),
    "ademamix": (3, 4),
    "lion_32bit": (1, 4),
    "lion_8bit": (1, 1),
    "paged_lion_32bit": (1, 4),
    "paged_lion_8bit": (1, 1),
    "rmsprop": (1, None),
    "adagrad": (1, None),
    "sgd": (0, None),
    "adafactor": (0.01, None),  # a row and a column for each matrix
}
# Optimizers that update all weights at once and make a temporary copy of their state for it.
_MAKES_COPIES = ("adamw_torch", "rmsprop", "adagrad")

SHARDINGS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2")


@dataclass(frozen=True)
class Projection:
    """The linear layers that share a name: how many there are, and their sizes."""

    count: int
    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        return self.count * self.inputs * self.outputs


@dataclass(frozen=True)
class Model:
    """A model's shape and its weight counts; `read_model` builds one from a config."""

    name: str
    shape: ModelShape
    weights: int
    projections: Mapping[str, Projection] = field(default_factory=dict)  # by name; without the LM head
    tied: bool = True

    @property
    def head_weights(self) -> int:
        return self.shape.vocabulary * self.shape.hidden

    @property
    def linear_weights(self) -> int:
        """Weights of linear layers, including the LM head."""
        return sum(projection.weights for projection in self.projections.values()) + self.head_weights

    @property
    def multiplied(self) -> int:
        """Weights that a sampled token is multiplied by: those of linear layers, but only of active experts."""
        return self.shape.layer_weights + self.head_weights


@dataclass(frozen=True)
class Adapter:
    """LoRA: its rank, and the projections that have an adapter."""

    rank: int
    targets: frozenset[str]

    def weights(self, model: Model) -> int:
        """Example, rank 16 on 28 projections from 1536 to 256 values: 28 · 16 · (1536 + 256) = 802,816."""
        found = [model.projections[name] for name in self.targets if name in model.projections]
        return sum(one.count * self.rank * (one.inputs + one.outputs) for one in found)


@dataclass(frozen=True)
class Job:
    """A run, as seen by one of its devices.

    Example, 32 prompts × 16 completions of 512 tokens:
        Job(model, DEVICES["H200"], rows=512, generations=16, prompt_tokens=200, completion_tokens=512)
    """

    model: Model
    device: Device
    rows: int  # completions of a generation that this process samples and trains on
    generations: int  # completions of a prompt
    prompt_tokens: int
    completion_tokens: int  # max_completion_length
    mean_completion_tokens: int | None = None  # for the time forecast; None: all reach the limit
    weight_bytes: int = 4
    autocast: bool = True  # 16-bit passes, whatever the dtype of the weights
    bits: int | None = None  # 4 or 8: bits per weight of quantised layers
    adapter: Adapter | None = None
    optimizer: str = "adamw_torch_fused"
    reference: bool = False  # beta > 0
    old_logps: bool = False  # a generation serves several updates, or another sampler's log-probs are corrected
    updates: int = 1  # per generation
    iterations: int = 1  # passes over a generation
    micro_batch_rows: int = 8  # if rows are padded, not packed
    checkpointing: bool | None = None
    tokens: int | None = None  # max_tokens_per_micro_batch
    packed: bool = True
    fused: bool = True
    filtered: bool = False  # top-k, top-p and the like
    parity: bool = True
    sampler: str = "builtin"  # "transformers", "vllm colocate", "vllm server"
    sampler_share: float = 0.0  # share of the device's memory for a colocated vLLM
    sampler_sleeps: bool = False  # whether vLLM releases it during the update
    processes: int = 1
    sharding: str = "none"
    threads: int = 1  # on a CPU
    unmoved: float = 0.0  # share of groups without reward spread, which updates leave out; for the time forecast

    def with_(self, **changes: object) -> "Job":
        return replace(self, **changes)  # type: ignore[arg-type]

    # ---- derived values

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def product_bytes(self) -> int:
        return min(self.weight_bytes, 2) if self.autocast else self.weight_bytes

    @property
    def passes(self) -> Passes:
        return Passes(
            stream=self.weight_bytes,
            product=self.product_bytes,
            fused=self.fused and self.packed,
            device="cpu" if self.on_cpu else "cuda",
            adapted=None if self.adapter is None else self.adapter.targets,
        )

    @property
    def groups(self) -> int:
        return max(-(-self.rows // self.generations), 1)

    @property
    def update_groups(self) -> int:
        """Groups in one update."""
        return max(-(-self.groups // self.updates), 1)

    @property
    def trained(self) -> int:
        return self.model.weights if self.adapter is None else self.adapter.weights(self.model)

    @property
    def trained_bytes(self) -> int:
        """Bytes of a trained weight: adapters are float32, or bfloat16 if the layers are quantised."""
        if self.adapter is None:
            return self.weight_bytes
        return 4 if self.bits is None else 2

    @property
    def trains_head(self) -> bool:
        return self.adapter is None

    @property
    def shares(self) -> int:
        """Processes that the weights are sharded over."""
        return self.processes if self.sharding in ("fsdp2", "zero3") else 1

    @property
    def group_tokens(self) -> int:
        """Tokens of a packed group: its prompt once, and each completion without its last token, which is not run."""
        return self.prompt_tokens + self.generations * max(self.completion_tokens - 1, 1)

    @property
    def longest_row(self) -> int:
        row = self.prompt_tokens + self.completion_tokens
        return row if self.packed else row * self.micro_batch_rows

    def state_bytes(self) -> float:
        """Bytes of optimizer state per trained weight."""
        values, width = _STATES.get(self.optimizer, (2, None))
        return values * (width or self.trained_bytes)

    @property
    def knows_optimizer(self) -> bool:
        return self.optimizer in _STATES

    @property
    def step_copies(self) -> bool:
        return self.optimizer in _MAKES_COPIES
