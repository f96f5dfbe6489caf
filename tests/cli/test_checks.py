"""Errors in a command's arguments are printed in one line, before anything is fetched, measured or loaded."""

from __future__ import annotations

import os
import socket
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.adapters.causal_lm.checkpoint import in_own_process, without_bars
from antiphon.cli import preparation
from antiphon.cli.main import main
from antiphon.cli.preparation import fetch, pull_command
from antiphon.cli.say import SayRequest, _Player, check_request
from antiphon.errors import ModelError, SettingsError, StoreError
from antiphon.loading.loader import store_of
from antiphon.server.http.listening import bind
from antiphon.settings import Settings
from antiphon.store import Store
from antiphon.store.registry import SILERO, SMART_TURN
from tests.adapters.tiny_piper import write_voice
from tests.conftest import DATA

Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def threads_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the exit of `serve` if threads are left: this process has threads of other tests."""
    monkeypatch.setattr("antiphon.cli.main.leave_threads", lambda status: None)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that fails with one line before any model is touched, and return the line."""

    def late(*_: object, **__: object) -> None:
        raise AssertionError("it was reported too late")

    for name in ("choose_profile", "fetch", "require"):
        monkeypatch.setattr(f"antiphon.cli.preparation.{name}", late)

    def run(*arguments: str, status: int = 1) -> str:
        assert main(arguments) == status
        error = capsys.readouterr().err
        assert error.startswith("antiphon: ")
        assert error.count("\n") == 1
        return error

    return run


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.touch()
    return str(path)


@pytest.fixture
def empty(tmp_path: Path) -> str:
    path = tmp_path / "empty"
    path.mkdir()
    return str(path)


@pytest.mark.slow
def test_when_a_folder_cannot_be_had_then_serve_stops_at_once(refused: Refused, file: str, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    for folder in ("/proc/antiphon", file):
        assert f"--record {folder}: " in refused("serve", "--port", "0", *home, "--record", folder)
        assert f"--home {folder}: " in refused("serve", "--port", "0", "--home", folder)
        assert f"--home {folder}: " in refused("pull", "--home", folder)
        assert f"--state: {folder}: " in refused("serve", "--port", "0", *home, "--state", folder)
    assert f"--home {file}: " in refused("doctor", "--home", file)
    assert f"--home {file}: " in refused("pull", "--list", "--home", file)


def test_when_recordings_can_be_written_then_nothing_is_left_of_the_trial(tmp_path: Path) -> None:
    preparation.check_writable(str(tmp_path / "a" / "b"), "--record")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_when_a_port_is_taken_then_serve_stops_at_once_and_frees_it_on_every_failure(
    refused: Refused, tmp_path: Path
) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused("serve", "--port", port, status=2)
    # The refusal comes after the bind, so the port must be free again.
    refused("serve", "--port", port, "--record", "/proc/antiphon", "--home", str(tmp_path))
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(port)))
        other.listen()


def test_when_ray_serves_then_the_port_was_tried_and_is_free_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
    served: list[object] = []

    def serve_here(settings: Settings, *_: object) -> None:
        with bind(settings.server.host, settings.server.port) as sock:
            served.append(sock.getsockname()[1])

    monkeypatch.setattr("antiphon.cli.main.load_ray_serve", lambda: serve_here)
    monkeypatch.setattr("antiphon.cli.preparation.fetch", lambda settings: None)
    ray = ("serve", "--ray", "--profile", "light", "--home", str(tmp_path), "--port", str(port))
    assert main(ray) == 0
    assert served == [port]
    with bind("127.0.0.1", port) as taken:
        taken.listen()
        assert main(ray) == 2
    assert served == [port]


def test_when_models_are_named_that_are_not_there_then_serve_stops_at_once(
    refused: Refused, file: str, empty: str, tmp_path: Path
) -> None:
    serve = ("serve", "--port", "0", "--home", str(tmp_path))
    for flag in ("--language-model", "--synthesizer"):
        reported = refused(*serve, flag, empty, status=2)
        assert reported.startswith(f"antiphon: {flag} {empty}: no checkpoint's folder (it has no config.json")
    voices = tmp_path / "voices"
    write_voice(voices, "en_US-tiny-low")
    (voices / "en_US-tiny-low.onnx.json").unlink()
    reported = refused(*serve, "--synthesizer", str(voices))
    assert f"--synthesizer {voices}: en_US-tiny-low.onnx has no en_US-tiny-low.onnx.json: copy it" in reported
    assert "nor a .gguf file" in refused(*serve, "--language-model", file, status=2)
    assert "there are hibari-heart" in refused(*serve, "--voice", "nobody", status=2)
    assert "there are hibari-heart" in refused(*serve, "--synthesizer", "nobody", status=2)
    reported = refused("pull", "--home", str(tmp_path), "--transcriber", "nobody", status=2)
    assert reported.endswith("there are whisper-base, whisper-tiny.en\n")


