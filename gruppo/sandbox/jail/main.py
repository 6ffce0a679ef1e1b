"""The stages of a run, in order."""

import marshal
import os
import signal

from gruppo.sandbox.jail import confine, guard, namespaces, runner
from gruppo.sandbox.jail.confine import step
from gruppo.sandbox.jail.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, MechanismError, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gruppo.sandbox.spec import Spec


def main(spec_fd: int, status_fd: int, lifeline_fd: int) -> None:
    """Read the spec and run it. Only the process of the code returns from here; it then exits as any program does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with a handler, the code could interrupt the guard
    with os.fdopen(spec_fd, "rb") as file:
        spec: Spec = marshal.load(file)
    try:
        _become_the_code(spec, status_fd, lifeline_fd)
    except MechanismError as failure:
        os.write(status_fd, marshal.dumps({"failed": failure.mechanism, "error": failure.error}))
        os._exit(1)
    except BaseException as error:
        os.write(status_fd, marshal.dumps({"failed": "start", "error": repr(error)}))
        os._exit(1)
    os.close(status_fd)
    os.close(lifeline_fd)
    runner.run(spec["code"], spec["path"], spec["show_last"])


def _become_the_code(spec: "Spec", status_fd: int, lifeline_fd: int) -> None:
    """Fork the guard and the code. Only the process of the code returns; the others exit here."""
    mechanisms = spec["mechanisms"]
    uid = confine.private_uid() if "own uid" in mechanisms else os.getuid()
    _make_namespaces(mechanisms)
    if "pid namespace" in mechanisms:
        child = os.fork()
        if child:
            os.close(status_fd)  # only the guard may hold it, so that the host notices when the guard ends
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    if "mount namespace" in mechanisms:
        step("mount namespace", namespaces.own_root, spec["root"], spec["readable"], spec["work"], spec["disk"], uid)
    elif "own uid" in mechanisms:
        os.chown(spec["work"], uid, uid)
    code = os.fork()
    if code:
        guard.watch(code, spec, uid, status_fd, lifeline_fd)
        os._exit(0)
    confine.confine(spec, uid)


def _make_namespaces(mechanisms: list[str]) -> None:
    if "user namespace" in mechanisms:
        step("user namespace", namespaces.own_user_namespace)
    for name, flags in (
        ("network namespace", namespaces.NEW_NETWORK),
        ("pid namespace", namespaces.NEW_PIDS | namespaces.NEW_IPC),
        ("mount namespace", namespaces.NEW_MOUNTS),
    ):
        if name in mechanisms:
            step(name, namespaces.unshare, flags)
