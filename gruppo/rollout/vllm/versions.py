"""Which releases of vLLM this package supports, and where they differ.

Those from FIRST to LAST_RUN were run; docs/vllm.md says which, and on what. Newer ones below FIRST_UNKNOWN have the
same formats according to their source.
"""

import logging
import re

from gruppo.errors import ConfigError

logger = logging.getLogger(__name__)

Release = tuple[int, int]

FIRST, FIRST_UNKNOWN = (0, 24), (0, 34)
LAST_RUN = (0, 32)

# From these releases on, that tensors are packed is said once, when a transfer is set up, not with every part.
PACKING_SAID_ONCE: dict[str, Release] = {"ipc": (0, 27), "nccl": (0, 28)}
IPC_WITHOUT_RAY = (0, 27)  # earlier releases import ray for their IPC transfer


def release_of(version: str) -> Release | None:
    """The first two numbers of a version; None if it does not begin with two numbers.

    Example:
        release_of("v0.27.1.dev3+g12") -> (0, 27)
    """
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def supported() -> str:
    """The releases, for messages."""
    return f"{_named(FIRST)} to {FIRST_UNKNOWN[0]}.{FIRST_UNKNOWN[1] - 1}"


def _named(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def check_version(version: str, where: str) -> Release:
    """The release; raises for an unsupported one, warns about an untested one; `where` says where it was found.

    Example:
        check_version("0.24.1", "the server at http://127.0.0.1:8000") -> (0, 24)
        check_version("0.33.0", "this environment") -> (0, 33)              # and a warning: … not been tested …
        check_version("0.23.0", "this environment")                         # ConfigError: … 0.24 to 0.33 …
    """
    release = release_of(version)
    if release is None or not FIRST <= release < FIRST_UNKNOWN:
        raise ConfigError(
            f"vLLM {version} of {where} is not supported: weights and samples are exchanged in the formats of "
            f"vLLM {supported()}. Install one of these: pip install 'vllm=={_named(LAST_RUN)}.*'."
        )
    if release > LAST_RUN:
        logger.warning(
            f"vLLM {version} of {where} has not been tested; the newest tested release is {_named(LAST_RUN)}. If this "
            f"one fails: pip install 'vllm=={_named(LAST_RUN)}.*'."
        )
    return release
