"""Damaged checkpoints, with a manifest and without one: found, and named."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gruppo.errors import CheckpointError
from gruppo.runs import manifests
from gruppo.runs.checkpoints import MANIFEST, checkpoints, manifest, problems, publish, stage
from gruppo.runs.manifests import FileEntry, Manifest
from tests.runs.saving import add, cut, flip, save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, 5)


# ---- with a manifest


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_outer_link(path: Path) -> None:
    outside = path.parents[2] / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def to_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGE = [
    (cut, "model.safetensors has 750 bytes, the manifest says 1,500: it was cut off"),
    (add, "model.safetensors has 1,501 bytes, the manifest says 1,500: something was added to it"),
    (flip, "model.safetensors has changed: its SHA-256 is "),
    (Path.unlink, "model.safetensors is missing"),
    (to_folder, "model.safetensors is not a file"),
    (to_pipe, "model.safetensors is not a file"),
    (to_loop, "'model.safetensors' cannot be read: "),
]


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE)
def test_damage_is_found_and_named(saved, damage, sentence):
    damage(saved / "model.safetensors")
    (found,) = problems(saved)
    assert found.startswith(sentence)
    quick = problems(saved, thorough=False)
    assert quick == ([] if damage is flip else [found]), "only a change inside needs the checksums"


def test_damage_below_and_in_several_files_is_found(saved):
    flip(saved / "rank_0" / "state.pt")
    add(saved / "empty")
    first, second = problems(saved)
    assert first.startswith("empty has 1 bytes")
    assert second.startswith("rank_0/state.pt has changed")


def test_links_out_of_the_folder_are_refused_and_inside_they_are_not(saved):
    (saved / "copy").write_bytes((saved / "model.safetensors").read_bytes())
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors").symlink_to("copy")
    assert problems(saved) == []
    (saved / "model.safetensors").unlink()
    (saved / "copy").rename(saved / "model.safetensors")
    to_outer_link(saved / "model.safetensors")
    assert problems(saved) == [f"'model.safetensors' in {MANIFEST} leads out of the checkpoint"]


def test_a_linked_folder_leads_out_as_well(saved, tmp_path):
    shutil.move(saved / "rank_0", tmp_path / "elsewhere")
    (saved / "rank_0").symlink_to(tmp_path / "elsewhere")
    assert problems(saved) == [f"'rank_0/state.pt' in {MANIFEST} leads out of the checkpoint"]


def test_a_checkpoint_that_is_named_may_itself_be_a_link(saved, tmp_path):
    shutil.move(saved, tmp_path / "large-disk")
    saved.symlink_to(tmp_path / "large-disk")
    assert problems(saved) == []
    assert checkpoints(tmp_path) == [], "it is not used, replaced or removed by itself"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "rank_0/../../secret", "", ".", "..", "rank_0/.."])
def test_names_that_leave_the_folder_are_refused(saved, tmp_path, name):
    (tmp_path / "secret").write_bytes(b"")
    manifests.write(saved, Manifest({}, {name: FileEntry(0, "")}))
    assert problems(saved) == [f"{name!r} in {MANIFEST} leads out of the checkpoint"]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000])
def test_names_that_no_file_can_have_are_problems_not_crashes(saved, name):
    manifests.write(saved, Manifest({}, {name: FileEntry(0, "")}))
    (found,) = problems(saved)
    assert "cannot be read" in found


def test_every_flipped_bit_of_the_manifest_is_noticed(tmp_path):
    staged = stage(tmp_path, "checkpoint-5")
    (staged / "weights").write_bytes(b"x")
    path = publish(staged, {"rate": 1e-6, "note": "é"})
    good, content = manifest(path), (path / MANIFEST).read_bytes()
    unnoticed = 0
    for position, bit in itertools.product(range(len(content)), range(8)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << bit
        (path / MANIFEST).write_bytes(flipped)
        try:
            assert manifest(path) == good, "what reads the same is the same"
            unnoticed += 1
        except CheckpointError:
            pass
    assert unnoticed < 10, "e or E, in a number or a \\u escape"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "is not a manifest"),
        (b"{}", "is not a manifest"),
        (b'{"format": 2}', "has format 2, and this version of gruppo reads format 1"),
        (b'{"format": 1, "about": {}, "files": {}}', "does not match its own checksum"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_a_problem(saved, content, sentence):
    (saved / MANIFEST).write_bytes(content)
    (found,) = problems(saved)
    assert found.startswith(MANIFEST)
    assert sentence in found


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"about": {}, "files": []},
        {"about": [], "files": {}},
        {"about": {}, "files": {"a": 1}},
        {"about": {}, "files": {"a": {"size": "1", "sha256": ""}}},
        {"about": {}, "files": {"a": {"size": 1, "sha256": None}}},
    ],
)
def test_a_manifest_with_a_right_checksum_may_still_be_nonsense(saved, body):
    body = {"format": 1, **body}
    (saved / MANIFEST).write_text(json.dumps({**body, "sha256": manifests._checksum(body)}))
    (found,) = problems(saved)
    assert "lacks required entries" in found


@pytest.mark.parametrize("change", [to_pipe, to_folder, to_outer_link])
def test_a_manifest_must_be_a_file_of_its_own(saved, change):
    change(saved / MANIFEST)
    assert problems(saved) == [f"{MANIFEST} is not a plain file"]


def test_a_manifest_that_names_nothing_is_no_checkpoint(saved):
    manifests.write(saved, Manifest({}, {}))
    assert problems(saved) == [f"{MANIFEST} names no files"]


def test_a_folder_that_is_not_there_is_a_problem(tmp_path):
    assert problems(tmp_path / "checkpoint-9") == [f"{tmp_path / 'checkpoint-9'} is not a folder"]


# ---- plain checkpoints


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    (path / "trainer_state.json").write_text('{"global_step": 3}')
    save_file({"a": torch.zeros(100), "b": torch.ones(7)}, path / "model.safetensors")
    torch.save({"state": torch.zeros(100)}, path / "optimizer.pt")
    return path


def test_a_plain_checkpoint_is_good_and_has_no_manifest(plain):
    assert manifest(plain) is None
    assert problems(plain) == []


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("trainer_state.json", Path.unlink, "trainer_state.json is missing"),
        ("trainer_state.json", cut, "trainer_state.json is not readable JSON"),
        ("model.safetensors", Path.unlink, "there are no weights"),
        ("model.safetensors", cut, "model.safetensors has "),
        ("model.safetensors", add, "model.safetensors has "),
        ("model.safetensors", lambda path: os.truncate(path, 0), "model.safetensors is empty"),
        ("model.safetensors", lambda path: os.truncate(path, 5), "model.safetensors has 5 bytes, too few"),
        ("model.safetensors", lambda path: os.truncate(path, 20), "model.safetensors has 20 bytes, too few"),
        (
            "model.safetensors",
            lambda path: path.write_bytes(b"\2" + b"\0" * 7 + b"[]"),
            "model.safetensors has a header",
        ),
        ("optimizer.pt", cut, "optimizer.pt has no table of contents: it was cut off"),
    ],
)
def test_damage_to_a_plain_checkpoint(plain, name, damage, sentence):
    damage(plain / name)
    (found,) = problems(plain)
    assert found.startswith(sentence)


def test_the_shards_that_an_index_names_must_be_there(plain):
    (plain / "model.safetensors").rename(plain / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = plain / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert problems(plain) == [f"{shards['b']} is missing: {index.name} names it"]
    shutil.copy(plain / shards["a"], plain / shards["b"])
    assert problems(plain) == []
    index.write_text(json.dumps({"weight_map": {"a": "../outside"}}))
    assert problems(plain) == [f"{index.name} names '../outside', which is not a file beside it"]
    index.write_text("[]")
    assert problems(plain) == [f"{index.name} cannot be read as an index of weights"]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin"])
def test_other_names_of_weights(plain, name):
    (plain / "model.safetensors").rename(plain / name)
    assert problems(plain) == []


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "global_step3"])
def test_sharded_weights_are_folders(plain, name):
    (plain / "model.safetensors").unlink()
    (plain / name).mkdir()
    assert len(problems(plain)) == 1, "an empty one is not enough"
    (plain / name / "shard").write_bytes(b"x")
    assert problems(plain) == []


def test_without_its_manifest_a_checkpoint_of_ours_is_looked_at_as_a_plain_one(saved):
    (saved / MANIFEST).unlink()
    (found,) = problems(saved)
    assert found.startswith("model.safetensors has "), "this test's weights are not in the format"
