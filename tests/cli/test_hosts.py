"""`antiphon hosts`: lists the hosts of a store, and marks one as dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.store.sessions import Host, open_store


def test_hosts_are_listed_and_one_is_said_to_be_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state", str(tmp_path)]
    assert main(["hosts", *state]) == 0
    assert "no host is alive in this store" in capsys.readouterr().out
    store = open_store(str(tmp_path), 3600, 1000.0)
    try:
        store.renew(Host("alpha/12", "http://10.0.0.1:8000", 0.5, draining=True))
        store.renew(Host("beta/34"))
        assert main(["hosts", *state]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[0][:3] == ["only", "hosts", "with"]
        assert lines[3:] == [
            ["alpha/12", "http://10.0.0.1:8000", "0.50", "draining"],
            ["beta/34", "-", "unknown", "serves"],
        ]
        for name in ("nobody", "alph", "alpha/13"):
            assert main(["hosts", *state, "--dead", name]) == 1
            assert capsys.readouterr().err.endswith(
                f"--dead {name}: no such host is alive in this store; alive are: alpha/12, beta/34\n"
            )
        assert main(["hosts", *state, "--dead", "alpha"]) == 0
        assert capsys.readouterr().out == "alpha is marked as dead: other hosts may claim its sessions\n"
        assert [host.name for host in store.hosts()] == ["beta/34"]
    finally:
        store.close()


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert main(["hosts", "--state", str(missing)]) == 1
    assert capsys.readouterr().err == f"antiphon: --state {missing}: there is no such folder\n"
    assert not missing.exists()


def test_without_a_store_it_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANTIPHON_STATE", raising=False)
    assert main(["hosts"]) == 2
    assert "--state" in capsys.readouterr().err
