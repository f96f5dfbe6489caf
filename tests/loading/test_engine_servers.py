"""`--engine`: the accepted forms, and the errors for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.errors import SettingsError
from antiphon.loading.placement import engine_servers
from antiphon.loading.selection import selected_models
from antiphon.remote.engine import EngineServers
from antiphon.settings import EngineOptions, RemoteSettings, Settings

KEY = "sk-not-to-be-seen"


def settings(engine: str, language_model: str = "") -> Settings:
    return Settings(
        engine=EngineOptions(engine=engine, language_model=language_model), remote=RemoteSettings(remote_key=KEY)
    )


def test_the_servers_are_those_that_are_named() -> None:
    assert engine_servers(settings("local")) is None
    found = engine_servers(settings("vllm:http://one:8000, https://two/"))
    assert found == EngineServers("vllm", ("http://one:8000", "https://two"), KEY, 10.0, 10.0)
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("vllm", "expected local, vllm:URL"),
        ("vllm:", "expected local, vllm:URL"),
        ("tgi:http://127.0.0.1:1", "expected local, vllm:URL"),
        ("vllm:http://127.0.0.1:1/v1", "expected a server's root"),
        ("vllm:http://127.0.0.1:100000", "expected a server's root"),
        ("vllm:ftp://127.0.0.1", "expected a server's root"),
        (f"vllm:http://me:{KEY}@127.0.0.1", "no name, password or query"),
        (f"vllm:http://127.0.0.1?key={KEY}", "no name, password or query"),
    ],
)
def test_what_is_no_server_is_refused_by_name_and_told_to_nobody(engine: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        engine_servers(settings(engine))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("model", ["", "qwen2.5-coder-0.5b-instruct", "http://127.0.0.1:1/v1#m"])
def test_an_engine_on_servers_needs_the_models_folder(model: str) -> None:
    with pytest.raises(SettingsError, match="needs --language-model FOLDER"):
        selected_models(settings("vllm:http://127.0.0.1:1", model))


def test_the_folder_of_a_model_on_servers_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (model,) = selected_models(settings("vllm:http://127.0.0.1:1", str(tmp_path)), roles=("language",))
    assert model.id == tmp_path.name
