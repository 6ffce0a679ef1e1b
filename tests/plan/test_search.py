"""The largest settings that fit, and seconds."""

from dataclasses import replace

import pytest

from gruppo.plan import DEVICES, find_device, peak_flops
from gruppo.plan.job import Job
from gruppo.plan.memory import Memory
from gruppo.plan.presets import preset
from gruppo.plan.search import decoded_together, largest, largest_settings
from gruppo.plan.seconds import Seconds

JOB = Job(
    preset("qwen2-1.5b"), DEVICES["RTX 4090"], rows=64, generations=8, prompt_tokens=200, completion_tokens=256,
    weight_bytes=2,
)  # fmt: skip


@pytest.mark.parametrize("limit", [*range(1, 20), 100, 1023, 1024])
def test_the_largest_that_fits(limit: int) -> None:
    assert largest(lambda value: value <= limit, most=1024) == limit
    assert largest(lambda value: value <= limit, step=8, most=1024) == (limit // 8 * 8 or None)


def test_larger_settings_do_not_fit() -> None:
    found = {(one.setting, one.means): one.value for one in largest_settings(JOB)}
    (together,) = [value for (setting, _), value in found.items() if setting == "generation batch"]
    assert isinstance(together, int)
    assert together % 8 == 0
    assert decoded_together(JOB.with_(rows=together))
    assert not decoded_together(JOB.with_(rows=together + 8))
    longest, whole = (value for (setting, _), value in found.items() if setting == "max_completion_length")
    assert isinstance(longest, int)
    assert isinstance(whole, int)
    assert longest > whole > 256
    assert Memory(JOB.with_(completion_tokens=longest)).fits
    assert not Memory(JOB.with_(completion_tokens=longest + 16)).fits
    assert Memory(JOB.with_(completion_tokens=whole + 16)).update_plan.checkpointing
    models = [value for (setting, _), value in found.items() if setting == "model"]
    assert models == ["qwen2-1.5b", "qwen2-7b"], "all weights trained, and with LoRA"


def test_the_length_without_checkpointing_is_the_same_if_the_config_turns_it_on() -> None:
    def lengths(job: Job) -> list[object]:
        return [one.value for one in largest_settings(job) if one.setting == "max_completion_length"]

    assert lengths(JOB.with_(checkpointing=True)) == lengths(JOB)
    assert len(set(lengths(JOB))) == 2


def test_a_prompt_is_read_once_per_group_where_the_kernel_for_that_runs() -> None:
    def seconds(prompt_tokens: int, rows: int) -> float:
        job = JOB.with_(prompt_tokens=prompt_tokens, rows=rows)
        return Seconds(job, Memory(job)).decode_step["KV cache"]

    assert seconds(256, 128) < seconds(255, 128)
    assert seconds(256, 32) > seconds(255, 32)


def test_nothing_fits_a_device_that_is_too_small() -> None:
    tiny = JOB.with_(device=replace(JOB.device, memory=2.0))
    assert not Memory(tiny).fits
    assert {one.value for one in largest_settings(tiny)} == {None}


def test_seconds_grow_with_what_there_is_to_do() -> None:
    def seconds(**changes: object) -> float:
        job = JOB.with_(device=DEVICES["H200"], **changes)
        return Seconds(job, Memory(job)).step

    assert seconds() < seconds(rows=512) < seconds(rows=512, completion_tokens=512)
    assert seconds(rows=512) < seconds(rows=512, reference=True)
    assert seconds(rows=512) < seconds(rows=512, checkpointing=True) < 2 * seconds(rows=512)
    assert seconds(rows=512, unmoved=0.5) < seconds(rows=512)
    assert seconds(rows=512, mean_completion_tokens=64) < seconds(rows=512)
    parts = [part.name for part in Seconds(JOB, Memory(JOB)).parts]
    assert parts == ["prompts", "decoding", "update", "the rest"]
    off = JOB.with_(reference=True, old_logps=True, sampler="vllm server")
    assert [part.name for part in Seconds(off, Memory(off)).parts] == [
        *("old log-probs", "reference log-probs", "update", "the rest"),
    ]


def test_devices_by_the_names_that_drivers_give_them() -> None:
    def name(said: str) -> str | None:
        device = find_device(said)
        return None if device is None else device.name

    assert name("NVIDIA A100-SXM4-40GB") == "A100 40GB"
    assert name("NVIDIA A100-SXM4-80GB") == "A100"
    assert name("NVIDIA H100 80GB HBM3") == "H100"
    assert name("NVIDIA GeForce RTX 4090") == "RTX 4090"
    assert name("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert peak_flops("NVIDIA A100-SXM4-40GB", "bfloat16") == 312e12
    for device in DEVICES.values():
        assert device.halves >= device.singles
        assert 0.1 < device.bandwidth < 10
        assert 16 < device.memory < 300
