"""The command as a process: its streams, its progress, and two of it at once."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fails, headmix


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "demo.nc"
    assert headmix("measure", "demo", "--out", out).stdout == f"Results: {out}\n"
    return out


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
