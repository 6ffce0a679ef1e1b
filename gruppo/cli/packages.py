"""Optional packages that a run needs."""

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

from gruppo.cli.recipe import RunFile
from gruppo.errors import packages_of

# Names of `report_to` that are not package names -> the modules of which one must exist, and the package to install.
TRACKERS = {
    "azure_ml": (("azureml",), "azureml-sdk"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "flyte": (("flytekit",), "flytekit"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
}
ALSO = {"dagshub": ("mlflow",)}
WITHOUT_PACKAGE = ("none", "all", "kubeflow")  # "all" means all that are installed; kubeflow is used over HTTP


class Need(NamedTuple):
    """What needs a package, the modules of which one must be importable, and what to install."""

    what: str
    modules: tuple[str, ...]
    install: str

    @property
    def is_met(self) -> bool:
        return any(importlib.util.find_spec(module) is not None for module in self.modules)

    def __str__(self) -> str:
        module = " or ".join(self.modules)
        return f"{self.what} needs {module}, which is not installed here: pip install {self.install}"


def needs(run: RunFile) -> Iterator[Need]:
    """All packages that the run needs, installed or not."""
    if run.config.samples_with_vllm and run.config.vllm_mode == "colocate":
        yield Need("use_vllm", ("vllm",), packages_of("vllm"))
    if str(run.launching.launch or run.launching.accelerate_config).startswith("zero"):
        yield Need("ZeRO", ("deepspeed",), packages_of("deepspeed"))
    if run.model_args.load_in_4bit or run.model_args.load_in_8bit:
        yield Need("load_in_4bit", ("bitsandbytes",), "bitsandbytes")
    asked = run.config.report_to or []
    for tracker in [asked] if isinstance(asked, str) else asked:
        if tracker not in WITHOUT_PACKAGE:
            yield Need(f"report_to: {tracker}", *TRACKERS.get(tracker, ((tracker,), tracker)))
        for package in ALSO.get(tracker, ()):
            yield Need(f"report_to: {tracker}", (package,), package)
