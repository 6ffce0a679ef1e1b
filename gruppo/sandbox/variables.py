"""The environment variables of processes that handle model output: reward workers and graders.

A worker gets the variables that a Python process and its libraries need to behave as in this process. All others (API
keys of judges, hub tokens, passwords) are withheld unless `worker_env` names them, since a reward's errors are logged.
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
# Prefixes of settings. A variable with one is passed unless its name looks like a secret: HF_HOME is, HF_TOKEN is not.
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
    """The variables of a worker, with a PYTHONPATH from which it can import this package.

    Variables that a launcher sets for the ranks of a run (RANK, MASTER_ADDR, …) are not included: a worker is not a
    rank and must not act as one.
    """
    kept = {name: value for name, value in os.environ.items() if name in named or is_passed(name, value)}
    root = str(Path(__file__).parents[2])
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return kept
    return {**kept, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def is_passed(name: str, value: str) -> bool:
    """Whether a worker gets a variable that `worker_env` does not name.

    Example:
        is_passed("HTTPS_PROXY", "http://proxy:3128") and not is_passed("HTTPS_PROXY", "http://me:word@proxy:3128")
    """
    if name.upper() in PROXIES:
        return not URL_WITH_PASSWORD.search(value)
    if name in PASSED:
        return True
    return name.startswith(PASSED_FAMILIES) and not SECRET.search(name) and not URL_WITH_PASSWORD.search(value)


def hint(error: str, named: Collection[str] = ()) -> str:
    """Advice if an error text mentions a variable that is set here but withheld from workers; else an empty string."""
    words = set(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", error)) - set(named)
    held_back = sorted(name for name in words if name in os.environ and not is_passed(name, os.environ[name]))
    if not held_back:
        return ""
    return (
        f"\nReward workers do not get the environment variable {', '.join(held_back)}, which is set in this process. "
        f"If the reward needs it, set worker_env={held_back}."
    )
