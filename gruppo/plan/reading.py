"""Read the model of a forecast from its config, without loading its weights."""

from collections import Counter
from dataclasses import replace
from typing import Any

from gruppo.plan.job import Model, Projection
from gruppo.plan.shape import ModelShape


def read_model(config: Any, name: str = "model") -> Model:
    """Build the model of a transformers config on the meta device and count its weights.

    Example:
        read_model(AutoConfig.from_pretrained("Qwen/Qwen2.5-1.5B")).weights == 1_543_714_304
    """
    import torch

    with torch.device("meta"):
        module = _model_class(config)._from_config(config)
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


def _model_class(config: Any) -> Any:
    """The class that the config names, else the auto mapping's: a causal language model, or one with vision."""
    import transformers

    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if named is not None:
        return named
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ValueError(f"transformers has no class of a language model for {type(config).__name__}")


def _projections(module: Any, head: Any) -> dict[str, Projection]:
    """The linear layers except the LM head, by the last part of their names."""
    from torch import nn

    sizes: dict[str, Counter[tuple[int, int]]] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) and part is not head:
            found = sizes.setdefault(path.rpartition(".")[2], Counter())
            found[part.in_features, part.out_features] += 1
    # Layers with the same name nearly always have the same size; where not, the most common size is used for all.
    return {name: Projection(sum(found.values()), *found.most_common(1)[0][0]) for name, found in sizes.items()}


def _active_shape(text: Any) -> ModelShape:
    """The shape that one token uses; in a mixture of experts, the active experts count as one wide MLP."""
    shape = ModelShape.from_config(text)
    active = getattr(text, "num_experts_per_tok", None)
    width = getattr(text, "moe_intermediate_size", None) or shape.intermediate
    if not active:
        return shape
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    wide = active * width + shared
    return replace(shape, intermediate=wide, unequal=tuple(replace(one, intermediate=wide) for one in shape.unequal))
