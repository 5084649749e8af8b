"""Commands, run in the process of the test."""

import transformers
from typer.testing import CliRunner

from headmix.cli import app

# it would draw on a stderr that is compared with what headmix says
transformers.utils.logging.disable_progress_bar()

WIDE = {"COLUMNS": "200"}


def headmix(*arguments: object, code: int = 0):
    """Run a command in this process; a failure other than an exit code is raised."""
    result = CliRunner(env=WIDE).invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def fails(*arguments: object) -> str:
    """The one line on stderr of a command that cannot use its input."""
    result = headmix(*arguments, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("headmix: ")
    return line
