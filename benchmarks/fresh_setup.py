"""Sets the checkout up as a machine without any configuration would, and runs what README.md begins with.

    python3 benchmarks/fresh_setup.py --out benchmarks/results/fresh_setup.json python3.11 python3.12
    python3 benchmarks/fresh_setup.py --test-environment /usr/bin/python3 …      `make .venv/.ready` with these as well
    python3 benchmarks/fresh_setup.py --is-current benchmarks/results/fresh_setup.json

Each Python gets a copy of the tracked files in an empty folder, and `make demo` there with the index's torch, the
build for CUDA: some 8 GB of disk, one after the other. `--is-current` exits with 1 when the set-up has changed since
the file was written. Needs the standard library alone, since no environment exists yet.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DECIDES = ("Makefile", "pyproject.toml", "requirements/*")
VERSIONS = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"


def fingerprint() -> str:
    """Of all files that decide what is installed."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in DECIDES for path in ROOT.glob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def bare_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "VIRTUAL_ENV"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}


def size(folder: Path) -> float:
    """GB in a folder."""
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9, 1)


def attempt(python: str, target: str) -> dict[str, object]:
    """One `make` in a fresh copy."""
    with tempfile.TemporaryDirectory() as folder:
        listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).exists():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        start = time.monotonic()
        command = ["make", target, f"PYTHON={python}"]
        done = subprocess.run(command, cwd=folder, env=bare_environment(), capture_output=True, text=True)
        result: dict[str, object] = {
            "target": target,
            "seconds": round(time.monotonic() - start),
            "exit": done.returncode,
        }
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
            return result
        found = subprocess.run(
            [".venv/bin/python", "-c", VERSIONS], cwd=folder, capture_output=True, text=True, check=True
        )
        result["python"], result["torch"] = json.loads(found.stdout)
        megabytes = re.findall(
            r"Downloading \S+ \(([\d.]+) MB\)", done.stdout
        )  # of torch; the rest is installed quietly
        result["torch_download_gb"] = round(sum(map(float, megabytes)) / 1e3, 1)
        result["environment_gb"] = size(Path(folder) / ".venv")
        checked = subprocess.run(
            [".venv/bin/python", "-m", "pip", "check"], cwd=folder, capture_output=True, text=True
        )
        result["pip_check"] = checked.stdout.strip()
        if target == "demo":
            result["demo"] = re.findall(r"held-out accuracy: .*", done.stdout)[-1]
            viewed = [".venv/bin/python", "-m", "gruppo", "view", "runs/demo", "--export", "page.html"]
            result["view_exit"] = subprocess.run(viewed, cwd=folder, capture_output=True).returncode
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", help="each runs `make demo`")
    parser.add_argument(
        "--test-environment", nargs="+", default=[], metavar="PYTHON", help="each runs `make .venv/.ready`"
    )
    parser.add_argument("--is-current", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.is_current:
        recorded = json.loads(options.is_current.read_text())["fingerprint"] if options.is_current.exists() else None
        sys.exit(recorded != fingerprint())
    cases = [(python, "demo") for python in options.pythons]
    cases += [(python, ".venv/.ready") for python in options.test_environment]
    runs = []
    for python, target in cases:
        runs.append(attempt(python, target))
        print(json.dumps(runs[-1]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    result = {
        "commit": commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": f"{os.cpu_count()} CPUs",
        "command": " ".join(["python3 benchmarks/fresh_setup.py", *(Path(word).name for word in sys.argv[1:])]),
        "fingerprint": fingerprint(),
        "runs": runs,
    }
    good = all(not run["exit"] and "No broken" in str(run["pip_check"]) and not run.get("view_exit") for run in runs)
    if options.out and good:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
