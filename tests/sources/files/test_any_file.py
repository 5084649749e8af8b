"""Whatever a stranger writes: no crash, no hang, one error."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from damage import tiny_gguf, write_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headmix as hm
from headmix.sources import stores
from headmix.sources.stores import BadCheckpoint

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def open_and_read(file: Path) -> None:
    """Either works or raises a ValueError that names the file."""
    try:
        model = hm.load(file, n_heads=2)
        for layer in model.layers:
            model.heads(layer)
    except ValueError as error:
        assert file.name in str(error)  # noqa: PT017


@FUZZ
@given(data=st.data())
def test_any_damage_to_safetensors_is_one_error(data: st.DataObject, saved: Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    damaged = damaged[: data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))]
    file = saved.parent / "fuzzed.safetensors"
    file.write_bytes(damaged)
    open_and_read(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "U8", "F4"]) | JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 99), min_size=2, max_size=2) | JSON,
    },
)
NAMES = st.sampled_from([f"{i}.{p}_proj.weight" for i in range(2) for p in "qkvo"]) | st.text()


@FUZZ
@given(header=st.dictionaries(NAMES, ENTRIES | JSON, max_size=9), size=st.integers(0, 99))
def test_any_header_is_one_error(header: dict[str, Any], size: int, tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", header, bytes(size))
    open_and_read(tmp_path / "m.safetensors")


@FUZZ
@given(data=st.data())
def test_any_damage_to_gguf_is_one_error(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    damaged = bytearray(tiny_gguf(file))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 400))
        damaged[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    file.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    open_and_read(file)


@FUZZ
@given(fields=st.dictionaries(
    st.sampled_from(["model_type", "num_attention_heads", "hidden_size", "text_config",
                     "encoder", "architectures", "num_key_value_heads"]) | st.text(max_size=5),
    JSON,
))  # fmt: skip
def test_any_config_is_one_error(fields: dict[str, Any], saved: Path) -> None:
    folder = saved.parent / "fuzzed"
    folder.mkdir(exist_ok=True)
    shutil.copy(saved / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        model = hm.load(folder, weights_only=True)
        model.heads(0)
    except ValueError as error:
        assert "model.safetensors" in str(error) or "no softmax" in str(error)  # noqa: PT017


def test_a_name_of_a_megabyte_does_not_become_the_message(tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", {"a" * 1_000_000: 3})
    with pytest.raises(BadCheckpoint) as error:
        hm.load(tmp_path / "m.safetensors", n_heads=2)
    assert len(str(error.value)) < 1000


def test_limits_are_those_promised() -> None:
    assert (stores.MAX_HEADER_BYTES, stores.MAX_TENSORS) == (25_000_000, 200_000)
