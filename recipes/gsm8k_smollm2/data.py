"""Write GSM8K in the layout of this recipe and `gruppo eval --data-dir`, from the hub or from the authors' files.

python -m recipes.gsm8k_smollm2.data --out DATA
python -m recipes.gsm8k_smollm2.data --out DATA --train train.jsonl --test test.jsonl
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HUB = ("openai/gsm8k", "main")
MARKS = re.compile(r"<<.*?>>")  # calculator annotations: 48/2 = <<48/2=24>>24


def row_of(source: Mapping[str, Any], split: str, number: int) -> dict[str, Any]:
    """One problem in that layout.

    Example:
        row_of({"question": "Half of 48?", "answer": "48/2 = <<48/2=24>>24\\n#### 24"}, "train", 0)
        == {"id": "gsm8k/train/0", "question": "Half of 48?", "solution": "48/2 = 24", "answer": "24"}
    """
    solution, _, answer = source["answer"].rpartition("####")
    return {
        "id": f"gsm8k/{split}/{number}",
        "question": source["question"].strip(),
        "solution": MARKS.sub("", solution).strip(),
        "answer": answer.strip().replace(",", ""),
    }


def read(path: Path | None, split: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a file or, without one, of the hub's dataset."""
    if path is not None:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    from datasets import load_dataset

    rows: Iterable[Mapping[str, Any]] = load_dataset(*HUB, split=split)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="gets a folder gsm8k with train.jsonl and test.jsonl")
    parser.add_argument("--train", type=Path, help="the authors' train.jsonl; without it, the hub is asked")
    parser.add_argument("--test", type=Path, help="and their test.jsonl")
    options = parser.parse_args(argv)
    folder = options.out / "gsm8k"
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [row_of(row, split, number) for number, row in enumerate(read(getattr(options, split), split))]
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{folder / split}.jsonl: {len(rows)} problems")


if __name__ == "__main__":
    main()
