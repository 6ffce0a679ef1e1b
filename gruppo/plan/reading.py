"""The model of a forecast, from its config: never from its weights."""

from collections import Counter
from dataclasses import replace
from typing import Any

from gruppo.plan.job import Model, Projection
from gruppo.plan.shape import ModelShape


def read_model(config: Any, name: str = "model") -> Model:
    """Build a transformers config's model without memory for its weights, and count them.

    Example:
        read_model(AutoConfig.from_pretrained("Qwen/Qwen2.5-1.5B")).weights == 1_543_714_304
    """
    import torch
    import transformers

    architecture = (getattr(config, "architectures", None) or [""])[0]
    kind: Any = getattr(transformers, architecture, None)
    with torch.device("meta"):
        if hasattr(kind, "_from_config"):
            module = kind._from_config(config)
        else:
            module = transformers.AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head = module.get_output_embeddings()
    tied = head is not None and head.weight is module.get_input_embeddings().weight
    return Model(
        name=name,
        shape=_active_shape(text),
        weights=sum(parameter.numel() for parameter in module.parameters()),
        projections=_projections(module, head),
        tied=tied,
    )


def _projections(module: Any, head: Any) -> dict[str, Projection]:
    """The linear layers but the head, by the last part of their names."""
    from torch import nn

    sizes: dict[str, Counter[tuple[int, int]]] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and part is not head:
            found = sizes.setdefault(path.rpartition(".")[2], Counter())
            found[part.in_features, part.out_features] += 1
    # Layers of one name are nearly always of one size; where not, the commonest stands for all.
    return {name: Projection(sum(found.values()), *found.most_common(1)[0][0]) for name, found in sizes.items()}


def _active_shape(text: Any) -> ModelShape:
    """The shape that a token sees: of a mixture of experts, the experts that it is sent to side by side."""
    shape = ModelShape.from_config(text)
    active = getattr(text, "num_experts_per_tok", None)
    width = getattr(text, "moe_intermediate_size", None) or shape.intermediate
    if not active:
        return shape
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return replace(shape, intermediate=active * width + shared)
