"""Build reports/claims.html and reports/README.md from the verdicts that the analyses left.

    python analyses/claims.py [--quick]

Both are pure functions of the verdicts: no number in them was typed by hand.
"""

import argparse
import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from figures import number
from markupsafe import Markup, escape
from verdicts import CLAIMS, Evidence, Verdict, read, replace

HERE = Path(__file__).parent

#: What else is in reports/, and what makes it.
OTHERS = (
    ("page-*.png", "the pages of the next two lines, pictured", "make screenshots"),
    ("demo.html", "the report page of the demo model; not kept in the repository", "make report"),
    ("compare.html", "the demo model beside a fine-tune of it; not kept either", "make compare"),
    ("claims.html", "the seven claims on one page; not kept either", "make claims"),
)

#: A sign for each decision, so that it is not told by colour alone.
SIGNS = {"confirmed": "✓", "refuted": "✗", "depends": "◐"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="of the quick runs")
    parser.add_argument("--folder", type=Path, help="default reports, with --quick reports/quick")
    chosen = parser.parse_args()
    folder = chosen.folder or HERE.parent / "reports" / ("quick" if chosen.quick else "")
    for path in build(folder):
        print(path)


def build(folder: Path) -> list[Path]:
    """The page and the read-me of a folder with verdicts."""
    verdicts = [read(path) for path in sorted(folder.glob("0*.json"))]
    if not verdicts:
        raise SystemExit(f"{folder} holds no verdicts: run the analyses first (make claims)")
    pages = {folder / "claims.html": page(verdicts), folder / "README.md": read_me(verdicts)}
    for path, text in pages.items():
        replace(path, text)
    return list(pages)


def page(verdicts: Sequence[Verdict]) -> str:
    """One page that asks for nothing, not even a script."""
    style = "".join(_asset(name) for name in ("palette.css", "figures.css", "claims.css"))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return _template("claims.html", autoescape=True).render(
        verdicts=verdicts, missing=_missing(verdicts), style=Markup(style), policy=policy
    )


def read_me(verdicts: Sequence[Verdict]) -> str:
    return _template("claims.md", autoescape=False).render(
        verdicts=verdicts, missing=_missing(verdicts), others=OTHERS
    )


def _missing(verdicts: Sequence[Verdict]) -> list[str]:
    return [claim for claim in CLAIMS if claim not in {v.claim for v in verdicts}]


def _template(name: str, *, autoescape: bool) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"signs": SIGNS, "claims": CLAIMS}
    environment.filters |= {
        "number": _number,
        "typeset": lambda text: escape(text).replace("W_O", Markup("W<sub>O</sub>")),
        "null": _null,
        "interval": _interval,
        # figures are built as a tree of elements, which escapes what they are given
        "svg": lambda figure: Markup(figure.inline()),
        "stop": lambda title: title if title.endswith("?") else f"{title}.",
        "cell": lambda text: str(text).replace("|", "\\|").replace("\n", " "),
    }
    return environment.from_string(_asset(name))


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _number(value: Any) -> str:
    """Numbers short, text as it is, lists with commas; a dash where there is nothing."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_number(v) for v in value)
    return value if isinstance(value, str) else number(value, 4)


def _null(e: Evidence) -> str:
    """Mean ± sd, both to the second significant digit of the sd."""
    if e.null is None or not e.null_sd:
        return number(e.null, 4)
    decimals = max(0, 1 - math.floor(math.log10(e.null_sd)))
    if decimals > 5:
        return f"{number(e.null)} ± {number(e.null_sd, 2)}"
    return f"{e.null:.{decimals}f} ± {e.null_sd:.{decimals}f}".replace("-", "−")


def _interval(e: Evidence) -> str:
    if e.low is None or e.high is None:
        return "–"
    return f"{number(e.low)} … {number(e.high)} ({e.over})"


if __name__ == "__main__":
    main()
