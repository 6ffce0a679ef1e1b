"""What a machine can enforce is found by attacking a sandbox; what it cannot is refused."""

import logging
import os
import time

import pytest

from gruppo.errors import ConfigError, SandboxError
from gruppo.sandbox import Sandbox, capabilities, sandbox
from gruppo.sandbox.capabilities import PROTECTIONS
from tests.sandbox.conftest import FILTERS, use_mechanisms


def test_this_machine_enforces_something() -> None:
    """Other tests skip what a machine cannot do; these hold on any Linux."""
    found = Sandbox.capabilities()
    assert {"memory", "orphans"} <= set(found.enforced)
    assert set(found.enforced) | set(found.missing) == set(PROTECTIONS)
    for protection in PROTECTIONS:
        assert protection in str(found)


def test_attacks_succeed_without_mechanisms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "candidates", lambda: ())
    capabilities.capabilities.cache_clear()
    found = Sandbox.capabilities()
    assert {"network", "reads", "writes", "parent", "memory"} <= set(found.missing)
    assert found.mechanisms == ()
    if os.geteuid() == 0:
        assert "processes" in found.missing, "root has no limit"


def test_a_missing_mechanism_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mechanisms(monkeypatch, ("landlock",))
    with pytest.raises(SandboxError, match=r"(?s)network +NOT ENFORCED.*allow_unconfined=\{.*'network'"):
        Sandbox()


def test_a_refusal_by_the_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter is not installed, as where a container forbids it: the kernel's words are in the message."""
    use_mechanisms(monkeypatch, ("seccomp", "a mechanism of the future"))
    real = capabilities.execute

    def without_seccomp(code: str, stdin: str, show_last: bool, limits: object, mechanisms: tuple[str, ...]) -> object:
        if "seccomp" in mechanisms:
            raise capabilities.MechanismError("seccomp", "Operation not permitted")
        return real(code, stdin, show_last, limits, ())  # type: ignore[arg-type]

    monkeypatch.setattr(capabilities, "execute", without_seccomp)
    monkeypatch.setattr(capabilities, "_check_interpreter", lambda mechanisms: None)
    assert "seccomp: Operation not permitted" in Sandbox.capabilities().missing["network"]


def test_what_is_missing_can_be_accepted_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_mechanisms(monkeypatch, ("landlock",))
    sandbox._say_once.cache_clear()
    missing = set(Sandbox.capabilities().missing)
    assert "network" in missing
    if len(missing) > 1:
        with pytest.raises(SandboxError):
            Sandbox(allow_unconfined={"network"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            box = Sandbox(allow_unconfined=missing)
    assert len(caplog.records) == 1, "said once"
    assert "NOT ENFORCED" in caplog.text
    assert box.run("import socket; socket.socket(); print('open')").stdout == "open\n"


def test_accepting_more_than_is_missing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Sandbox.capabilities()
    if "network" in found.missing:
        pytest.skip("the network is open here")
    box = Sandbox(allow_unconfined=set(PROTECTIONS))
    assert box.run("import socket; s = socket.socket(); s.bind(('127.0.0.1', 0))").reason == "error"


def test_unknown_protections_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"netwrok.*the protections are network"):
        Sandbox(allow_unconfined={"netwrok"})


def test_an_interpreter_in_a_private_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "unreachable", lambda paths: ["/private"])
    capabilities._check_interpreter(("own uid", "landlock"))
    with pytest.raises(SandboxError, match="chmod o\\+x /private"):
        capabilities._check_interpreter(("own uid", "seccomp"))


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    capabilities.capabilities.cache_clear()
    with pytest.raises(SandboxError, match="Linux"):
        Sandbox()


def test_finding_out_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mechanisms(monkeypatch, FILTERS)
    Sandbox.capabilities()
    start = time.monotonic()
    for _ in range(1000):
        Sandbox.capabilities()
    assert time.monotonic() - start < 1
