"""`edgespec doctor` as a user types it."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from command_line import COMMAND, run_cli
from edgespec.cli import doctor as doctor_room
from edgespec.cli import doctor_report
from edgespec.engine import pair
from edgespec.engine.engine import Engine
from edgespec.engine.model_choice import ChosenModels
from edgespec.llama.choices import SERVED_PREFIXES
from edgespec.llama.gguf_header import check_model_file, read_tensors
from edgespec.models.resolve import ModelRef
from edgespec.platform.machine import read_cpu
from energy_trees import laptop, write
from pi_trees import PI_4_2GB, PI_4_4GB, plant
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def doctor(with_kernels, monkeypatch):
    """Run the command, on the machine that is planted in `root` if one is given."""

    def doctor(*arguments, root=Path("/"), **more):
        monkeypatch.setattr(doctor_room, "ROOT", root)
        return run_cli("doctor", *arguments, env={**with_kernels, **more})

    return doctor


@pytest.fixture
def new_process(with_kernels):
    """Run the command where the kernels are loaded anew: a process can load and test them only once."""

    def new_process(*arguments):
        command = [*COMMAND, "doctor", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, env=with_kernels, timeout=120, check=False
        )

    return new_process


def test_text(doctor, packable_path):
    process = doctor(packable_path)
    assert (process.returncode, process.stderr) == (0, "")
    for word in (
        read_cpu().model,
        "physical",
        "available",
        "llama-cpp-python 0.3",
        "kernels",
        "q4_K",
        "q6_K",
        "serve: 16 texts at once, 24,576 tokens of cache, 25 MB",
        "context that fits, tokens by --cache-type: 512 with f16, 512 with q8_0, 512 with q4_0",
    ):
        assert word in process.stdout
    assert "\x1b[" not in process.stdout, "piped output is plain"


def test_json(doctor, packable_path):
    report = json.loads(doctor("--json", packable_path).stdout)
    assert set(report) == {
        *("edgespec", "cpu", "machine", "libraries", "threads", "memory", "energy", "kernels", "models")
    }
    for name, has in report["cpu"]["features"].items():
        assert has == (name in read_cpu().flags)
    assert report["threads"]["logical"] >= report["threads"]["physical"] >= 1
    memory = report["memory"]
    assert memory["total"] > memory["available"] > 0 < memory["peak_rss"] < memory["total"]
    (model,) = report["models"]
    assert (model["path"], model["error"]) == (str(packable_path), None)
    # 16 texts, by the guess for a machine that was never measured; 1,024 tokens of 1,024 bytes for each, and
    # 16 of 512 that are kept
    assert model["capacity"] == {"parallel": 16, "cache_tokens": 24576, "cache_bytes": 24576 * 1024}
    assert model["contexts"] == dict.fromkeys(("f16", "q8_0", "q4_0"), 512)
    matrices = [tensor for tensor in read_tensors(check_model_file(packable_path)) if tensor.is_matrix]
    counts = [row["packed"] + row["not_packed"] for row in model["types"]]
    assert sum(counts) == len(matrices) == 2 + 2 * 7
    assert sum(row["not_packed"] for row in model["types"]) == len(model["unpacked"])


# ---- machines ----


def test_a_pi_4_of_2_gb(doctor, tmp_path):
    process = doctor(root=plant(tmp_path / "root", PI_4_2GB, throttled=0x50005))
    assert (process.returncode, process.stderr) == (0, "")
    lines = [line.rstrip() for line in process.stdout.splitlines()]
    assert lines[:6] == [
        "cpu      Cortex-A72",
        "         asimd; not asimdhp asimddp i8mm sve bf16",
        "board    Raspberry Pi 4 Model B Rev 1.4, revision b03114, 4 processors",
        "clock    600 to 1800 MHz, now 600, governor ondemand",
        "heat     58 degrees (cpu-thermal)",
        "firmware now under-voltage, throttled; since the start under-voltage, throttled",
    ]
    assert "memory   1.94 GB, 1.62 GB of it available" in process.stdout
    assert "energy   unavailable: Raspberry Pi 5 PMIC: a Raspberry Pi 4 Model B Rev 1.4 has no sensor" in (
        process.stdout
    )


def test_a_pi_4_of_4_gb(doctor, tmp_path):
    process = doctor("--json", root=plant(tmp_path / "root", PI_4_4GB, throttled=0x80000))
    assert (process.returncode, process.stderr) == (0, "")
    report = json.loads(process.stdout)
    assert report["cpu"]["model"] == "Cortex-A72"
    assert report["machine"] == {
        "model": "Raspberry Pi 4 Model B Rev 1.4",
        "revision": "c03114",
        "processors": 4,
        "clock_mhz": {"governors": ["ondemand"], "least": 600.0, "most": 1800.0, "now": 600.0},
        "degrees": {"cpu-thermal": 58.426},
        "firmware": {"now": [], "since_start": ["soft temperature limit"]},
    }
    assert report["memory"]["total"] == 3_885_396 * 1024
    assert report["energy"]["source"] is None
    assert "no sensor of its current" in report["energy"]["reason"]


def test_a_laptop_shows_nothing_of_a_board(doctor, tmp_path):
    root = tmp_path / "root"
    laptop(root)
    write(root / "proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB")
    process = doctor(root=root)
    assert (process.returncode, process.stderr) == (0, "")
    labels = [line.split()[0] for line in process.stdout.splitlines() if line[:1].strip()]
    assert labels[:5] == ["cpu", "threads", "memory", "energy", "version"]
    assert not {"board", "clock", "heat", "firmware"} & set(labels)
    assert "energy   RAPL\n" in process.stdout
    machine = json.loads(doctor("--json", root=root).stdout)["machine"]
    assert machine.pop("processors") == 1
    assert machine.pop("degrees") == {}
    assert set(machine.values()) == {None}


def test_limits_of_a_container(doctor, tmp_path):
    for file, text in {
        "proc/self/cgroup": "4:memory:/docker/x\n1:cpu:/docker/x",
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "500000000",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }.items():
        write(tmp_path / file, text)
    shown = doctor(root=tmp_path).stdout
    assert "; 1 used: the quota in " in shown
    assert "cpu.cfs_quota_us is 1.00 processors\n" in shown
    assert f"400 MB of it available under the memory limit in {tmp_path}/sys/fs/cgroup/memory; " in shown
    report = json.loads(doctor("--json", root=tmp_path).stdout)
    assert report["threads"]["default"] == report["threads"]["quota"]["processors"] == 1
    assert report["memory"]["available"] == 400000000


@pytest.mark.parametrize("available", [64 << 20, 1 << 30, 64 << 30, None])
def test_serve_holds_what_doctor_says(kernels, packable_path, tiny_draft_path, monkeypatch, available):
    monkeypatch.setattr(pair, "available_bytes", lambda: available)
    monkeypatch.setattr(doctor_report, "choose_refs", lambda *_: ChosenModels(ModelRef(""), draft))
    for draft in (None, ModelRef(str(tiny_draft_path))):
        told = doctor_report._model("m", packable_path, kernels, Path("/"), available)["capacity"]
        drafter = "auto" if draft else "suffix"
        with Engine(
            packable_path, draft and draft.name, drafter=drafter, parallel=None, prefix_cache=SERVED_PREFIXES
        ) as engine:
            held = engine.capacity
        assert [*told.values()] == [held.parallel, held.n_cells, held.n_bytes]


def test_a_machine_that_says_nothing(doctor, tmp_path):
    process = doctor(root=tmp_path / "nothing")
    assert (process.returncode, process.stderr) == (0, "")
    assert "memory   unknown, unknown of it available" in process.stdout


# ---- kernels and models ----


def test_stock_kernels_are_no_failure(doctor, packable_path):
    process = doctor("--json", packable_path, EDGESPEC_KERNELS="off")
    assert process.returncode == 0
    report = json.loads(process.stdout)
    assert (report["kernels"]["in_use"], report["kernels"]["reason"]) == ("stock", "EDGESPEC_KERNELS=off")
    assert report["kernels"]["self_test"] is None
    assert {tensor["why"] for tensor in report["models"][0]["unpacked"]} == {"stock kernels"}
    assert all(row["packed"] == 0 for row in report["models"][0]["types"])
    assert "EDGESPEC_KERNELS=off" in doctor(packable_path, EDGESPEC_KERNELS="off").stdout


def test_nothing_is_pulled(doctor, tmp_path):
    process = doctor()
    assert (process.returncode, process.stderr) == (0, "")
    assert "the default pair is not here" in process.stdout
    assert not (tmp_path / "models").exists()
    assert json.loads(doctor("--json").stdout)["models"] == []
    process = doctor("qwen2.5-coder-0.5b-q4_k_m")
    assert (process.returncode, process.stdout) == (1, "")
    assert "edgespec models pull" in process.stderr


def test_a_model_that_cannot_be_loaded(doctor, packable_path, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(packable_path.read_bytes()[:-5000])
    speech = write_tiny_whisper(tmp_path / "speech.gguf")
    process = doctor("--json", damaged, packable_path, speech)
    assert process.returncode == 1
    first, second, third = json.loads(process.stdout)["models"]
    assert "truncated" in first["error"]
    assert second["error"] is None
    assert third["error"] is None and third["speech"]["layers"] == [1, 2]
    assert "cannot be loaded: " in doctor(damaged).stdout


def test_what_works_with_an_architecture(doctor, tiny_path, tmp_path):
    (model,) = json.loads(doctor("--json", tiny_path).stdout)["models"]
    assert model["architecture"]["name"] == "llama"
    assert model["architecture"]["checked"]["drafts"] == ["suffix", "model", "tree", "own"]
    assert "llama: all on the kernels; same bits in any batch; drafts: suffix, " in doctor(tiny_path).stdout
    unknown = write_tiny_gguf(tmp_path / "other.gguf", architecture="internlm2")
    assert "internlm2: never checked\n" in doctor(unknown).stdout


def test_the_real_kernels(kernels, new_process, packable_path):
    first = new_process("--json", packable_path)
    report = json.loads(first.stdout)
    assert report["kernels"]["in_use"] == kernels.name
    assert report["kernels"]["self_test"]["passed"]
    (model,) = report["models"]
    assert {row["type"] for row in model["types"] if row["packed"]} >= {"q4_K", "q6_K"}
    assert {tensor["name"]: tensor["why"] for tensor in model["unpacked"]}["token_embd.weight"] == (
        "rows are looked up, not multiplied"
    )
    again = new_process("--json", "--retest", packable_path)
    when = [json.loads(process.stdout)["kernels"]["self_test"]["when"] for process in (first, again)]
    assert when[0] < when[1]
    assert report["kernels"]["tiles"]["why_not"] == kernels.plugin.why_no_tiles
    text = new_process(packable_path).stdout
    assert "tile registers (AMX): " in text
    assert f"self-test passed ({kernels.name}" in text
    assert "weights fetched " in text


def test_the_prefetch_is_told_and_why(kernels, new_process, cache):
    told = json.loads(new_process("--json").stdout)["kernels"]["prefetch"]
    assert told["measured"] == (told["reason"] == "")
    (file,) = (cache / "edgespec").glob("selftest-*.json")
    answer = json.loads(file.read_text())
    for level, ahead, gain, reason, words in (
        (2, 16384, 1.25, "", "(measured: 1.25 times as fast as the default)"),
        (1, 8192, 1.0, "", "(measured: 1.00 times as fast as the default)"),
        (1, 8192, 1.0, "too busy", "(the default: too busy)"),
    ):
        prefetch = {"level": level, "bytes": ahead}
        answer["choice"] = {"prefetch": prefetch, "gain": gain, "reason": reason, "when": time.time()}
        file.write_text(json.dumps(answer))
        text = " ".join(new_process().stdout.split())
        assert f"weights fetched {ahead} bytes ahead into cache level {level} {words}" in text
    file.unlink()
