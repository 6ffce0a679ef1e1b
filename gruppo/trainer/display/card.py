"""The model card of a trained policy."""

import importlib.metadata as metadata
from typing import Any

CITATIONS = {
    "grpo": ("DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "2402.03300"),
    "rloo": ("Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback", "2402.14740"),
}

TEMPLATE = """---
library_name: transformers
{base_model}tags: [{tags}]
---

# {name}

{sentence}

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{model_id}")
print(generator("Your prompt", max_new_tokens=128)[0]["generated_text"])
```

Trained with {algorithm} ([{title}](https://arxiv.org/abs/{paper})){dataset}, loss type `{loss_type}`.

{versions}
"""


def model_card(
    *,
    algorithm: str,
    name: str,
    model_id: str,
    base_model: str | None,
    dataset: str | None,
    tags: list[str],
    args: Any,
) -> str:
    """A card that says what was trained, how, and with which versions; `base_model` is a name on the hub."""
    title, paper = CITATIONS[algorithm]
    packages = ("gruppo", "transformers", "torch", "datasets", "tokenizers")
    base = f"A version of [{base_model}](https://huggingface.co/{base_model})" if base_model else "A model"
    return TEMPLATE.format(
        base_model=f"base_model: {base_model}\n" if base_model else "",
        tags=", ".join(dict.fromkeys(tags)),
        name=name,
        sentence=f"{base}, post-trained with gruppo.",
        model_id=model_id,
        algorithm=algorithm.upper(),
        title=title,
        paper=paper,
        dataset=f" on `{dataset}`" if dataset else "",
        loss_type=args.loss_type or algorithm,
        versions="\n".join(f"- {package} {metadata.version(package)}" for package in packages),
    )
