"""Which protections this machine can enforce, determined by trying them rather than by checking versions."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gruppo.errors import SandboxError
from gruppo.sandbox.attacks import ATTACKS, SECRET
from gruppo.sandbox.host import execute
from gruppo.sandbox.jail.kernel import MechanismError
from gruppo.sandbox.places import readable_paths, unreachable
from gruppo.sandbox.spec import MIB, Limits

# The protections of a sandbox, and the mechanisms that provide each.
PROTECTIONS: dict[str, tuple[str, ...]] = {
    "network": ("network namespace", "seccomp"),
    "reads": ("mount namespace", "landlock", "own uid"),
    "writes": ("mount namespace", "landlock", "own uid"),
    "processes": ("own uid", "user namespace"),
    "parent": ("pid namespace", "own uid", "user namespace", "landlock"),
    "orphans": ("pid namespace", "own uid"),
    "memory": ("seccomp",),  # a resource limit bounds address spaces; the filter denies memory outside of them
}
WITHOUT_MECHANISM = {"processes": "resource limit", "orphans": "subreaper"}

PROBE_LIMITS = Limits(seconds=20, memory=256 * MIB, processes=8)


@dataclass(frozen=True)
class Capabilities:
    """Which protections are enforced and how, and which are not and why.

    Example, in a container that forbids namespaces and whose kernel has no Landlock:
        Capabilities(
            enforced={"network": "seccomp", "memory": "seccomp", …},
            missing={"reads": "mount namespace: Operation not permitted; landlock: Function not implemented", …},
            mechanisms=("own uid", "seccomp"),
        )
    """

    enforced: Mapping[str, str]
    missing: Mapping[str, str]
    mechanisms: tuple[str, ...]

    def __str__(self) -> str:
        rows = [f"{name:<10} {how}" for name, how in self.enforced.items()]
        return "\n".join([*rows, *(f"{name:<10} NOT ENFORCED ({why})" for name, why in self.missing.items())])


def candidates() -> tuple[str, ...]:
    """The strongest combination of mechanisms to try: root needs no user namespace, other users have no second uid."""
    first = "own uid" if os.geteuid() == 0 else "user namespace"
    return first, "network namespace", "pid namespace", "mount namespace", "landlock", "seccomp"


@functools.cache
def capabilities() -> Capabilities:
    """Find the mechanisms that work here, then attack a sandbox that uses them. Slow; cached for the process."""
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        raise SandboxError("Model-written code can be confined on Linux only (x86-64 or aarch64).")
    mechanisms, refused = _working_mechanisms(candidates())
    broken = _successful_attacks(mechanisms)
    enforced, missing = {}, {}
    for protection, useful in PROTECTIONS.items():
        if protection in broken:
            reasons = [f"{name}: {refused[name]}" for name in useful if name in refused]
            missing[protection] = "; ".join([broken[protection], *reasons])
        else:
            used = [name for name in useful if name in mechanisms]
            enforced[protection] = " + ".join(used or [WITHOUT_MECHANISM.get(protection, "file permissions")])
    return Capabilities(enforced, missing, mechanisms)


def _working_mechanisms(wanted: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Start a sandbox with all wanted mechanisms; drop a refused one and try again, until it starts."""
    refused: dict[str, str] = {}
    while True:
        mechanisms = tuple(name for name in wanted if name not in refused)
        _check_interpreter(mechanisms)
        try:
            execution = execute("print('here')", "", False, PROBE_LIMITS, mechanisms)
        except MechanismError as refusal:
            if refusal.mechanism not in mechanisms:
                raise SandboxError(f"A sandbox cannot be started on this machine: {refusal}") from None
            refused[refusal.mechanism] = refusal.error
            if refusal.mechanism == "pid namespace":  # without it the guard needs the /proc that a new root hides
                refused["mount namespace"] = "needs a pid namespace"
            continue
        if execution.stdout != "here\n":
            raise SandboxError(
                f"Python does not run in a sandbox on this machine: {execution.stderr.strip() or execution}"
            )
        return mechanisms, refused


def _check_interpreter(mechanisms: tuple[str, ...]) -> None:
    """Raise if the code's uid cannot reach the interpreter; a mount namespace or Landlock can safely grant access."""
    private = unreachable(readable_paths())
    if private and "own uid" in mechanisms and not {"mount namespace", "landlock"} & set(mechanisms):
        raise SandboxError(
            f"The interpreter {sys.executable} lies below {', '.join(private)}, which only root may enter, and "
            f"model-written code does not run as root: `chmod o+x {' '.join(private)}`, or install Python elsewhere."
        )


def _successful_attacks(mechanisms: tuple[str, ...]) -> dict[str, str]:
    """Run the attacks in a sandbox. The result maps each broken protection to how it was broken."""
    with tempfile.TemporaryDirectory(prefix="gruppo-probe-") as folder:
        os.chmod(folder, 0o777)
        victim = Path(folder, "victim")
        victim.write_text(SECRET, encoding="ascii")
        victim.chmod(0o666)
        decoy = subprocess.Popen(["sleep", "60"], env={"SECRET": SECRET})
        try:
            target = {"folder": folder, "decoy": decoy.pid, "processes": PROBE_LIMITS.processes}
            execution = execute(ATTACKS, json.dumps(target), False, PROBE_LIMITS, mechanisms)
            broken: dict[str, str] = {}
            for line in execution.stdout.splitlines():
                protection, _, how = line.partition(": ")
                broken.setdefault(protection, how)
            if "attacked" not in broken:
                raise SandboxError(f"The sandbox could not be tested: {execution.stderr.strip() or execution}")
            del broken["attacked"]
            if decoy.poll() is not None:
                broken["parent"] = "a process outside the sandbox was killed"
            untouched = victim.exists() and victim.read_bytes() == SECRET.encode()
            if not untouched or victim.stat().st_mode & 0o777 != 0o666 or os.listdir(folder) != ["victim"]:
                broken["writes"] = "a file outside the sandbox was changed"
        finally:
            decoy.kill()
            decoy.wait()
    return broken
