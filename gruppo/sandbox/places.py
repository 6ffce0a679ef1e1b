"""The files that code in a sandbox may read: the interpreter, its packages and the system libraries."""

import os
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/sbin",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/dev/full",
    "/dev/null",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
    "/sys/devices/system/cpu",
)


@cache
def code_path() -> list[str]:
    """`sys.path` of the code: the standard library and installed packages, but not the current project."""
    library = sysconfig.get_path("stdlib")
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        packages.append(site.getusersitepackages())
    paths = [library, f"{library}/lib-dynload", *packages]
    return list(dict.fromkeys(path for path in paths if os.path.isdir(path)))


@cache
def readable_paths() -> list[str]:
    """Files and directories that the sandbox makes readable to the code."""
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sys.prefix)
    interpreter = [*code_path(), *(f"{prefix}/{folder}" for prefix in prefixes for folder in ("bin", "lib", "lib64"))]
    real = {os.path.realpath(path) for path in interpreter}
    return sorted(path for path in {*SYSTEM, *interpreter, *real} if os.path.exists(path))


def unreachable(paths: list[str]) -> list[str]:
    """Parent directories of the paths that other users may not enter.

    Example: unreachable(["/root/.pyenv/lib"]) == ["/root"]
    """
    above = {folder for path in paths for folder in Path(path).parents}
    return sorted(str(folder) for folder in above if not folder.stat().st_mode & 0o001)
