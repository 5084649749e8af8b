"""Results survive the disk, and what is not ours is refused."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from small import HOSTILE, every_shape, hostile

from headmix.measurement import FORMAT
from headmix.results import open_results, save


@pytest.fixture(scope="module")
def ds():
    return every_shape()


@pytest.fixture
def saved(ds, tmp_path):
    return save(ds, tmp_path / "run.nc")


def test_round_trip_keeps_values_dims_and_attributes(ds, saved):
    read = open_results(saved)
    xr.testing.assert_identical(read, ds)
    numbers = [n for n, v in ds.items() if v.dtype.kind not in "OU"]
    assert {n: read[n].dtype for n in numbers} == {n: ds[n].dtype for n in numbers}


anything = st.characters()  # lone surrogates too


def test_round_trip_of_any_text(tmp_path):
    ds = hostile()
    read = open_results(save(ds, tmp_path / "run.nc"))
    xr.testing.assert_identical(read, ds)
    assert set(read.words.values.ravel()) == set(HOSTILE)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1), st.text(anything))
@settings(max_examples=30, deadline=None)
def test_round_trip_of_generated_text(tmp_path_factory, texts, attribute):
    ds = xr.Dataset(
        {"words": ("rank", np.array(texts, object), {"doc": attribute})},
        attrs={"headmix_format": "1", "model": attribute},
    )
    read = open_results(save(ds, tmp_path_factory.mktemp("text") / "run.nc"))
    assert read.words.values.tolist() == texts
    assert (read.words.attrs["doc"], read.attrs["model"]) == (attribute, attribute)


def test_files_are_compact(tmp_path):
    big = every_shape()
    big["flat"] = (("layer", "wide"), np.zeros((big.sizes["layer"], 500_000)))
    assert save(big, tmp_path / "run.nc").stat().st_size < 200_000


def test_saving_replaces_and_leaves_nothing_else(ds, saved):
    save(ds.assign_attrs(model="second"), saved)
    assert open_results(saved).attrs["model"] == "second"
    assert [p.name for p in saved.parent.iterdir()] == ["run.nc"]


def test_a_failed_save_keeps_the_old_file(ds, saved, monkeypatch):
    def half(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError("disk full")

    old = saved.read_bytes()
    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="disk full"):
        save(ds, saved)
    assert saved.read_bytes() == old
    assert [p.name for p in saved.parent.iterdir()] == ["run.nc"]


def test_a_killed_save_keeps_the_old_file(saved):
    old = saved.read_bytes()
    program = (
        "import os, sys; from headmix.files import whole_file\n"
        "with whole_file(sys.argv[1]) as t:\n"
        "    t.write_bytes(b'half'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(saved)]).returncode == -9
    assert saved.read_bytes() == old


def test_the_written_file_has_the_usual_permissions(saved):
    usual = saved.with_name("usual")
    usual.touch()
    assert saved.stat().st_mode == usual.stat().st_mode


def test_no_folder(ds, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"cannot write .*run\.nc: there is no folder .*away"
    ):
        save(ds, tmp_path / "away" / "run.nc")
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save(ds, tmp_path)


def test_no_permission(ds, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    with pytest.raises(PermissionError, match="is not writable"):
        save(ds, tmp_path / "run.nc")


def test_only_results_are_saved(tmp_path):
    with pytest.raises(ValueError, match=r"from headmix\.measure"):
        save(xr.Dataset(), tmp_path / "run.nc")


def refused(path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is what the callers check
        open_results(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_missing_file(tmp_path):
    assert "there is no such file" in refused(tmp_path / "none.nc")


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"CDF\x01", b"x" * 5000])
def test_other_files(tmp_path, content):
    path = tmp_path / "other.nc"
    path.write_bytes(content)
    assert "not a headmix results file" in refused(path)


def test_other_netcdf(tmp_path):
    path = tmp_path / "other.nc"
    xr.Dataset({"x": ("a", [1.0])}).to_netcdf(path, engine="h5netcdf")
    assert "it has no headmix_format" in refused(path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_truncated(saved, kept):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(kept * len(content))])
    assert "damaged or truncated" in refused(saved)


def test_flipped_bytes_give_a_value_error_or_a_dataset(saved):
    content = saved.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for at in random.integers(0, len(content), 8):
            damaged[at] ^= int(random.integers(1, 256))
        saved.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            open_results(saved)


def test_newer_format(saved):
    with h5py.File(saved, "a") as file:
        file.attrs["headmix_format"] = str(FORMAT + 1)
    assert "written by a newer headmix" in refused(saved)


def test_nothing_outside_the_file_is_read(saved, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 64)
    with h5py.File(saved, "a") as file:
        file.create_dataset("x", shape=(64,), dtype="u1", external=[(str(secret), 0, 64)])
    assert "keeps its data in another file" in refused(saved)
    with h5py.File(saved, "a") as file:
        del file["x"]
        file["y"] = h5py.ExternalLink(str(secret), "/z")
    assert "is a link" in refused(saved)


def test_a_claim_larger_than_the_file_can_hold(saved):
    with h5py.File(saved, "a") as file:
        file.create_dataset("bomb", shape=(10**12,), dtype="f8", chunks=(10**6,))
    assert "more than a file of this size can hold" in refused(saved)


def test_no_python_objects(saved):
    with h5py.File(saved, "a") as file:
        file.create_dataset("x", data=[file.ref], dtype=h5py.ref_dtype)
    assert "has type object" in refused(saved)
