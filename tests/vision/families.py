"""Vision-language models of a few thousand weights with their processors, one of each family.

Processors use the PIL variants of their image processors, because the others need torchvision. So do video processors,
which are replaced by a stand-in in the processors of Qwen and Gemma 4. The tokenizer has one token per character, plus
the special tokens of all families.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import CHARACTERS

SPECIAL = [
    *("<pad>", "<eos>", "<user>", "<assistant>", "<system>", "<unk>"),
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),  # Qwen
    *("<image>", "<fake_token_around_image>", "<global-img>"),  # Idefics, SmolVLM, LLaVA
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>", "<end_of_utterance>"),  # Gemma 3
    *("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),  # Gemma 4
]
VOCABULARY = len(SPECIAL) + len(CHARACTERS) + 1
LINE = "\n"  # some processors put line breaks around images

# Hermes style. A part with a key `image` counts as an image whatever its type, as in templates of real models.
TEMPLATE = """
{%- if tools -%}<system>{%- for tool in tools -%}[{{ tool.function.name }}]{%- endfor -%}<eos>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}<user><tool_response>{%- else -%}<{{ message.role }}>{%- endif -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'image' or 'image' in part -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- if message.role == 'tool' -%}</tool_response>{%- endif -%}
<eos>
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""


def tiny_tokenizer(image: str, **more: Any) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; `image` is what the chat template shows for an image."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, LINE])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=TEMPLATE.strip().replace("IMAGE", image),
        model_input_names=["input_ids", "attention_mask"],
        **more,
    )


def token_id(token: str) -> int:
    return SPECIAL.index(token)


@dataclass(frozen=True)
class Family:
    """How to make a model and its processor, and which tensors the processor returns for an image."""

    name: str
    model: Callable[[], Any]
    processor: Callable[[], Any]
    tensors: tuple[str, ...]
    types: str | None  # the name of the tensor that distinguishes image tokens from text
    several: bool = True  # a prompt may have more than one image

    def make(self, seed: int = 0) -> tuple[Any, Any]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.model()
        processor = self.processor()
        processor.chat_template = processor.tokenizer.chat_template
        return model, processor


TEXT = dict(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN_TOKENS = dict(
    image_token_id=token_id("<|image_pad|>"),
    video_token_id=token_id("<|video_pad|>"),
    vision_start_token_id=token_id("<|vision_start|>"),
    vision_end_token_id=token_id("<|vision_end|>"),
    tie_word_embeddings=False,
)


def pil(name: str) -> Any:
    """The PIL class of an image processor.

    It is imported from its own module, because without torchvision transformers 5.17 hides some of these classes,
    although they do not need it.
    """
    family = {"Qwen2VL": "qwen2_vl", "LlavaNext": "llava_next"}.get(name, name.lower())
    module = import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    return getattr(module, f"{name}ImageProcessorPil")


def qwen2_vl() -> Any:
    vision = dict(depth=1, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2)
    text = TEXT | {"rope_parameters": MROPE}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    vision = dict(
        depth=2,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=16,
        patch_size=4,
        spatial_merge_size=2,
        window_size=16,
        fullatt_block_indexes=[1],
    )
    text = TEXT | {"rope_parameters": MROPE}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    vision = dict(
        depth=2,
        hidden_size=16,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=16,
        patch_size=4,
        spatial_merge_size=2,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    text = TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}, "head_dim": 8}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


class Missing:
    """Stands in for a video processor or a feature extractor for audio."""


def without(missing: Sequence[str], kind: str, **kwargs: Any) -> Any:
    """A processor of this class with stand-ins for some of its parts."""
    parent = getattr(transformers, kind)

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if name in missing else parent.check_argument_for_proper_class(self, name, argument)

    def save(self: Any, folder: Any, **options: Any) -> None:
        self.tokenizer.save_pretrained(folder)  # the only part that can be saved

    methods = {"check_argument_for_proper_class": check, "__init__": parent.__init__, "save_pretrained": save}
    return type(kind, (parent,), methods)(**dict.fromkeys(missing, Missing()), **kwargs)


def qwen_processor(kind: str) -> Any:
    """A processor for images of 8 to 24 pixels per side, with one token per 8 × 8 pixels."""
    images = pil("Qwen2VL")(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 576}
    )
    tokenizer = tiny_tokenizer("<|vision_start|><|image_pad|><|vision_end|>")
    return without(["video_processor"], kind, image_processor=images, tokenizer=tokenizer)


