"""A stand-in for the Hugging Face hub: it notes every repository, every upload and what each was asked with."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitScheduler, HfApi, _commit_scheduler
from huggingface_hub.utils import filter_repo_objects


class Hub:
    """Patches HfApi, through which huggingface_hub and transformers send everything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, public: tuple[str, ...] = ()) -> None:
        self.public = public  # repositories that exist already, for everybody
        self.private: dict[str, bool | None] = {}  # by repository, as it was asked for first
        self.tokens: set[Any] = set()
        self.files: dict[str, bytes] = {}  # "repository/path"
        for name in ("create_repo", "upload_folder", "upload_file", "create_commit", "repo_info"):
            monkeypatch.setattr(HfApi, name, self._noting(getattr(self, name)))
        # Uploads in the background only when a test calls for them, and none after it.
        monkeypatch.setattr(CommitScheduler, "_run_scheduler", lambda scheduler: None)
        monkeypatch.setattr(_commit_scheduler, "atexit", SimpleNamespace(register=lambda upload: None))

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(api: HfApi, *args: Any, token: Any = None, **kwargs: Any) -> Any:
            self.tokens.add(api.token if token is None else token)
            return method(*args, **kwargs)

        return noting

    def create_repo(self, repo_id: str, *, private: bool | None = None, **_: Any) -> Any:
        name = repo_id if "/" in repo_id else f"me/{repo_id}"
        self.private.setdefault(name, private)
        return SimpleNamespace(repo_id=name)

    def repo_info(self, repo_id: str, **_: Any) -> Any:
        return SimpleNamespace(private=bool(self.private[repo_id]) and repo_id not in self.public)

    def upload_folder(
        self, *, repo_id: str, folder_path: Any, path_in_repo: str = "", ignore_patterns: Any = None, **_: Any
    ) -> Any:
        files = {p.relative_to(folder_path).as_posix(): p for p in Path(folder_path).rglob("*") if p.is_file()}
        for name in filter_repo_objects(files, ignore_patterns=ignore_patterns):
            self.files["/".join(part for part in (repo_id, path_in_repo, name) if part)] = files[name].read_bytes()
        return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None)

    def upload_file(self, *, path_or_fileobj: Any, path_in_repo: str, repo_id: str, **_: Any) -> None:
        content = path_or_fileobj if isinstance(path_or_fileobj, bytes) else Path(path_or_fileobj).read_bytes()
        self.files[f"{repo_id}/{path_in_repo}"] = content

    def create_commit(self, repo_id: str, operations: Any, **_: Any) -> None:
        for operation in operations:
            self.files[f"{repo_id}/{operation.path_in_repo}"] = operation.path_or_fileobj.read()

    def top(self, repository: str) -> set[str]:
        """The files and folders at the top of a repository."""
        return {name.removeprefix(f"{repository}/").partition("/")[0] for name in self.files}
