"""Write TRL's config fields and their defaults to a file, for the table in docs/fields.md.

    make bench-peers
    .venv-peers/bin/python benchmarks/trl_fields.py --out benchmarks/results/trl_fields.json

Only names and defaults, as `dataclasses.fields` reports them.
"""

import argparse
import json
import sys
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import TrainingArguments

from benchmarks.common import provenance


def default(field: Field[Any]) -> Any:
    """The default of a field as a JSON value."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value is MISSING:
        return "required"
    return value.value if isinstance(value, Enum) else value


def main() -> None:
    from trl import GRPOConfig, RLOOConfig

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    inherited = {field.name: default(field) for field in fields(TrainingArguments)}
    found = {}
    for config in (GRPOConfig, RLOOConfig):
        values = {field.name: default(field) for field in fields(config)}
        # Fields that transformers defines with the same default depend on its version and are not specific to TRL.
        found[config.__name__] = {
            name: value for name, value in values.items() if name not in inherited or value != inherited[name]
        }
    result = {**provenance("trl"), **found}
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