def idefics3(kind: str) -> Any:
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=16, patch_size=4)
    config = getattr(transformers, f"{kind}Config")(
        text_config={"model_type": "llama", **TEXT},
        vision_config=vision,
        image_token_id=token_id("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def idefics3_processor(kind: str, split: bool) -> Any:
    images = pil(f"{kind}")(do_image_splitting=split, size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    tokenizer = tiny_tokenizer("<image>")
    for name, token in (
        ("image_token", "<image>"),
        ("fake_image_token", "<fake_token_around_image>"),
        ("global_image_token", "<global-img>"),
        ("end_of_utterance_token", "<end_of_utterance>"),
    ):
        setattr(tokenizer, name, token)
    # SmolVLM's own processor renders images like this one, but needs another package for the numbers in videos.
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)


def gemma3() -> Any:
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision |= dict(image_size=16, patch_size=4)
    config = transformers.Gemma3Config(
        text_config=TEXT | dict(head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=token_id("<image_soft_token>"),
        boi_token_index=token_id("<start_of_image>"),
        eoi_token_index=token_id("<end_of_image>"),
        tie_word_embeddings=True,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # it is 0 at first: blind
    return model


def gemma3_processor() -> Any:
    images = pil("Gemma3")(size={"height": 16, "width": 16})
    tokens = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    tokenizer = tiny_tokenizer("<start_of_image>")
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", token_id(token))
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)


def gemma4() -> Any:
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    vision |= dict(num_key_value_heads=2, patch_size=4, pooling_kernel_size=2, position_embedding_size=128)
    # As published: heads of global layers are twice as wide, and the last layers use the keys and values of others.
    kinds = ["sliding_attention", "full_attention"] * 2
    text: dict[str, Any] = dict(head_dim=8, global_head_dim=16, sliding_window=64, layer_types=kinds)
    text |= dict(num_hidden_layers=4, num_kv_shared_layers=2, use_double_wide_mlp=True)
    text |= dict(vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=4)
    config = transformers.Gemma4Config(
        text_config=TEXT | text,
        vision_config=vision,
        audio_config=None,
        image_token_id=token_id("<|image|>"),
        boi_token_id=token_id("<|image>"),
        eoi_token_id=token_id("<image|>"),
        video_token_id=token_id("<|video|>"),
        audio_token_id=token_id("<|audio|>"),
        boa_token_id=token_id("<|audio>"),
        eoa_token_index=token_id("<audio|>"),
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma4_processor() -> Any:
    """A processor with up to 280 patches per image, four per token, padded to that number."""
    tokenizer = tiny_tokenizer("<|image|>")
    kinds = (("image", "<|image|>", "<|image>", "<image|>"), ("audio", "<|audio|>", "<|audio>", "<audio|>"))
    for kind, token, begin, end in kinds:
        for name, text in ((f"{kind}_token", token), (f"bo{kind[0]}_token", begin), (f"eo{kind[0]}_token", end)):
            setattr(tokenizer, name, text)
            setattr(tokenizer, f"{name}_id", token_id(text))
    images = pil("Gemma4")(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    parts = ["video_processor", "feature_extractor"]
    return without(parts, "Gemma4Processor", image_processor=images, tokenizer=tokenizer, image_seq_length=70)


def llava_next() -> Any:
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4, **vision},
        image_token_index=token_id("<image>"),
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def llava_next_processor() -> Any:
    images = pil("LlavaNext")(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    tokenizer = tiny_tokenizer("<image>")
    return transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )


QWEN = ("pixel_values", "image_grid_thw")
MASKED = ("pixel_values", "pixel_attention_mask")
FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_vl", qwen2_vl, lambda: qwen_processor("Qwen2VLProcessor"), QWEN, "mm_token_type_ids"),
        Family("qwen2_5_vl", qwen2_5_vl, lambda: qwen_processor("Qwen2_5_VLProcessor"), QWEN, "mm_token_type_ids"),
        Family("qwen3_vl", qwen3_vl, lambda: qwen_processor("Qwen3VLProcessor"), QWEN, "mm_token_type_ids"),
        Family("idefics3", lambda: idefics3("Idefics3"), lambda: idefics3_processor("Idefics3", True), MASKED, None),
        Family("smolvlm", lambda: idefics3("SmolVLM"), lambda: idefics3_processor("SmolVLM", False), MASKED, None),
        Family("gemma3", gemma3, gemma3_processor, ("pixel_values",), "token_type_ids"),
        Family("gemma4", gemma4, gemma4_processor, ("pixel_values", "image_position_ids"), "mm_token_type_ids"),
        Family("llava_next", llava_next, llava_next_processor, ("pixel_values", "image_sizes"), None),
    )
}


try:
    transformers.Gemma4Processor  # noqa: B018
except ImportError:
    del FAMILIES["gemma4"]  # transformers 5.17 cannot import it without torchvision


def picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """An image of random colours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
