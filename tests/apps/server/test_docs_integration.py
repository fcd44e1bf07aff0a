"""The examples of docs/integration.md, run as they stand there against a server of tiny models."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server_app import Served

PAGE = Path(__file__).parents[3] / "docs" / "integration.md"
ADDRESS = "http://127.0.0.1:8080"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(autouse=True)
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "served" in request.fixturenames:
        url = request.getfixturevalue("served").url
        for name, address in (("OPENAI", f"{url}/v1"), ("ANTHROPIC", url)):
            monkeypatch.setenv(f"{name}_BASE_URL", address)
            monkeypatch.setenv(f"{name}_API_KEY", "none")


CLIENTS = ("openai import", "anthropic import")


@pytest.mark.parametrize("block", [b for b in blocks("python") if any(name in b for name in CLIENTS)])
def test_the_official_clients_and_what_builds_on_them(
    served: Served, capsys: pytest.CaptureFixture[str], block: str
) -> None:
    block = block.replace(ADDRESS, served.url)
    exec(compile(block, PAGE.name, "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
    assert not served.log


@pytest.mark.parametrize("block", [b for b in blocks("python") if "llama_cpp" in b])
def test_llama_cpp_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packable_path: Path, block: str
) -> None:
    shutil.copy(packable_path, tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)
    answer = names["llm"].create_completion("the cat", max_tokens=8, temperature=0)  # type: ignore[attr-defined]
    assert answer["choices"][0]["text"]
    names["llm"].close()  # type: ignore[attr-defined]


def test_every_python_example_is_run_by_a_test_above() -> None:
    assert all(any(name in block for name in (*CLIENTS, "llama_cpp")) for block in blocks("python"))
    assert len(blocks("python")) >= 8


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("block", blocks("bash"))
def test_curl(served: Served, block: str) -> None:
    done = subprocess.run(
        ["bash", "-c", block], capture_output=True, text=True, env=dict(os.environ), timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if '"stream": true' in block:
        assert done.stdout.startswith("data: {")
        assert done.stdout.rstrip().endswith("data: [DONE]")
        return
    text = json.loads(done.stdout)["choices"][0]["message"]["content"]
    if "json_schema" in block:
        assert isinstance(json.loads(text)["yes"], bool)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_first_request_of_the_servers_page(served: Served) -> None:
    page = PAGE.with_name("server.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"^ {{4}}(curl {ADDRESS}/v1/models)$", page, re.M)
    command = command.replace(ADDRESS, served.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["data"]


def test_configurations_name_the_address_of_the_server() -> None:
    continue_, llm = blocks("yaml")
    assert f"\n    apiBase: {ADDRESS}/v1\n" in continue_
    assert f"\n  api_base: {ADDRESS}/v1\n" in llm
    zed, opencode = map(json.loads, blocks("json"))
    assert opencode["provider"]["edgespec"]["options"]["baseURL"] == f"{ADDRESS}/v1"
    provider = zed["language_models"]["openai_compatible"]["edgespec"]
    assert provider["api_url"] == "http://127.0.0.1:8080/v1"
    (neovim,) = blocks("lua")
    assert 'url = "http://127.0.0.1:8080",' in neovim


def test_links() -> None:
    links = re.findall(r"\]\(([^)#]+\.md)\)", PAGE.read_text(encoding="utf-8"))
    assert links
    assert [link for link in set(links) if not (PAGE.parent / link).exists()] == []
