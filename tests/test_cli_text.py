"""Commands that read a text: how much, what is kept, and what Ctrl-C leaves."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands import fails, headmix

import headmix as hm
from headmix import terminal
from headmix.options import Reading, Talk

TOPICS = ("apples and pears", "the sea at night", "a train to the north", "bread, salt, and oil")
READ = ("--layers", "0-1", "--metrics", "interference_ratio,cka", "--folds", "3")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo.nc"
    assert headmix("measure", "demo", "--out", out).stdout == f"Results: {out}\n"
    return out


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
