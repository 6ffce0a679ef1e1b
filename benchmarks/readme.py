"""Put the measured numbers into README.md, from the result files: `python benchmarks/readme.py`."""

import json
import math
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rows() -> dict[str, str]:
    """The result cell of each row of README's table, by the file it comes from."""
    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")}
    runs = results["demo"]["runs"]
    befores, afters, seconds = ([run[key] for run in runs] for key in ("before", "after", "seconds"))
    step = results["cpu_step"]
    cases = results["trl_parity"]["cases"]
    half = [case["weights_difference"] for name, case in cases.items() if "bfloat16" in name]
    full = [case["weights_difference"] for name, case in cases.items() if "bfloat16" not in name]
    return {
        "demo": f"held-out accuracy {befores[0]:.3f} → {min(afters):.3f} to {max(afters):.3f}, "
        f"at most {math.ceil(max(seconds))} s",
        "cpu_step": f"{step['wall_ratio']:.2f} × faster ({step['wall_seconds']['gruppo']:.2f} s against "
        f"{step['wall_seconds']['trl']:.2f} s)",
        "trl_parity": f"equal to {max(full):.0e} of their size in {len(full)} settings in float32 "
        f"({max(half):.0e} in bfloat16)",
    }


def fill(text: str) -> str:
    """The README with the result cells replaced."""
    for name, cell in rows().items():
        pattern = rf"^(\| [^|]+ \| )[^|]+( \| \[{name}\.json\])"
        text, count = re.subn(pattern, lambda found, cell=cell: found[1] + cell + found[2], text, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"README.md has {count} rows for {name}.json")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text()))
