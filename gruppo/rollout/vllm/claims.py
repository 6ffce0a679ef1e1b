"""One trainer a server: two would sample from each other's weights, and the server tells neither."""

import hashlib
import os
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from gruppo.errors import ConfigError

__all__ = ["claim"]


def claim(url: str, instance: str) -> FileLock:
    """Hold the server for this process, as long as what is returned is kept; raises if another one here holds it.

    A lock of the operating system, which goes with the process. Processes of other machines and users do not see it.
    """
    server = hashlib.sha256(f"{url} {instance}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"gruppo-vllm-{os.getuid()}-{server}.lock"
    lock = FileLock(path, timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(
            f"Another trainer on this machine samples from the vLLM server at {url} and sends it weights. Start a "
            "server for this one, `gruppo vllm-serve MODEL --port PORT`, and set vllm_server_port."
        ) from error
    return lock