def test_pull_fetches_what_is_named_and_nothing_else(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ("--home", str(tmp_path))
    assert "did you mean hibari-emma?" in refused("pull", "hibari-ema", *home, status=2)
    assert "did you mean smollm2-135m-instruct?" in refused("pull", "smollm", *home, status=2)
    fetched: list[str] = []
    monkeypatch.setattr(Store, "pull", lambda _, model, __: fetched.append(model.id))
    for module in ("antiphon.loading.loader", "antiphon.cli.preparation"):
        monkeypatch.setattr(f"{module}.prepare", lambda settings, store, model: tmp_path)
    assert main(["pull", "hibari-emma", "resemblyzer", *home]) == 0
    assert fetched == ["hibari-emma", "resemblyzer"]


def test_when_a_device_is_not_there_then_it_is_named_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, refused: Refused, tmp_path: Path
) -> None:
    serve = ("serve", "--port", "0", "--home", str(tmp_path))
    monkeypatch.setattr(preparation, "num_torch_devices", lambda: 0)
    assert "only its CPU: use --device cpu" in refused(*serve, "--device", "cuda", status=2)
    reported = refused(*serve, "--placement", "synthesizer=cuda:3", status=2)
    assert "--placement synthesizer=cuda:3: " in reported
    assert "use --placement synthesizer=cpu" in reported
    monkeypatch.setattr(preparation, "num_torch_devices", lambda: 2)
    reported = refused(*serve, "--device", "cuda", "--placement", "synthesizer=cuda:3", status=2)
    assert "but cuda:0, cuda:1: use one of them" in reported
    there = replace(Settings().models, device="cuda", placement="language=cuda:1")
    preparation.check_models(replace(Settings(), models=there))


def test_when_only_ctranslate2_sees_a_gpu_then_whisper_may_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "num_torch_devices", lambda: 0)
    monkeypatch.setattr("ctranslate2.get_cuda_device_count", lambda: 1)
    on_gpu = replace(Settings(), models=replace(Settings().models, device="cuda"))
    preparation.check_models(on_gpu, ("transcriber", "vad"))
    preparation.check_models(replace(Settings(), models=replace(Settings().models, placement="transcriber=cuda")))
    with pytest.raises(SettingsError, match="--device cuda"):
        preparation.check_models(on_gpu)


def test_when_a_file_is_missing_then_the_command_that_mends_it_has_the_options_that_matter() -> None:
    assert pull_command(Settings()) == "antiphon pull"
    settings = replace(
        Settings(),
        models=replace(Settings().models, profile="light", home="/a b", device="cuda"),
        speech=replace(Settings().speech, voices=("emma", "kore")),
        server=replace(Settings().server, port=1),
    )
    assert pull_command(settings) == "antiphon pull --profile light --home '/a b' --voice emma --voice kore"


def test_when_a_model_is_missing_then_the_command_is_in_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (("--no-pull",), ("--offline",)):
        home = str(tmp_path / "home")
        assert main(["serve", "--port", "0", "--profile", "light", "--home", home, *flags]) == 1
        assert f"run `antiphon pull --profile light --home {home}`" in capsys.readouterr().err


