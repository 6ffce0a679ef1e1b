"""The environment variables of processes that read what a model wrote: reward workers and graders.

A worker gets those that a Python process and its libraries need to run as this one does. Everything else (keys of
judges, tokens of the hub, passwords) stays here, unless `worker_env` names it: the errors of a reward are logged.
"""

import os
import re
import sysconfig
from collections.abc import Collection
from pathlib import Path

PASSED = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TZ", "LANG", "LANGUAGE"),
    *("TMPDIR", "TMP", "TEMP", "VIRTUAL_ENV", "JAVA_HOME", "NLTK_DATA"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES", "GOMP_CPU_AFFINITY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    "TOKENIZERS_PARALLELISM",
}
# Families of settings. Their members are passed unless their name sounds like a secret: HF_HOME is, HF_TOKEN is not.
PASSED_FAMILIES = (
    *("LC_", "XDG_", "PYTHON", "CONDA_", "DYLD_", "MALLOC_"),
    *("OMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_"),
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_"),
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|(^|_)(API_?KEY|KEY|PWD|PAT)($|_)")
PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "NO_PROXY"}
URL_WITH_PASSWORD = re.compile(r"://[^/\s]*@|^[^/\s]*:[^/\s]*@")


def environment(named: Collection[str] = ()) -> dict[str, str]:
    """The variables of a worker, with an import path on which it finds this package.

    What a launcher tells the processes of a run (RANK, MASTER_ADDR, …) is not among them: a worker is none of those,
    and must not take the place of one.
    """
    kept = {name: value for name, value in os.environ.items() if name in named or is_passed(name, value)}
    root = str(Path(__file__).parents[2])
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return kept
    return {**kept, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def is_passed(name: str, value: str) -> bool:
    """Whether a worker gets a variable that nobody named.

    Example:
        is_passed("HTTPS_PROXY", "http://proxy:3128") and not is_passed("HTTPS_PROXY", "http://me:word@proxy:3128")
    """
    if name.upper() in PROXIES:
        return not URL_WITH_PASSWORD.search(value)
    if name in PASSED:
        return True
    return name.startswith(PASSED_FAMILIES) and not SECRET.search(name) and not URL_WITH_PASSWORD.search(value)


def hint(error: str, named: Collection[str] = ()) -> str:
    """What to do about an error text that speaks of a variable which is set here, but not in workers; else nothing."""
    words = set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", error)) - set(named)
    held_back = sorted(name for name in words if name in os.environ and not is_passed(name, os.environ[name]))
    if not held_back:
        return ""
    return (
        f"\nReward workers do not get the environment variable {', '.join(held_back)}, which is set in this process. "
        f"If the reward needs it: worker_env={held_back}."
    )
