"""Which releases of vLLM this package supports."""

import logging
import re

from gruppo.errors import ConfigError

logger = logging.getLogger(__name__)

FIRST, FIRST_UNKNOWN = (0, 24), (0, 28)  # 0.28 starts a weight transfer with different fields
LAST_READ = (0, 24)  # the newest release whose source was read and which was run


def supported() -> str:
    """The releases, for messages."""
    return f"{FIRST[0]}.{FIRST[1]} to {FIRST_UNKNOWN[0]}.{FIRST_UNKNOWN[1] - 1}"


def check_version(version: str, where: str) -> None:
    """Raise for an unsupported release, warn about an untested one; `where` says where it was found.

    Example:
        check_version("0.24.1", "the server at http://127.0.0.1:8000")      # fine
        check_version("0.26.0", "this environment")                         # a warning: … not been tested …
        check_version("0.31.0", "this environment")                         # ConfigError: … 0.24 to 0.27 …
    """
    found = re.match(r"v?(\d+)\.(\d+)", version)
    release = None if found is None else (int(found[1]), int(found[2]))
    first, _, last = supported().split()
    if release is None or not FIRST <= release < FIRST_UNKNOWN:
        raise ConfigError(
            f"vLLM {version} of {where} is not supported: weights and samples are exchanged in the formats of "
            f"vLLM {supported()}. Install one of these: pip install 'vllm=={first}.*'."
        )
    if release > LAST_READ:
        read = f"{LAST_READ[0]}.{LAST_READ[1]}"
        logger.warning(
            f"vLLM {version} of {where} has not been tested; the newest tested release is {read}. Releases up to "
            f"{last} are accepted. If this one fails: pip install 'vllm=={read}.*'."
        )
