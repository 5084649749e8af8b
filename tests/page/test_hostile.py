"""Text from strangers, in every place that text can come from: it shows, and does nothing else.

One page carries all of it, each text in each place as an entry of its own.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import xarray as xr
from small import describe, every_shape

from headmix.page import render, report

RUN = "window.pwned=1"

#: What JavaScript takes for white space.
SPACE = re.compile("[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]")

HOSTILE = [
    # markup that runs
    f"</script><script>{RUN}</script>",
    f"<script>{RUN}</script>",
    f"<ScRiPt >{RUN}</sCrIpT>",
    f"<img src=x onerror='{RUN}'>",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<body onload={RUN}>",
    '<iframe srcdoc="<script>parent.pwned=1</script>"></iframe>',
    f"<details open ontoggle={RUN}>x</details>",
    f"<input autofocus onfocus={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<math><mi xlink:href='javascript:{RUN}'>x</mi></math>",
    f"<object data='javascript:{RUN}'></object>",
    f"<embed src='javascript:{RUN}'>",
    f"<form action='javascript:{RUN}'><button>x</button></form>",
    "<base href='https://evil.test/'>",
    "<meta http-equiv=refresh content='0;url=https://evil.test/'>",
    "<link rel=stylesheet href=//evil.test>",
    "<style>@import url(https://evil.test/x.css);</style>",
    "<img src=https://evil.test/pixel.png>",
    f"<xss style='animation-name:x' onanimationstart={RUN}>",
    f"<noscript><p title='</noscript><img src=x onerror={RUN}>'>",
    # ends of what it may stand in
    "<!--",
    "-->",
    "<!--<script>",
    "]]>",
    "<![CDATA[x]]>",
    "</style>",
    "</title>",
    "</textarea>",
    "<plaintext>",
    "'",
    '"',
    "`",
    f"' onmouseover='{RUN}",
    f'" autofocus onfocus="{RUN}',
    f"`-{RUN}-`",
    f"';{RUN};//",
    f'"}});{RUN};//',
    "\\",
    "\\u003cscript\\u003e",
    "\\'",
    "\u2028\u2029",
    f"\u2028{RUN}//",
    # addresses
    f"javascript:{RUN}",
    f"JaVaScRiPt:{RUN}",
    f"java\nscript:{RUN}",
    f"data:text/html,<script>{RUN}</script>",
    "https://evil.test/",
    "//evil.test",
    "url(https://evil.test)",
    "expression(alert(1))",
    # other languages than HTML
    "{{ 7*7 }}",
    "{% raw %}",
    "{{constructor.constructor('pwned=1')()}}",
    "${7*7}",
    "<%= 7*7 %>",
    "#{7*7}",
    "%{customdata}",
    "%{x:.2f}<extra></extra>",
    "$\\alpha$",
    f'<a href="javascript:{RUN}">x</a>',
    '<a href="https://evil.test">x</a>',
    "<b>bold</b><br><sub>low</sub>",
    "=1+1",
    "@SUM(A1)",
    "+cmd|' /C calc'!A0",
    # names and encodings
    "../../etc/passwd",
    "..\\..\\boot.ini",
    "/dev/null",
    "CON",
    "%00",
    "%3Cscript%3E",
    "&lt;b&gt;",
    "&#60;b&#62;",
    "&amp;amp;",
    "+ADw-script+AD4-",
    "\x00",
    "a\x00b",
    "\x01\x02\x1b[31m",
    "\x7f\x85",
    "\ufeff",
    "\ufffe\uffff",
    # scripts and directions
    "‮evil‬",
    "⁦x⁩‏",
    "שלום",
    "مرحبا",
    "\u200b\u200d",
    "Z̷̛͔a̸",
    "🙂👩‍👩‍👧",
    "𝓗",
    " ",
    "\t\n",
    "x" * 5000,
    "＜script＞",
    "__proto__",
    "constructor",
    "toString",
    "NaN",
    "null",
    "-0",
]

#: A name of an axis: it stands in the titles of figures' axes.
AXIS = "<a href='https://evil.test'>x</a><b>%{x}</b>"

assert len(HOSTILE) == len({*HOSTILE}) >= 100


@pytest.fixture(scope="module")
def ds() -> xr.Dataset:
    """As many layers, labels, metrics, tokens, reasons … as texts, each called one of them."""
    random = np.random.default_rng(0)
    n = len(HOSTILE)
    names = np.array(HOSTILE, object)
    ds = xr.Dataset(coords={d: names for d in ("layer", "layer_b", "label", "label_b")})
    ds = ds.assign_coords(head=[0, 1], head_b=[0, 1], singular=range(3), rank=range(n))

    def add(name: str, dims: tuple[str, ...], **attrs: str) -> None:
        values = random.random([ds.sizes[d] for d in dims])
        ds[name] = (dims, values, describe(name) | attrs)
        ds[f"{name}_null_mean"], ds[f"{name}_null_sd"] = ((), 0.5), ((), 0.1)

    for i, text in enumerate(HOSTILE):
        every = dict.fromkeys(("title", "units", "formula", "null", "reference", "doc"), text)
        add(f"m{i}", ("layer", "head"), **every)
    add("pair", ("layer", "head", "head_b"))
    add("across", ("layer", "head", "layer_b", "head_b"))
    add("curve", ("layer", "head", "singular"))
    add("told", ("layer", "label"))
    ds = ds.assign_coords({AXIS: range(3)})
    add("odd", ("layer", "label", AXIS))
    add("odd_curve", ("layer", "head", AXIS))
    words = np.resize(names, (n, 2, n))
    ds["words"] = (("layer", "head", "rank"), words, describe("Words"))
    ds["kv_of_head"] = (("layer", "head"), np.tile([0, 0], (n, 1)))
    ds["valid"] = ("layer", [True] * (n - 1) + [False])
    ds["invalid_reason"] = ("layer", [""] * (n - 1) + [" ".join(HOSTILE)])
    whole = [*HOSTILE, "\ud800", "\udfff\ud800"]  # not in arrays: xarray refuses lone surrogates
    return ds.assign_attrs(
        headmix_format="1", model="a model", processing=HOSTILE[0], text=HOSTILE[1], seed="0",
        skipped=json.dumps({text: {text: text} for text in whole}),
        notes=json.dumps({HOSTILE[i]: whole for i in range(3)}),
        provenance=json.dumps({f"path {text}": text for text in whole}),
        versions=json.dumps({text: text for text in whole}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def page_file(ds, tmp_path_factory):
    return report(ds, tmp_path_factory.mktemp("page") / "page.html")


def intact(page) -> None:
    """Nothing has run, and there is nothing on the page that its own code does not make."""
    assert page.evaluate("window.pwned") is None
    foreign = (
        "img, iframe, object, embed, video, math, form:not(#search), base, plaintext, xss, textarea"
    )
    assert page.locator(f"body :is({foreign}):not(.plot *)").count() == 0
    assert page.locator(".plot a, a[href]:not([href^='#'])").count() == 0
    assert page.evaluate(
        "[...document.querySelectorAll('*')].flatMap((e) => [...e.attributes])"
        ".filter(({ name }) => name.startsWith('on')).length"
    ) == 0  # fmt: skip


def test_every_text_shows_as_it_is_and_does_nothing(visit, page_file, ds):
    page = visit(page_file)
    names = page.evaluate("[...DATA.layers]")
    assert names == HOSTILE
    assert page.evaluate("""DATA.layers.map((name, layer) => {
        choose({ layer, head: 1 });
        return byId("card-name").textContent === name + " H1";
    })""") == [True] * len(names)  # fmt: skip
    page.evaluate("choose({ layer: 0, head: 1 })")
    tokens = page.locator("#card bdi").all_text_contents()
    assert {*tokens} >= {SPACE.sub("␣", text) for text in HOSTILE}
    titles = page.locator("#overview select[data-state=map] option").all_text_contents()
    assert {*titles} >= {*HOSTILE}
    shown = page.locator("#labels select[data-state=label] option").all_text_contents()
    assert shown in ([], HOSTILE)
    for panel in ("overview", "depth", "pairs", "spectra", "across", "scatter", "graph", "labels"):
        page.locator(f"#{panel}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{panel}-plot[data-ready]")
        page.locator(f"#{panel} .twin summary").click()
    for i in range(0, len(HOSTILE), 20):
        page.select_option("#overview select[data-state=map]", f"m{i}")
        assert page.locator("#overview-caption").text_content().startswith(f"{HOSTILE[i]}:")
    page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    page.wait_for_timeout(300)
    intact(page)


def test_names_of_axes_and_curves_are_text_too(visit, page_file):
    layer = HOSTILE.index("%{x:.2f}<extra></extra>")
    page = visit(page_file)
    page.evaluate(f"choose({{ labelled: 'odd', spectrum: 'odd_curve', layer: {layer} }})")
    for panel, title in (("labels", AXIS), ("spectra", f"{AXIS} index")):
        page.locator(f"#{panel}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{panel}-plot[data-ready]")
        assert page.locator(f"#{panel}-plot .xtitle").text_content() == title
    intact(page)
    box = page.locator("#spectra-plot .nsewdrag").first.bounding_box()
    for step in range(1, 20):
        place = box["y"] + box["height"] * step / 20
        page.mouse.move(box["x"] + box["width"] / 2, place)
        page.wait_for_timeout(20)
        if page.locator("#spectra-plot .hovertext").count():
            break
    shown = page.locator("#spectra-plot .hovertext").first.text_content()
    assert shown.startswith(f"{HOSTILE[layer]} H")
    assert f" · {AXIS} 2" in shown
    intact(page)


def test_what_the_server_side_writes_is_text_too(visit, page_file):
    page = visit(page_file)
    read = "(s) => [...document.querySelectorAll(s)].map((e) => e.textContent)"
    # a parser of HTML turns NUL to U+FFFD or drops it, as it does with half a surrogate pair
    clean = str.maketrans("", "", "\0\ufffd?\n\t\r")
    for places in ("#provenance dd", "#left-out tbody tr td:last-child", "#glossary .formula"):
        told = [text.translate(clean) for text in page.evaluate(read, places)]
        for text in HOSTILE:
            assert any(text.translate(clean).strip() in entry for entry in told), (places, text)
    assert page.locator("#glossary details").count() == len(HOSTILE) + 7
    intact(page)


def test_hovering_and_saving_are_safe_too(visit, page_file):
    page = visit(page_file)
    page.locator("#overview").scroll_into_view_if_needed()
    page.wait_for_selector("#overview-plot[data-ready]")
    box = page.locator("#overview-plot .nsewdrag").first
    box.scroll_into_view_if_needed()
    rectangle = box.bounding_box()
    for step in range(8):
        page.mouse.move(
            rectangle["x"] + 40, rectangle["y"] + rectangle["height"] * (step + 0.5) / 8
        )
        page.wait_for_timeout(30)
    ticks = page.locator("#overview-plot .ytick text").all_text_contents()
    assert len(ticks) > 3
    for kind in ("svg", "png", "csv", "json"):
        with page.expect_download() as download:
            page.locator(f"button[data-of=overview][data-save={kind}]").click()
        content = Path(download.value.path()).read_bytes()
        assert len(content) > 1000
        if kind == "svg":
            svg = ElementTree.fromstring(content)  # whole and well-formed, whatever the text
            tags = {e.tag.split("}")[1] for e in svg.iter()}
            assert not tags & {"script", "a", "foreignObject", "iframe"}
        if kind == "json":
            assert json.loads(content)["rows"]
    intact(page)


def test_every_text_as_the_models_name_leaves_the_page_as_it_is(browser, monkeypatch):
    """Parsed one by one by the browser: nothing but the text differs from a harmless page."""
    monkeypatch.setattr("headmix.page._plotly", lambda: ("", "sha256-none"))  # 2 MB of no interest
    ds = every_shape()
    ds = ds.drop_vars([n for n in ds if str(n) != "projection_kernel" and "title" in ds[n].attrs])

    def page_of(model: str) -> str:
        return render(ds.assign_attrs(model=model))

    page = browser.new_context(offline=True).new_page()
    look = """(html) => {
        const sound = html.toWellFormed();
        const read = new DOMParser().parseFromString(sound, "text/html");
        const all = [...read.querySelectorAll("*")];
        const named = all.map((e) => e.tagName + [...e.attributes].map((a) => a.name).join());
        const model = JSON.parse(read.getElementById("data").textContent).model;
        return [named.join(" "), model, read.querySelector("h1").textContent];
    }"""
    harmless = page.evaluate(look, page_of("a harmless name"))
    assert harmless[1:] == ["a harmless name"] * 2
    for text in HOSTILE:
        elements, model, heading = page.evaluate(look, page_of(text))
        assert elements == harmless[0], text
        assert model == text
        assert heading == text.replace("\0", "") or "\0" in text or "\r" in text, text
    page.context.close()


def test_hostile_addresses_choose_nothing(visit, page_file):
    page = visit(page_file, f"#layer={quote(HOSTILE[0])}&head=1&map=m3")
    assert page.evaluate("[state.layer, state.head, state.map]") == [0, 1, "m3"]
    texts = ["" if text in (" ", "\t\n") else text for text in HOSTILE] + [
        "-1", "1e9", "0x1", "%", "%%%", "%E0%A4%A", "L1H1-L1H1", "a" * 100_000, "&&&==", "=",
        "layer=layer=layer", "[object Object]", "\ud800",
    ]  # fmt: skip
    followed = page.evaluate(
        """async (texts) => {
        const keys = ["layer", "head", "with", "metric", "map", "layers", "position", "__proto__"];
        const bad = [];
        const known = (wanted) => DATA.metrics.some(({ name }) => name === wanted);
        const both = (text) => [text, encodeURIComponent(text.toWellFormed())];
        for (const said of texts.flatMap(both)) {
            for (const key of keys) {
                history.replaceState(null, "", `#${key}=${said}`);
                readAddress();
                const good = DATA.layers[state.layer] !== undefined && [0, 1].includes(state.head)
                    && known(state.map) && (state.metric === null || known(state.metric));
                if (!good) bad.push([key, said.slice(0, 80)]);
            }
            render();
        }
        return bad;
    }""",
        texts,
    )
    assert followed == []
    assert page.evaluate("({}).polluted ?? Object.keys(Object.prototype).length") == 0
    page.wait_for_timeout(300)
    intact(page)


def test_the_policy_refuses_what_is_put_into_the_page(browser, page_file):
    """Were there a hole after all, the policy would still stand before it."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    refused, asked, stopped = [], [], []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(f"file://{page_file}")
    page.wait_for_selector("html[data-started]")
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: stopped.append((request.url, request.failure)))
    page.evaluate(f"""async () => {{
        const add = (tag, more) => {{
            const made = Object.assign(document.createElement(tag), more);
            document.body.append(made);
            return made;
        }};
        add("script", {{ textContent: "{RUN}" }});
        add("script", {{ src: "data:text/javascript,{RUN}" }});
        add("script", {{ src: URL.createObjectURL(new Blob(["{RUN}"])) }});
        add("div", {{ innerHTML: "<img src=x onerror='{RUN}'><svg onload='{RUN}'></svg>" }});
        add("a", {{ href: "javascript:{RUN}" }}).click();
        add("style", {{ textContent: "body {{ display: none }}" }});
        add("iframe", {{ srcdoc: "<script>parent.pwned=1</script>" }});
        add("form", {{ action: "https://evil.test" }}).submit();
        add("base", {{ href: "https://evil.test" }});
        add("link", {{ rel: "stylesheet", href: "https://evil.test/x.css" }});
        add("img", {{ src: "https://evil.test/x.png" }});
        await fetch("https://evil.test").catch(() => null);
        navigator.sendBeacon?.("https://evil.test");
        try {{ new WebSocket("wss://evil.test"); }} catch {{}}
        try {{ new Worker(URL.createObjectURL(new Blob(["{RUN}"]))); }} catch {{}}
    }}""")
    page.wait_for_timeout(300)
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("getComputedStyle(document.body).display") != "none"
    assert page.url == f"file://{page_file}"
    assert page.evaluate("document.baseURI").startswith("file:")
    by_policy = {url for url, why in stopped if why == "csp"}
    assert {url for url in asked if "evil.test" in url} <= by_policy  # refused before they left
    told = " ".join(refused)
    for directive in (
        "script-src",
        "style-src",
        "img-src",
        "default-src",
        "form-action",
        "base-uri",
    ):
        assert f'directive: "{directive}' in told or f'"{directive}' in told, directive
    context.close()
