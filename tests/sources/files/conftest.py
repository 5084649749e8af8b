"""A small saved model, and no network."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from architectures import tiny_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing in this file may ask the network, not even in vain."""
    asked: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model("llama", num_key_value_heads=2).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))
