"""Sandboxes built from all mechanisms of this machine, and from subsets, as on other machines."""

import os
from collections.abc import Callable, Iterator

import pytest

from gruppo.sandbox import Limits, Sandbox, capabilities

NAMESPACES = ("network namespace", "pid namespace", "mount namespace")
FILTERS = ("landlock", "seccomp")
SETS = {"all": (*NAMESPACES, *FILTERS), "namespaces": NAMESPACES, "filters": FILTERS}

MakeSandbox = Callable[..., Sandbox]


def use_mechanisms(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Restrict the available mechanisms to these, plus the matching change of user."""
    if os.geteuid() == 0:
        names = ("own uid", *names)
    elif names != FILTERS:
        names = ("user namespace", *names)
    monkeypatch.setattr(capabilities, "candidates", lambda: names)
    capabilities.capabilities.cache_clear()


@pytest.fixture(autouse=True)
def _forget_capabilities() -> Iterator[None]:
    yield
    capabilities.capabilities.cache_clear()


@pytest.fixture(params=[name if name == "all" else pytest.param(name, marks=pytest.mark.medium) for name in SETS])
def make_sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeSandbox:
    """A function that makes sandboxes; it skips the test if the machine lacks the mechanism that it `needs`."""
    use_mechanisms(monkeypatch, SETS[request.param])

    def make(needs: str = "", **limits: float) -> Sandbox:
        missing = Sandbox.capabilities().missing
        if needs in missing:
            pytest.skip(f"not enforced here: {needs} ({missing[needs]})")
        return Sandbox(Limits(**{"seconds": 20, **limits}), allow_unconfined=missing)

    return make


@pytest.fixture
def sandbox(make_sandbox: MakeSandbox) -> Sandbox:
    return make_sandbox()
