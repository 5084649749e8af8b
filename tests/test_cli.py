"""The command line, on the demo model: what it prints, how it fails, and what it does not draw."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from commands import WIDE, fails, headmix
from rich.console import Console
from small import any_layer, small_model
from typer.testing import CliRunner

import headmix as hm
from headmix import architectures, cards, terminal
from headmix.cli import app
from headmix.options import Reading, Talk


@pytest.fixture(autouse=True, scope="module")
def _libraries_draw_nothing() -> None:
    """A process that starts with the command sees to this itself; here they are imported."""
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo.nc"
    assert headmix("measure", "demo", "--out", out).stdout == f"Results: {out}\n"
    return out


@pytest.fixture(scope="module")
def ds(run_file: Path):
    return hm.open_results(run_file)


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
        for command in ("report", "measure", "inspect", "verify", "metrics"):
            assert "--json" in headmix(command, "--help").stdout

    def test_version(self) -> None:
        assert headmix("--version").stdout == f"headmix {hm.__version__}\n"

    def test_unknown_option_and_command_exit_2(self) -> None:
        assert "--txt" in headmix("report", "demo", "--txt", "x", code=2).stderr
        assert "reprot" in headmix("reprot", code=2).stderr


class TestInspect:
    def test_head_card_says_what_the_dataset_says(self, run_file: Path, ds) -> None:
        told = headmix("inspect", run_file, "--layer", "3", "--head", "5").stdout
        here = ds.sel(layer="L3", head=5)
        assert "(demo)  L3 head 5" in told
        z = float(
            (here.ov_stable_rank - here.ov_stable_rank_null_mean) / here.ov_stable_rank_null_sd
        )
        (row,) = [line for line in told.splitlines() if line.endswith("ov_stable_rank  ")
                  or line.rstrip().endswith("ov_stable_rank")]  # fmt: skip
        assert terminal.number(float(here.ov_stable_rank)) in row
        assert terminal.number(float(here.ov_stable_rank_null_mean)) in row
        assert f"{z:+.1f}" in row
        assert "A null is not a p-value" in told

    def test_nearest_heads_are_those_of_largest_overlap(self, run_file: Path, ds) -> None:
        card = json.loads(
            headmix("inspect", run_file, "--layer", "L3", "--head", "5", "--json").stdout
        )
        (ranking,) = [r for r in card["nearest"] if r["metric"] == "projection_kernel"]
        overlap = ds.projection_kernel.sel(layer="L3", head=5).values.copy()
        overlap[5] = -1
        want = np.argsort(-overlap)[: cards.NEAREST].tolist()
        assert [p["head"] for p in ranking["partners"]] == want
        assert ranking["partners"][0]["value"] == pytest.approx(overlap.max())

    def test_partners_come_from_earlier_and_later_layers(self, run_file: Path) -> None:
        card = json.loads(
            headmix("inspect", run_file, "--layer", "3", "--head", "5", "--json").stdout
        )
        for key, layers in (("reads_from", {"L0", "L1", "L2"}), ("writes_to", {"L4", "L5"})):
            ranked = {r["metric"]: r["partners"] for r in card[key]}
            assert set(ranked) >= {"composition_q", "composition_k", "composition_v"}
            assert {p["layer"] for partners in ranked.values() for p in partners} <= layers

    def test_a_composition_is_seen_from_both_ends(self, ds) -> None:
        writer = cards.head_card(ds, "L3", 5)["writes_to"]
        best = next(r for r in writer if r["metric"] == "composition_v")["partners"][0]
        value = ds.composition_v.sel(layer="L3", head=5, layer_b=best["layer"], head_b=best["head"])
        assert best["value"] == pytest.approx(float(value))
        assert best["value"] == pytest.approx(
            float(ds.composition_v.sel(layer="L3", head=5).max(skipna=True))
        )

    def test_layer_table_has_a_row_a_head(self, run_file: Path, ds) -> None:
        told = headmix("inspect", run_file, "--layer", "3").stdout
        assert "Mean overlap between heads" in told
        rows = [line.split() for line in told.splitlines()]
        assert {str(h) for h in range(12)} <= {row[0] for row in rows if row}
        assert terminal.number(float(ds.mean_overlap.sel(layer="L3"))) in told

    def test_of_a_model_measures_it(self) -> None:
        told = headmix(
            "inspect", "demo", "--layer", "1", "--layers", "0-1", "--metrics", "projection_kernel"
        ).stdout
        assert "(demo)  L1" in told
        assert "projection kernel" in told

    def test_eighty_columns_are_enough(self, ds) -> None:
        for card in (
            terminal.head_card(cards.head_card(ds, 3, 5)),
            terminal.layer_card(cards.layer_card(ds, 3), width=80),
        ):
            assert "…" not in drawn(card, width=80)

    def test_names_from_strangers_cannot_steer_the_terminal(self, ds) -> None:
        hostile = ds.assign_attrs(model="\x1b[2J[bold]x[/nope]")
        card = drawn(terminal.head_card(cards.head_card(hostile, 3, 5)), width=120)
        assert "\x1b" not in card
        assert "[bold]x[/nope]" in card

    def test_says_what_is_missing_and_what_to_know(self, ds) -> None:
        told = drawn(terminal.head_card(cards.head_card(ds, 3, 5)), width=200)
        for metric, by_layer in json.loads(ds.attrs["skipped"]).items():
            assert f"No {metric}: {by_layer['L3']}." in told
        noted = ds.assign_attrs(notes=json.dumps({"L3": ["post-norm"], "L4": ["another"]}))
        told = drawn(terminal.head_card(cards.head_card(noted, 3, 5)), width=200)
        assert "Note: post-norm" in told
        assert "another" not in told

    def test_an_invalid_layer_is_marked(self) -> None:
        module = torch.nn.MultiheadAttention(8, 2)
        with torch.no_grad():
            module.out_proj.weight[0, 0] = torch.nan
        marked = hm.measure(hm.load(module), metrics=["projection_kernel"])
        assert "invalid: NaN or infinity in W_O" in drawn(
            terminal.layer_card(cards.layer_card(marked, 0)), width=80
        )

    def test_a_refused_layer_gives_its_reason_and_no_head_card(self, tmp_path: Path) -> None:
        model = replace(small_model(), refused={"L1": "head 1 moved"})
        out = tmp_path / "run.nc"
        hm.save(hm.measure(model, metrics=["projection_kernel"]), out)
        assert "This layer is invalid: " in (told := headmix("inspect", out, "--layer", 1).stdout)
        assert "head 1 moved" in told
        assert "0 heads" not in told
        line = fails("inspect", out, "--layer", 1, "--head", 0)
        assert "layer L1 is invalid, it has no head cards: " in line
        assert "head 1 moved" in line

    def test_a_metric_of_any_two_heads_is_neither_written_nor_read(self) -> None:
        ds = any_layer()
        card = cards.head_card(ds, "L1", 2)
        (ranking,) = card["nearest_in_any_layer"]
        want = ds.alike.sel(layer="L1", head=2).values.copy()
        want[1, 2] = -1
        best = ranking["partners"][0]
        assert (best["layer"], best["head"]) != ("L1", 2)
        assert best["value"] == pytest.approx(want.max())
        assert {r["metric"] for r in card["reads_from"] + card["writes_to"]} == {"cross"}
        assert "Nearest heads in any layer" in drawn(terminal.head_card(card), width=120)

    def test_a_choice_of_layers_has_cards(self, ds) -> None:
        card = cards.head_card(ds.sel(layer=["L3", "L4"]), 3, 5)
        (ranking,) = [r for r in card["writes_to"] if r["metric"] == "composition_v"]
        assert {p["layer"] for p in ranking["partners"]} == {"L4"}
        with pytest.raises(ValueError, match="only layers can be chosen"):
            cards.head_card(ds.isel(head=[3]), 3, 0)

    def test_blocks_are_not_called_documents(self) -> None:
        one = hm.measure("demo", text=["the sea at night " * 40], metrics=["cka"], layers=[0],
                         folds=3)  # fmt: skip
        told = drawn(terminal.layer_card(cards.layer_card(one, 0)), width=120)
        assert "tokens of 3 blocks in 3 folds" in told


def drawn(renderable: object, width: int) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(renderable, markup=False, highlight=False)
    console.file.close()
    return console.export_text()


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


TOPICS = ("apples and pears", "the sea at night", "a train to the north", "bread, salt, and oil")
READ = ("--layers", "0-1", "--metrics", "interference_ratio,cka", "--folds", "3")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\f".join((f"I wrote about {t}. " * (5 + n % 3)) for n, t in
                              enumerate(TOPICS * 3)))  # fmt: skip
    return file


class TestText:
    def test_measure_reads_a_file_and_says_how_much(self, text: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.nc"
        headmix("measure", "demo", "--text", text, "--out", out, "--within-position", *READ)
        ds = hm.open_results(out)
        assert ds.attrs["text"] == "the file text.txt"
        assert ds.attrs["folds"] == "3"
        assert (ds.n_documents == 12).all()
        assert {"cka_low", "cka_high", "interference_ratio_within_position"} <= {*ds}
        assert [p.name for p in tmp_path.iterdir()] == ["run.nc"]  # no lock, no unfinished sums

    def test_the_demo_report_reads_the_default_text(self, tmp_path: Path) -> None:
        out = tmp_path / "page.html"
        headmix("report", "demo", "--out", out, "--max-tokens", "300", *READ)
        page = out.read_text(encoding="utf-8")
        assert "the help topics of Python" in page
        assert "On 300 tokens" in page
        headmix("report", "demo", "--out", out, "--weights-only", "--metrics", "joint_span")
        assert "the help topics of Python" not in out.read_text(encoding="utf-8")

    def test_the_default_text_is_bounded_and_other_text_is_not(self) -> None:
        assert Reading(text="default").measure_options() == {"text": "default", "max_tokens": 20000}
        assert Reading(text="default", max_tokens=9).measure_options()["max_tokens"] == 9
        assert Reading(text="a.txt", memory=2.0).measure_options() == {
            "text": "a.txt",
            "memory": 2 * 2**30,
        }

    def test_inspect_shows_intervals_and_the_text(self, text: Path) -> None:
        told = headmix("inspect", "demo", "--layer", "1", "--text", text, *READ).stdout
        card = json.loads(
            headmix("inspect", "demo", "--layer", "1", "--text", text, "--json", *READ).stdout
        )
        (reading,) = card["metrics"]
        assert reading["low"] < reading["value"] < reading["high"]
        assert terminal.interval(reading) in told
        assert "On text: " in told
        assert "of 12 documents in 3 folds, the file text.txt" in told

    def test_what_cannot_be_read_is_said(self, run_file: Path, tmp_path: Path) -> None:
        assert "--folds, --memory: of which text?" in fails(
            "inspect", "demo", "--layer", "0", "--folds", "0", "--memory", "1"
        )
        assert "is a finished run, and --text would change nothing in it" in fails(
            "report", run_file, "--text", "default", "--out", tmp_path / "x.html"
        )
        assert "there is no text file or directory nowhere.txt" in fails(
            "measure", "demo", "--text", "nowhere.txt", "--json"
        )
        assert "of memory allowed" in fails(
            "measure", "demo", "--text", "default", "--memory", "0.0001", "--json", *READ
        )
        assert "--resume goes on with a pass over text" in fails("measure", "demo", "--resume")

    def test_ctrl_c_keeps_what_was_seen_and_resume_goes_on(
        self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, whole = tmp_path / "run.nc", tmp_path / "whole.nc"
        measure = ("measure", "demo", "--text", text, "--tokens-per-batch", "100", *READ, "--out")
        headmix(*measure, whole)

        def interrupt(what: str, done: int, total: int) -> None:
            if what == "tokens" and done > total / 3:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patch:
            patch.setattr(Talk, "progress", lambda self: nullcontext(interrupt))
            told = headmix(*measure, out, code=130).stdout
        partial = hm.open_results(out)
        n, total = int(partial.n_tokens[0]), int(hm.open_results(whole).n_tokens[0])
        assert 0 < n < total
        assert f"Interrupted: {n} of {total} tokens were seen" in told
        assert "run.nc.partial.0 is left of a run that did not end" in fails(*measure, out)
        headmix(*measure, out, "--resume")
        assert (
            hm.open_results(out)
            .drop_attrs(deep=False)
            .identical(hm.open_results(whole).drop_attrs(deep=False))
        )
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run.nc", "whole.nc"]

    def test_what_a_kill_left_half_written_is_swept(self, text: Path, tmp_path: Path) -> None:
        torn = tmp_path / ".run.nc.partial.0.0123456789ab.tmp"
        others = [tmp_path / name for name in (".other.nc.partial.0.0123456789ab.tmp",
                                               ".run.nc.partial.mine.tmp")]  # fmt: skip
        for file in (torn, *others):
            file.write_bytes(b"half")
        headmix("measure", "demo", "--text", text, *READ, "--out", tmp_path / "run.nc")
        assert {*tmp_path.iterdir()} == {*others, tmp_path / "run.nc"}

    def test_ctrl_c_elsewhere_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(hm, "load", interrupted, raising=False)
        assert headmix("verify", "demo", code=130).stderr == "headmix: interrupted\n"


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
        assert "unknown metric projection_colonel; known: " in line
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


class TestProcess:
    """What only a process of its own can show."""

    def test_stdout_is_json_and_stderr_empty_when_piped(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "headmix", "verify", "demo", "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["ok"] is True
        assert done.stderr == ""

    def test_of_two_writers_the_later_is_refused(self, run_file: Path, tmp_path: Path) -> None:
        out = tmp_path / "page.html"
        holds = (
            "import sys, time; from headmix.files import one_writer\n"
            "with one_writer(sys.argv[1]): print('writing', flush=True); time.sleep(60)"
        )
        other = subprocess.Popen([sys.executable, "-c", holds, out], stdout=subprocess.PIPE)
        assert other.stdout is not None
        other.stdout.readline()
        refused = f"cannot write {out}: another headmix is writing it"
        assert refused in fails("report", run_file, "--out", out)
        assert refused in fails("measure", "demo", "--out", out)
        assert not out.exists()
        other.kill()
        other.communicate()
        headmix("report", run_file, "--out", out)
        assert [p.name for p in tmp_path.iterdir()] == ["page.html"]

    def test_a_disk_that_takes_no_more_is_one_line_and_leaves_the_old_file(
        self, run_file: Path, tmp_path: Path
    ) -> None:
        page, run = tmp_path / "page.html", tmp_path / "run.nc"
        page.write_text("the old page")
        run.write_text("the old run")
        limits = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (9000, 9000))\n"
        command = limits + "from headmix.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", command, "report", run_file, "--out", page],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr == "headmix: [Errno 27] File too large\n"
        saving = limits + (
            "import sys, headmix as hm\n"
            "try: hm.save(hm.open_results(sys.argv[1]), sys.argv[2])\n"
            "except OSError: sys.exit(3)"
        )
        assert subprocess.run([sys.executable, "-c", saving, run_file, run]).returncode == 3
        assert page.read_text() == "the old page"
        assert run.read_text() == "the old run"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "run.nc"]

    def test_help_is_quick_because_nothing_heavy_is_imported(self) -> None:
        script = (
            "import sys; from headmix.cli import app\n"
            "app(['--help'], standalone_mode=False)\n"
            "heavy = {'torch', 'transformers', 'plotly', 'xarray', 'pandas'} & set(sys.modules)\n"
            "sys.exit(f'imported {heavy}' if heavy else 0)"
        )
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

    def test_progress_shows_rate_and_end_on_a_terminal_once_work_lasts(self) -> None:
        seen = on_a_terminal(
            "import time; from headmix import progress as p; p.PATIENCE_S = 0.1\n"
            "with p.progress(True) as progress:\n"
            "    for i in range(20): progress(f'L{i}', i, 20); time.sleep(0.05)"
        )
        assert "L1" in seen
        assert "/20" in seen
        assert "/s" in seen
        assert "0:00:0" in seen

    def test_progress_over_text_shows_the_plan_and_tokens_a_second(self) -> None:
        script = (
            "import time; from headmix import progress as p; p.PATIENCE_S = 0.1\n"
            "with p.progress({shown}) as progress:\n"
            "    progress('L0', 0, 6); progress('plan: 4000 tokens in 4 batches', 0, 0)\n"
            "    for i in range(20): progress('tokens', 200 * i, 4000); time.sleep(0.05)"
        )
        seen = on_a_terminal(script.format(shown=True))
        assert "4000 tokens in 4 batches" in seen
        assert re.search(r"[34],\d{3} tokens/s", seen)
        assert "/4000" in seen
        assert "0:00:0" in seen
        assert on_a_terminal(script.format(shown=False)) == ""

    def test_progress_is_silent_for_quick_work_and_when_unwanted(self) -> None:
        quick = (
            "from headmix import progress as p\n"
            "with p.progress({shown}) as progress: progress('L0', 0, 1)"
        )
        assert on_a_terminal(quick.format(shown=True)) == ""
        long = "import time; from headmix import progress as p; p.PATIENCE_S = 0\n"
        long += "with p.progress(False) as progress: progress('L0', 0, 1); time.sleep(0.3)"
        assert on_a_terminal(long) == ""


def on_a_terminal(script: str) -> str:
    """What a script draws on a stderr that is a terminal."""
    reader, writer = pty.openpty()
    with os.fdopen(reader, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stderr=writer, env=os.environ | {"TERM": "xterm"}
        )
        os.close(writer)
        seen = b""
        try:
            while chunk := screen.read(4096):
                seen += chunk
        except OSError:  # Linux says so when the other end has closed
            pass
        assert process.wait() == 0
    return seen.decode()
