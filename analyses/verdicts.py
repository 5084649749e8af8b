"""Verdicts: what an analysis found about a claim, in a form that pages are made of.

A verdict's decision is computed by its script's rule from the numbers in its evidence. It is kept
as JSON, rounded to what is worth reading, so that the same seed gives the same file.
"""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from figures import Figure, figure_from

#: What is said about each claim beside its numbers: in English and Korean, how it is decided, what
#: its nulls are, and what the numbers do not say.
CLAIMS = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))

Word = Literal["confirmed", "refuted", "depends"]


@dataclass(frozen=True)
class Decision:
    """What the rule makes of the numbers.

    Attributes:
        word: "confirmed", "refuted" or "depends".
        on: what it depends on; only for "depends".
        because: one sentence with the numbers that decided.
    """

    word: Word
    because: str
    on: str = ""

    def __post_init__(self) -> None:
        if (self.word == "depends") != bool(self.on):
            raise ValueError(f"'depends' and only it says on what: {self.word!r}, on={self.on!r}")

    @property
    def text(self) -> str:
        return f"depends on {self.on}" if self.word == "depends" else self.word


@dataclass(frozen=True)
class Evidence:
    """One number that a claim is judged by, beside its null.

    Attributes:
        part: which part of the claim it speaks to.
        model: the model that it was measured on.
        statistic: what it is, in words.
        value: the number.
        n: of how many things.
        null: what unrelated heads (or no effect) would give, with its spread where known.
        low, high: the interval, over what ``over`` says: documents or seeds.
    """

    part: str
    model: str
    statistic: str
    value: float
    n: str
    null: float | None = None
    null_sd: float | None = None
    low: float | None = None
    high: float | None = None
    over: str = ""


@dataclass(frozen=True)
class Verdict:
    """All that an analysis found about one claim.

    Attributes:
        claim: "C1" to "C7".
        slug: the name of the script, which its files begin with.
        rule: what would confirm and what would refute the claim.
        decision: what the rule makes of the evidence.
        evidence: the numbers.
        figures: at least one.
        text: what the models read.
        absent: models that were left out, with the reason.
        seed: of everything that is drawn.
        quick: whether it is a quick run, whose numbers are rough.
        labels: the name of the CoNLL-U file that labels came from, if any.
    """

    claim: str
    slug: str
    rule: str
    decision: Decision
    evidence: Sequence[Evidence]
    figures: Sequence[Figure]
    text: str
    absent: Sequence[str] = ()
    seed: int = 0
    quick: bool = False
    labels: str = ""

    @property
    def about(self) -> dict[str, Any]:
        """What is said about the claim beside its numbers."""
        return CLAIMS[self.claim]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(e.model for e in self.evidence))

    @property
    def command(self) -> str:
        labels = f" --conllu {self.labels}" if self.labels else ""
        return f"python analyses/{self.slug}.py" + " --quick" * self.quick + labels


def write(verdict: Verdict, folder: Path) -> None:
    """The verdict as ``<slug>.json``, its figures as ``<slug>-1.svg``, …, each whole or not."""
    content = {"claim": verdict.claim, **verdict.about, "models": verdict.models}
    content |= _rounded(asdict(verdict))
    content["decision"]["text"] = verdict.decision.text
    for number, (figure, stored) in enumerate(
        zip(verdict.figures, content["figures"], strict=True), 1
    ):
        stored["kind"] = type(figure).__name__
        # drawn from what is kept, so that whoever reads it back draws the very same
        replace(folder / f"{verdict.slug}-{number}.svg", figure_from(stored).file())
    text = json.dumps(content, ensure_ascii=False, indent=1)
    replace(folder / f"{verdict.slug}.json", text + "\n")


def read(path: Path) -> Verdict:
    """A verdict as ``write`` left it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    known = {f.name for f in fields(Verdict)}
    content = {name: value for name, value in content.items() if name in known}  # all else follows
    del content["decision"]["text"]
    content["decision"] = Decision(**content["decision"])
    content["evidence"] = [Evidence(**e) for e in content["evidence"]]
    content["figures"] = [figure_from(f) for f in content["figures"]]
    return Verdict(**content)


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _rounded(value: Any) -> Any:
    """Four significant digits; what is not finite becomes None."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
