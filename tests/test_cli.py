"""The command line, on the demo model: what it prints, and how it fails."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import WIDE, fails, headmix
from typer.testing import CliRunner

import headmix as hm
from headmix import architectures
from headmix.cli import app


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo.nc"
    assert headmix("measure", "demo", "--out", out).stdout == f"Results: {out}\n"
    return out


class TestHelp:
    def test_teaches_by_example(self) -> None:
        told = headmix("--help").stdout
        assert "headmix report demo" in told
        assert "headmix inspect run.nc --layer 3 --head 5" in told
        assert "Exit codes: 0 done, 1 a law or check failed, 2 the input cannot be used, " in told
        assert "130 interrupted" in told
        alone = CliRunner(env=WIDE).invoke(app, [])
        assert "headmix report demo" in alone.output

    def test_every_command_explains_every_option(self) -> None:
        for command in ("report", "measure", "inspect", "compare", "verify", "metrics"):
            assert "--json" in headmix(command, "--help").stdout

    def test_version(self) -> None:
        assert headmix("--version").stdout == f"headmix {hm.__version__}\n"

    def test_unknown_option_and_command_exit_2(self) -> None:
        assert "--txt" in headmix("report", "demo", "--txt", "x", code=2).stderr
        assert "reprot" in headmix("reprot", code=2).stderr


class TestMeasure:
    def test_json_reads_back_as_the_same_dataset(self) -> None:
        import xarray as xr

        told = headmix("measure", "demo", "--layers", "0", "--metrics", "projection_kernel",
                       "--json").stdout  # fmt: skip
        back = xr.Dataset.from_dict(json.loads(told))
        direct = hm.measure("demo", layers=[0], metrics=["projection_kernel"])
        np.testing.assert_allclose(back.projection_kernel, direct.projection_kernel, rtol=1e-6)
        assert back.attrs == direct.attrs

    def test_default_file_is_named_after_the_model(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        headmix("measure", "demo", "--layers", "0", "--metrics", "projection_kernel")
        assert hm.open_results("headmix-demo.nc").layer.values.tolist() == ["L0"]

    def test_an_invalid_layer_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = torch.nn.MultiheadAttention(8, 2)
        with torch.no_grad():
            module.out_proj.weight[0, 0] = torch.inf
        broken = hm.load(module)
        monkeypatch.setattr(hm, "load", lambda *_, **__: broken, raising=False)
        told = headmix("measure", "x", "--out", tmp_path / "x.nc").stdout
        assert "Layer L0 is invalid: NaN or infinity in W_O" in told


class TestReport:
    def test_of_a_run_writes_the_page(self, run_file: Path, tmp_path: Path) -> None:
        out = tmp_path / "page.html"
        told = json.loads(headmix("report", run_file, "--out", out, "--json").stdout)
        assert told["report"] == str(out)
        assert told["bytes"] == out.stat().st_size
        assert told["model"] == hm.open_results(run_file).attrs["model"]
        assert told["layers"] == [f"L{i}" for i in range(6)]
        assert out.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


class TestVerify:
    def test_prints_both_laws_layer_by_layer(self) -> None:
        told = headmix("verify", "demo").stdout
        assert "sum error" in told
        assert "Both laws hold." in told
        rows = json.loads(headmix("verify", "demo", "--json").stdout)["rows"]
        assert [row["layer"] for row in rows] == [f"L{i}" for i in range(6)]
        assert all(row["sum_error"] < 1e-5 and row["independent"] for row in rows)

    def test_a_broken_law_exits_1_with_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from headmix.laws import Check, LayerCheck

        bad = LayerCheck("L0", 0.5, False, "exact", "head 1 moved, which kv_of_head does not name")
        monkeypatch.setattr(hm, "verify", lambda *_, **__: Check("demo", (bad,)), raising=False)
        told = headmix("verify", "demo", code=1).stdout
        assert "head 1 moved" in told
        assert "A law failed." in told

    def test_list_is_the_table_of_architectures(self) -> None:
        rows = json.loads(headmix("verify", "--list", "--json").stdout)
        assert [r["model_type"] for r in rows] == [a.model_type for a in architectures.table()]
        told = headmix("verify", "--list").stdout
        assert all(a.model_type in told for a in architectures.table())

    def test_needs_a_model_or_list(self) -> None:
        assert "verify needs a MODEL, or --list" in fails("verify")


class TestMetrics:
    def test_catalogue_names_them_all(self) -> None:
        told = headmix("metrics").stdout
        assert all(name in told for name in hm.catalogue())

    def test_names_are_whole_in_eighty_columns(self) -> None:
        told = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["metrics"]).stdout
        names = [line.split()[0] for line in told.splitlines() if line.strip()]
        assert {*hm.catalogue()} <= {*names}

    def test_one_in_full(self) -> None:
        told = headmix("metrics", "projection_kernel").stdout
        metric = hm.catalogue()["projection_kernel"]
        for text in (metric.formula, metric.null_text, metric.reference, metric.range_text):
            assert text in told
        assert ">>>" not in told

    def test_json(self) -> None:
        entries = json.loads(headmix("metrics", "--json").stdout)
        assert [e["name"] for e in entries] == list(hm.catalogue())


class TestUnusableInput:
    def test_unknown_metric_lists_the_known(self) -> None:
        line = fails("metrics", "projection_colonel")
        assert "unknown metric projection_colonel; did you mean projection_kernel? known: " in line
        assert "projection_kernel" in line
        assert "unknown metric nope" in fails("measure", "demo", "--metrics", "nope", "--json")

    def test_unknown_layer_or_head_lists_those_there_are(self, run_file: Path) -> None:
        assert "no layer '9'; it has L0, L1, L2, L3, L4, L5" in fails(
            "inspect", "demo", "--layer", "9"
        )
        assert "no layer '9' in these results; they have L0, L1" in fails(
            "inspect", run_file, "--layer", "9"
        )
        assert "layer L3 has no head 12; it has heads 0 to 11" in fails(
            "inspect", run_file, "--layer", "3", "--head", "12"
        )

    def test_a_finished_run_refuses_what_would_change_nothing(
        self, run_file: Path, tmp_path: Path
    ) -> None:
        asked = ("--metrics", "nonsense", "--layers", "99", "--dtype", "float64")
        for command in (
            ("measure", run_file, "--out", tmp_path / "x.nc"),
            ("report", run_file, "--out", tmp_path / "x.html"),
            ("inspect", run_file, "--layer", "0"),
        ):
            refused = fails(*command, *asked)
            assert "and --dtype, --layers, --metrics would change nothing in it" in refused
        assert "--folds, --within-position would" in fails(
            "inspect", run_file, "--layer", "0", "--within-position", "--folds", "2"
        )
        assert list(tmp_path.iterdir()) == []

    def test_layer_ranges(self) -> None:
        assert "--layers 5-3: the range ends before it begins" in fails(
            "measure", "demo", "--layers", "5-3", "--json"
        )
        assert "expected names separated by commas" in fails(
            "measure", "demo", "--layers", ",", "--json"
        )

    def test_output_is_refused_before_the_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hm, "load", lambda *_, **__: pytest.fail("loaded"), raising=False)
        missing = tmp_path / "nowhere" / "run.nc"
        assert f"cannot write {missing}: there is no folder {missing.parent}" in fails(
            "measure", "demo", "--out", missing
        )
        assert f"cannot write {tmp_path}: it is a folder" in fails(
            "report", "demo", "--out", tmp_path
        )
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        assert "is not writable" in fails("report", "demo", "--out", tmp_path / "x.html")

    def test_missing_and_damaged_files(self, tmp_path: Path) -> None:
        gone = tmp_path / "gone.safetensors"
        assert f"there is no file or directory {gone}" in fails("measure", gone, "--json")
        assert f"{tmp_path / 'gone.nc'}: there is no such file" in fails(
            "inspect", tmp_path / "gone.nc", "--layer", "0"
        )
        torn = tmp_path / "torn.nc"
        torn.write_bytes(b"\x89HDF\r\n\x1a\n torn")
        assert str(torn) in fails("inspect", torn, "--layer", "0")

    def test_names_in_errors_cannot_steer_the_terminal(self, tmp_path: Path) -> None:
        assert "\x1b" not in fails("inspect", tmp_path / "\x1b[2Jx.nc", "--layer", "0")

    def test_debug_shows_where(self) -> None:
        result = headmix("metrics", "nope", "--debug", code=2)
        assert "Traceback" in result.stderr
        assert result.stderr.rstrip().splitlines()[-1].startswith("headmix: unknown metric nope")

    def test_a_bug_is_not_called_bad_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(hm, "catalogue", broken, raising=False)
        with pytest.raises(ZeroDivisionError):
            headmix("metrics")
