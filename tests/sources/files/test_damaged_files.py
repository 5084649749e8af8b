"""Truncated, malformed and hostile files: one clear error that names the thing, and nothing run."""

import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import change_weights, tiny_gguf, write_header

import headmix as hm
from headmix.layouts import UnknownLayout
from headmix.sources.stores import BadCheckpoint

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a header length, found a file of 0 bytes"),
        (b"\xff" * 99, "expected a header of 18,446,744,073,709,551,615 bytes, found a file of 99"),
        (struct.pack("<Q", 500) + b"{}", "expected a header of 500 bytes, found a file of 10"),
    ],
    ids=["empty", "noise", "short"],
)
def test_truncated_safetensors(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(
        BadCheckpoint, match="m.safetensors is truncated or not safetensors: " + message
    ):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "the header is not JSON"),
        (b"[]", "the header holds a list"),
        (b'{"a": {}, "a": {}}', "the header names 'a' twice"),
        ({"a": 3}, "the entry of 'a' needs dtype, shape and data_offsets, got {}"),
        ({"a": ENTRY | {"shape": [2, -2]}}, r"needs dtype, shape and data_offsets, got .*-2"),
        ({"a": ENTRY | {"shape": [2, 2.0]}}, r"needs dtype, shape and data_offsets"),
        ({"a": ENTRY | {"shape": [True, 4]}}, r"needs dtype, shape and data_offsets"),
        ({"a": ENTRY | {"dtype": "F31"}}, "'a' has the unknown dtype 'F31'"),
        ({"a": ENTRY | {"shape": [2, 3]}}, r"shape \[2, 3\] of F32, expected 24 bytes, found 16"),
        ({"a": ENTRY | {"shape": [2**62] * 9}}, r"expected \d+ bytes, found 16"),
        ({"a": ENTRY | {"data_offsets": [8, 24]}}, "lies at bytes 8 to 24, but the file holds 16"),
        ({"a": ENTRY | {"data_offsets": [16, 0]}}, "lies at bytes 16 to 0"),
    ],
)
def test_malformed_safetensors_header(header: Any, message: str, tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", header, bytes(16))
    with pytest.raises(BadCheckpoint, match=r"m\.safetensors.*" + message):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


def test_a_header_of_more_than_25_mb(tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", b"{}" + b" " * 25_000_000)
    with pytest.raises(BadCheckpoint, match="a header of 25,000,002 bytes; more than 25,000,000"):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headmix.sources.safetensors.MAX_TENSORS", 20)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_header(tmp_path / "m.safetensors", dict.fromkeys(map(str, range(21)), empty))
    with pytest.raises(BadCheckpoint, match="names 21 tensors; more than 20 is refused"):
        hm.load(tmp_path / "m.safetensors", n_heads=2)


def test_a_truncated_model_names_tensor_expected_and_found(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = r"model.safetensors: '.*' lies at bytes \d+ to \d+, but the file holds \d+ bytes"
    for weights_only in (True, False):
        with pytest.raises(BadCheckpoint, match=message):
            hm.load(folder, weights_only=weights_only)


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    model = hm.load(folder, weights_only=True)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(BadCheckpoint, match=r"o_proj.weight cannot be read: .*header"):
        model.heads(0)


def test_a_bias_that_does_not_fit(folder: Path) -> None:
    name = "layers.1.self_attn.o_proj.bias"
    change_weights(folder, lambda w: w.update({name: torch.ones(3)}))
    model = hm.load(folder, weights_only=True)
    assert model.heads(0).b_O is None
    with pytest.raises(BadCheckpoint, match=rf"{name} has shape \[3\], expected \[32\] to fit"):
        model.heads(1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_quantised_weights_are_refused(dtype: torch.dtype, folder: Path) -> None:
    def quantise(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if "self_attn" in name:
                weights[name] = weight.to(dtype) if dtype.is_floating_point else weight.byte()

    change_weights(folder, quantise)
    if dtype.is_floating_point:  # its shape is right, its numbers need scales
        with pytest.raises(BadCheckpoint, match=r"o_proj.weight is stored as F8_E4M3, quantised"):
            hm.load(folder, weights_only=True).heads(0)
    else:
        with pytest.raises(UnknownLayout, match="Weights stored as U8 are quantised: dequantise"):
            hm.load(folder, weights_only=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b"GGML" + b[4:], r"is not GGUF: it begins with b'GGML'"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "GGUF version 50331648, expected 2 or 3"),
        (lambda b: b[:8] + b"\xff" * 8 + b[16:], "18,446,744,073,709,551,615 tensors and"),
        (lambda b: b[:30], "is truncated or malformed: expected .* bytes at byte"),
        (lambda b: b[:-9], r"'blk.0.*' \(F32 \[32, 32\]\) ends at byte \d+, but the file has"),
        (lambda b: b[:24] + b"\xff" * 8 + b[32:], "expected 18446744073709551615 bytes at byte 32"),
        (lambda b: b.replace(b"blk.0.attn_k", b"blk.0.attn_q"), "blk.0.attn_q.weight' twice"),
        (lambda b: b"", "expected 4 bytes at byte 0, the file ends at byte 0"),
    ],
    ids=["magic", "endian", "tensors", "header", "data", "text", "twice", "empty"],
)
def test_malformed_gguf(damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(damage(tiny_gguf(file)))
    with pytest.raises(BadCheckpoint, match=r"m\.gguf.*" + message):
        hm.load(file)


def test_a_missing_gguf_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'needs the gguf package: pip install "headmix\[gguf\]"'):
        hm.load(tmp_path / "m.gguf")


def test_a_gguf_file_is_named_inside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tiny_gguf(tmp_path / "m.gguf")
    with pytest.raises(BadCheckpoint, match=r"gguf_file names the file '../m.gguf'.*refused"):
        hm.load(tmp_path / "a", gguf_file="../m.gguf", weights_only=True)