def test_when_what_is_to_be_heard_or_seen_is_none_then_it_is_told_at_once(refused: Refused, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.mp4")
    assert refused("transcribe", missing).endswith(f"{missing}: no such file\n")
    assert refused("transcribe", str(tmp_path)).endswith(": this is a folder\n")
    assert "need a file" in refused("transcribe", "--speakers", "-", status=2)
    assert "need a file" in refused("transcribe", "--channels", "auto", "-", status=2)
    assert "cannot be opened: No such file" in refused("watch", missing, "--ask", "What is it?")
    assert "has no pictures" in refused("watch", str(DATA / "audio" / "jfk.flac"), "--ask", "What is it?")
    assert "--max-tokens" in refused("chat", "--max-tokens", "-1", status=2)


def test_when_no_server_answers_then_certify_stops_at_once(refused: Refused) -> None:
    assert "no server answers there" in refused("certify", "--url", "http://127.0.0.1:1")
    assert "no server answers there" in refused("certify", "--url", "ws://127.0.0.1:1")
    assert "expected http://HOST:PORT" in refused("certify", "--url", "nonsense", status=2)


def test_when_speech_has_nowhere_to_go_then_it_is_told_at_once(refused: Refused, tmp_path: Path) -> None:
    assert "there is no folder" in refused("say", "Hi", "-o", str(tmp_path / "missing" / "a.wav"))
    assert "must end in one of" in refused("say", "Hi", "-o", str(tmp_path / "a.doc"), status=2)
    assert "this is a folder" in refused("say", "Hi", "-o", str(folder_named_wav(tmp_path)))
    for text in ("", "   "):
        assert "there is no text to speak" in refused("say", text, "-o", str(tmp_path / "a.wav"))
    assert not (tmp_path / "a.wav").exists()


def folder_named_wav(tmp_path: Path) -> Path:
    folder = tmp_path / "b.wav"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_when_nothing_of_a_text_can_be_spoken_then_there_is_an_error_and_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a.wav"
    assert main(["say", "Привет мир", "-o", str(target)]) == 1
    assert capsys.readouterr().err == "antiphon: the voice cannot speak any of this text: Привет мир\n"
    assert not target.exists()
    assert main(["say", "Привет мир. Hello there.", "-o", str(target)]) == 0
    assert "left out because the voice cannot speak it: Привет мир." in capsys.readouterr().err
    with wave.open(str(target)) as spoken:
        assert spoken.getnframes() > 10_000


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        (
            "cat > /dev/null; echo ALSA lib: no card >&2; echo 'No more combinations to try, audio open failed' >&2",
            "audio",
        ),
        ("cat > /dev/null; echo one >&2; echo no device >&2; exit 1", r"\(no device\)"),
        ("exec 0<&-; echo no server >&2; sleep 0.2; exit 3", r"\(no server\)"),
    ],
)
def test_when_a_player_fails_then_its_reason_is_one_line(
    script: str, reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin:/usr/bin")
    monkeypatch.setattr("antiphon.cli.say.PLAYERS", {"toyplay": lambda hz: []})
    (tmp_path / "toyplay").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "toyplay").chmod(0o755)
    player = _Player(24_000)
    with pytest.raises(ModelError, match=reported):
        for _ in range(100):
            player.write(bytes(100_000))
        player.finish()


def test_when_there_is_no_player_then_it_is_told_before_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.cli.say.PLAYERS", {})
    with pytest.raises(SettingsError, match="no player"):
        check_request(SayRequest("Hi"))


def test_when_a_file_cannot_be_opened_then_say_tells_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        check_request(SayRequest("Hi", str(tmp_path / "a" / "b.wav")))


def test_checks_import_torch_only_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(preparation, "import_module", never)
    preparation.check_models(Settings())


def test_when_models_are_fetched_then_each_ends_with_where_it_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A local folder stands in for the network."""
    store = store_of(Settings().models)
    for model in (SILERO, SMART_TURN):
        store.require(model)
    models = replace(Settings().models, home=str(tmp_path), models_from=str(store.home / "models"), offline=True)
    fetch(replace(Settings(), models=models), ("vad", "turn"))
    error = capsys.readouterr().err
    assert f"silero-vad-v6: from the folder {store.home / 'models'}, verified\n" in error
    assert error.count(", verified\n") == 2


def write_variable(file: Path) -> None:
    file.write_text(os.environ.get("TQDM_DISABLE", "not set"))


@pytest.mark.heavy
def test_when_a_checkpoint_is_converted_then_no_progress_bar_is_drawn_among_the_lines_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "0")
    in_own_process(write_variable, tmp_path / "seen")
    assert (tmp_path / "seen").read_text() == "1"
    assert os.environ["TQDM_DISABLE"] == "0"
    monkeypatch.delenv("TQDM_DISABLE")
    with without_bars():
        assert os.environ["TQDM_DISABLE"] == "1"
    assert "TQDM_DISABLE" not in os.environ


def test_a_folder_of_models_that_is_not_there_is_told_at_once(refused: Refused) -> None:
    assert "--models-from /nowhere: there is no such folder" in refused(
        "serve", "--port", "0", "--models-from", "/nowhere", status=2
    )
