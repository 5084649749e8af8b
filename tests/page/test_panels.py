"""Panels that set heads and pairs side by side: the table of pairs, the ordered matrix, the scatter
and the graph say what the Dataset says, and a click on any of them chooses."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform
from scipy.stats import norm, spearmanr
from small import describe, on_text, small_model
from test_browser import cells, scroll_to, select, settled
from test_download import saved, table

from headmix.measurement import measure
from headmix.page import ordering, report


@pytest.fixture(scope="module")
def ds():
    made = on_text()
    made["head_on_text"] = made.head_on_text.round(1)  # ties
    return made


@pytest.fixture(scope="module")
def page_file(ds, tmp_path_factory):
    return report(ds, tmp_path_factory.mktemp("panels") / "page.html")


@pytest.fixture(scope="module")
def many():
    """Twelve heads a layer, in three kinds."""
    made = measure(small_model(layers=2, heads=12), metrics=["projection_kernel"])
    kind = np.arange(12) % 3
    alike = np.where(kind[:, None] == kind, 0.8, 0.1) + np.random.default_rng(0).random((2, 12, 12))
    made.projection_kernel[:] = (alike + alike.mT) / 4
    return made


@pytest.fixture(scope="module")
def many_file(many, tmp_path_factory):
    return report(many, tmp_path_factory.mktemp("many") / "page.html")


@pytest.fixture(scope="module")
def groups():
    """Metrics of KV heads, of which the second layer has only one."""
    made = on_text()
    made.kv_of_head[1] = 0
    made.per_group[1, 1] = np.nan
    random = np.random.default_rng(6)
    pairs = random.random((3, 2, 2))
    pairs[1] = np.where(np.eye(2) * [1, 0], 1, np.nan)
    made["group_pairs"] = (("layer", "kv_head", "kv_head_b"), pairs, describe("Alike groups"))
    cross = random.random((3, 2, 3, 2))
    cross[~np.triu(np.ones((3, 3), bool), 1)[:, None, :, None].repeat(2, 1).repeat(2, 3)] = np.nan
    cross[1, 1] = cross[:, :, 1, 1] = np.nan
    about = describe("Group reads group")
    made["group_cross"] = (("layer", "kv_head", "layer_b", "kv_head_b"), cross, about)
    return made


@pytest.fixture(scope="module")
def groups_file(groups, tmp_path_factory):
    return report(groups, tmp_path_factory.mktemp("groups") / "page.html")


def names(page) -> list[str]:
    return page.locator("#joined-table tbody th").all_inner_texts()


def expected_names(pairs: np.ndarray, key: np.ndarray, layer: int) -> list[str]:
    """Pairs of a layer by a key, the largest first."""
    i, j = np.triu_indices(len(pairs), 1)
    order = np.argsort(-key[i, j], kind="stable")
    return [f"L{layer}H{i[k]} – L{layer}H{j[k]}" for k in order]


def point_at(page, panel: str, x: float, y: float) -> tuple[float, float]:
    """Where a point of a figure is on the screen."""
    return tuple(
        page.evaluate(
            """([id, x, y]) => {
              const plot = document.getElementById(`${id}-plot`);
              plot.scrollIntoView({ block: "center" });
              const { xaxis, yaxis } = plot._fullLayout;
              const { left, top } = plot.getBoundingClientRect();
              return [left + xaxis._offset + xaxis.l2p(x), top + yaxis._offset + yaxis.l2p(y)];
            }""",
            [panel, x, y],
        )
    )


def click_at(page, panel: str, x: float, y: float) -> None:
    page.wait_for_timeout(400)  # plotly takes two clicks within 300 ms for a double click
    place = point_at(page, panel, x, y)
    page.mouse.move(*place)
    page.wait_for_timeout(100)  # it chooses what it hovers, which it looks up now and then
    page.mouse.click(*place)


def test_pairs_are_sorted_by_a_click_on_a_column(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&matrix=pair_on_text")
    scroll_to(page, "pairs")
    pairs = ds.pair_on_text.sel(layer="L1").values
    assert names(page) == expected_names(pairs, np.abs(pairs - 0.5), 1)
    head = page.locator("#joined-table th", has_text="Title of pair_on_text")
    assert head.get_attribute("aria-sort") == "other"
    head.locator("button").click()
    assert names(page) == expected_names(pairs, pairs, 1)
    assert head.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")  # the focus stays on the head of the column
    assert names(page) == expected_names(pairs, -pairs, 1)
    assert head.get_attribute("aria-sort") == "ascending"
    other = page.locator("#joined-table th", has_text="Write-subspace overlap")
    other.locator("button").click()
    kernel = ds.projection_kernel.sel(layer="L1")
    mean = float(ds.projection_kernel_null_mean.sel(layer="L1").values.ravel()[0])
    assert names(page) == expected_names(kernel.values, np.abs(kernel.values - mean), 1)
    assert other.get_attribute("aria-sort") == "other"
    assert head.get_attribute("aria-sort") is None
    assert "sort=projection_kernel" in page.url


def test_pairs_are_filtered_by_head_layer_and_distance(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=2&matrix=pair_on_text&partner=head")
    scroll_to(page, "pairs")
    assert len(names(page)) == 3
    assert all("L1H2" in name for name in names(page))
    select(page, "partner", "any", "#joined")
    assert len(names(page)) == 6
    select(page, "span", "shown", "#joined")
    assert len(names(page)) == 18
    select(page, "least", "10", "#joined")
    z = (ds.pair_on_text.values - 0.5) / 0.01
    far = int((np.abs(z)[:, *np.triu_indices(4, 1)] >= 10).sum())
    assert 0 < far < 18
    assert len(names(page)) == far
    select(page, "from", "1", ".bar")
    assert len(names(page)) == int((np.abs(z)[1:, *np.triu_indices(4, 1)] >= 10).sum())


def test_a_row_of_the_table_chooses_its_pair(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=2&matrix=pair_on_text&tell=null")
    scroll_to(page, "pairs")
    row = page.locator("#joined-table tbody tr", has_text="L1H1 – L1H2")
    value = float(ds.pair_on_text.sel(layer="L1")[1, 2])
    told = row.locator("td").first.inner_text()
    assert told.split("\n")[0] == f"{value:.3g}"
    assert re.search(r"null 0\.50+ ± 0\.010+\n", told)
    assert f"z {(value - 0.5) / 0.01:.3g}".replace("-", "−") in told
    row.locator("td").first.click()
    settled(page, "location.hash.includes('with=L1H1')")
    assert page.locator("#card-name").inner_text() == "L1H2"  # the chosen head stays the first
    assert row.get_attribute("aria-current") == "true"
    assert page.locator("#joined-table [aria-current]").count() == 1
    page.locator("#joined-table button", has_text="L1H0 – L1H3").focus()
    page.keyboard.press("Enter")
    settled(page, "location.hash.includes('with=L1H3')")
    assert page.locator("#card-name").inner_text() == "L1H0"
    for panel in ("overview", "pairs"):
        scroll_to(page, panel)
        dash = f"document.getElementById('{panel}-plot').layout.shapes.map((s) => s.line.dash)"
        settled(page, f"{dash}.includes('dot') && {dash}.includes('solid')")


def test_the_table_of_pairs_is_saved_whole(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&matrix=pair_on_text&sort=pair&span=shown")
    scroll_to(page, "pairs")
    name, content = saved(page, "joined", "csv")
    assert name.startswith("headmix-small-pairs")
    rows = table(content)
    assert len(rows) == 18
    for row in rows:
        at = {"layer": row["layer"], "head": int(row["head"]), "head_b": int(row["head_b"])}
        for metric in ("pair_on_text", "projection_kernel"):
            assert float(row[metric]) == pytest.approx(float(ds[metric].sel(at)), rel=1e-5)
        value = float(ds.pair_on_text.sel(at))
        assert float(row["pair_on_text_low"]) == pytest.approx(value - 0.02, rel=1e-4)
        z = (value - 0.5) / 0.01
        assert float(row["pair_on_text_z"]) == pytest.approx(z, rel=1e-4, abs=1e-3)


def test_both_orders_of_a_pair_are_saved_where_they_differ(visit, ds, tmp_path):
    one_way = ds.pair_on_text.copy()
    one_way.values = np.random.default_rng(5).random(one_way.shape)
    one_way[1, 0, 3] = one_way[1, 3, 0]
    ends = {f"pair_on_text_{end}": one_way + by for end, by in (("low", -0.02), ("high", 0.03))}
    made = report(ds.assign(pair_on_text=one_way, **ends), tmp_path / "page.html")
    page = visit(made, "#layer=L1&matrix=pair_on_text")
    scroll_to(page, "pairs")
    told = json.loads(saved(page, "joined", "json")[1])
    rows = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    assert len(rows) == 6
    assert "projection_kernel_back" not in told["columns"]  # the same either way
    for row in rows:
        i, j = row["head"], row["head_b"]
        for column, value in (("", one_way[1, i, j]), ("_back", one_way[1, j, i])):
            assert row[f"pair_on_text{column}"] == pytest.approx(float(value), rel=1e-6)
            assert row[f"pair_on_text{column}_low"] == pytest.approx(float(value) - 0.02, rel=1e-5)
            assert row[f"pair_on_text{column}_null_mean"] == 0.5


def test_scatter_and_graph_are_saved_as_shown(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&x=head_on_text&y=seen&label=1&beyond=20")
    scroll_to(page, "graph")
    rows = table(saved(page, "graph", "csv")[1])
    assert len(rows) == (ds.cross.values >= 0.25 + 20 * 0.02).sum()
    for row in rows:
        at = {"layer": row["layer"], "head": int(row["head"])}
        at |= {"layer_b": row["layer_b"], "head_b": int(row["head_b"])}
        assert float(row["cross"]) == pytest.approx(float(ds.cross.sel(at)), rel=1e-5)
    told = json.loads(saved(page, "scatter", "json")[1])
    assert told["selection"] | {"label": "1", "x": "head_on_text"} == told["selection"]
    shown = {(row[0], row[1]): row[2:4] for row in told["rows"]}
    for (layer, head), (x, y) in shown.items():
        at = {"layer": layer, "head": head}
        assert x == pytest.approx(float(ds.head_on_text.sel(at)), rel=1e-5)
        assert y == pytest.approx(float(ds.seen.sel(at | {"label": "place"})), rel=1e-5)
    assert len(shown) == 12
    for panel in ("scatter", "graph"):
        assert b"<svg" in saved(page, panel, "svg")[1]


def test_a_long_table_comes_in_pages(visit, many_file):
    page = visit(many_file, "#layer=L1&span=shown")
    scroll_to(page, "pairs")
    first = names(page)
    assert len(first) == 100
    assert "132 pairs, 1 – 100" in page.locator("#joined-caption").inner_text()
    page.get_by_role("button", name="More").click()
    assert len(names(page)) == 32
    assert {*first, *names(page)} == {
        f"L{n}H{i} – L{n}H{j}" for n in range(2) for i in range(12) for j in range(i + 1, 12)
    }


def by_scipy(distance: np.ndarray) -> list[int]:
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    return leaves_list(tree).tolist()


def test_the_matrix_is_ordered_by_clustering(visit, many_file, many):
    page = visit(many_file, "#layer=L1&head=0&order=likeness")
    scroll_to(page, "pairs")
    pairs = many.projection_kernel.sel(layer="L1").values
    apart = pairs.max(initial=0, where=~np.eye(12, dtype=bool)) - pairs
    np.fill_diagonal(apart, 0)
    order = by_scipy(apart)
    kinds = [h % 3 for h in order]
    assert sum(a != b for a, b in pairwise(kinds)) == 2  # each kind together
    shown = page.evaluate("document.getElementById('pairs-plot').layout.yaxis.ticktext")
    assert shown == [str(h) for h in order]
    assert cells(page, "pairs")[2][5] == pytest.approx(pairs[order[2], order[5]], rel=1e-6)
    click_at(page, "pairs", 5, 2)
    settled(page, f"location.hash.includes('with=L1H{order[5]}')")
    assert page.locator("#card-name").inner_text() == f"L1H{order[2]}"
    select(page, "order", "number", "#pairs")
    settled(page, "document.getElementById('pairs-plot').layout.yaxis.ticktext[3] === '3'")


def as_metric(pairs: np.ndarray) -> xr.DataArray:
    return xr.DataArray(pairs[None], dims=("layer", "head", "head_b"))


@pytest.fixture
def pairs():
    random = np.random.default_rng(3).random((7, 7))
    return (random + random.T) / 2


@pytest.mark.parametrize("kind", ["likeness", "signed", "divergence"])
def test_order_by_likeness_is_that_of_scipy(pairs, kind):
    own = {"likeness": 1.0, "signed": 1.0, "divergence": 0.0}[kind]
    pairs = pairs - 0.5 if kind == "signed" else pairs
    np.fill_diagonal(pairs, own)
    apart = {"likeness": 2 - pairs, "signed": 2 - np.abs(pairs), "divergence": pairs}[kind]
    np.fill_diagonal(apart, 0)
    found = ordering.distances(pairs, ordering.diverges(as_metric(pairs)))
    off = ~np.eye(7, dtype=bool)
    assert np.allclose(found[off] - found[off].min(), apart[off] - apart[off].min())
    assert ordering.by_likeness(as_metric(pairs)) == [by_scipy(found)]


def test_what_replacing_two_heads_does_is_no_divergence(pairs):
    np.fill_diagonal(pairs, 0)
    replaced = as_metric(pairs).assign_attrs(needs="effects")
    assert ordering.diverges(as_metric(pairs))
    assert not ordering.diverges(replaced)
    order = by_scipy(np.where(np.eye(7, dtype=bool), 0, pairs.max() - pairs))
    assert ordering.by_likeness(replaced) == [order]
    pairs[3] = pairs[:, 3] = np.nan  # a head without numbers
    assert ordering.diverges(as_metric(pairs))
    assert not ordering.diverges(as_metric(np.full((7, 7), np.nan)))


def test_order_copes_with_direction_and_with_what_was_not_measured(pairs):
    one_way = np.triu(pairs, 1) * 2
    assert np.allclose(ordering.distances(one_way, False), ordering.distances(one_way.T, False))
    pairs[3] = pairs[:, 3] = np.nan
    pairs[0, 1] = pairs[1, 0] = np.nan
    (found,) = ordering.by_likeness(as_metric(pairs))
    assert sorted(found) == [*range(7)]
    assert found[-1] == 3
    assert ordering.by_likeness(as_metric(np.full((7, 7), np.nan))) == [[*range(7)]]
    assert ordering.by_likeness(as_metric(pairs[:2, :2])) is None


def test_the_scatter_tells_rank_correlation_and_chooses(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=2&x=head_on_text&y=seen&label=1")
    scroll_to(page, "scatter")
    x, y = ds.head_on_text.values, ds.seen.sel(label="place").values
    caption = page.locator("#scatter-caption").inner_text()
    rho = spearmanr(x.ravel(), y.ravel()).statistic
    assert f"(Spearman) {rho:.2f}".replace("-", "−") in caption
    assert "n = 12 heads" in caption
    assert "not independent" in caption
    dashed = "document.getElementById('scatter-plot').layout.shapes.filter((s) => s.type == 'line')"
    assert page.evaluate(f"{dashed}.map((s) => s.x0)[0]") == pytest.approx(0.5)
    click_at(page, "scatter", x[2, 1], y[2, 1])
    settled(page, "document.getElementById('card-name').textContent === 'L2H1'")
    select(page, "x", "projection_kernel", "#scatter")
    select(page, "reduce", "max", "#scatter")
    kernel = ds.projection_kernel.values - 2 * np.eye(4)
    rho = spearmanr(kernel.max(-1).ravel(), y.ravel()).statistic
    settled(
        page,
        "document.getElementById('scatter-caption').textContent.includes("
        f"'(Spearman) {rho:.2f}'.replace('-', '−'))",
    )
    select(page, "from", "1", ".bar")
    settled(page, "document.getElementById('scatter-caption').textContent.includes('n = 8 heads')")


def test_the_scatter_counts_only_heads_that_have_both(visit, ds, tmp_path):
    y = ds.seen.sel(label="pos").values
    x = ds.per_head.where(ds.layer != "L1")
    page = visit(report(ds.assign(per_head=x), tmp_path / "page.html"), "#x=per_head&y=seen")
    scroll_to(page, "scatter")
    caption = page.locator("#scatter-caption").inner_text()
    rho = spearmanr(x.values[[0, 2]].ravel(), y[[0, 2]].ravel()).statistic
    assert f"{rho:.2f} over n = 8 heads, of 12, that have both".replace("-", "−") in caption


def test_a_cell_without_a_null_of_its_own_is_blank(visit, ds, tmp_path):
    null = ds.per_head * 0 + np.linspace(0.2, 0.6, 12).reshape(3, 4)
    null[1, 2] = np.nan
    ds = ds.assign(per_head_null_mean=null, per_head_null_sd=null * 0 + 0.1)
    page = visit(report(ds, tmp_path / "page.html"), "#map=per_head")
    scroll_to(page, "overview")
    expected = np.array(ds.per_head - null)
    expected[~np.isfinite(expected)] = np.nan
    assert np.allclose(np.array(cells(page, "overview"), float), expected, equal_nan=True)
    assert np.isnan(expected).sum() == 1
    assert "without a null are blank" in page.locator("#overview-caption").inner_text()
    value = f"{float(ds.per_head[1, 2]):.4g}"
    page.locator("#overview .twin summary").click()
    assert value in page.locator("#overview-table").inner_text()


def edges(page) -> int:
    middles = "(t) => t.customdata?.[0]?.pair"
    found = f"document.getElementById('graph-plot').data.filter({middles})"
    return page.evaluate(f"{found}.reduce((n, t) => n + t.x.length, 0)")


def test_the_graph_has_the_edges_beyond_the_threshold(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=0&beyond=20")
    scroll_to(page, "graph")
    z = (ds.cross.values - 0.25) / 0.02
    assert 0 < (z >= 20).sum() < np.isfinite(z).sum() == 48
    assert edges(page) == (z >= 20).sum()
    caption = page.locator("#graph-caption").inner_text()
    assert f"{(z >= 20).sum()} of 48 pairs" in caption
    assert "fewer than one" in caption
    select(page, "beyond", "2", "#graph")
    settled(
        page, f"document.getElementById('graph-caption').textContent.includes('{'at least 2'}')"
    )
    assert edges(page) == (z >= 2).sum()
    said = re.search(r"about ([\d.]+) of", page.locator("#graph-caption").inner_text())
    assert float(said[1]) == pytest.approx(48 * norm.sf(2), rel=0.05)
    select(page, "edges", "head", "#graph")
    own = (z[1, 0] >= 2).sum() + (z[..., 1, 0] >= 2).sum()
    settled(page, "document.getElementById('graph-caption').textContent.includes('L1H0 writes')")
    assert edges(page) == own


def test_nodes_and_edges_of_the_graph_choose(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&head=0&beyond=20")
    scroll_to(page, "graph")
    click_at(page, "graph", 3, 2)
    settled(page, "document.getElementById('card-name').textContent === 'L2H3'")
    ring = "document.getElementById('graph-plot').data.at(-1)"
    settled(page, f"{ring}.x[0] === 3 && {ring}.y[0] === 2")  # drawn anew
    i, h, j, k = np.unravel_index(np.nanargmax(ds.cross.values), ds.cross.shape)
    middle = page.evaluate(
        """([i, h, j, k]) => {
          for (const trace of document.getElementById("graph-plot").data) {
            const at = (trace.customdata ?? []).findIndex(({ pair }) => pair && pair.layer === i
              && pair.head === h && pair.layer_b === j && pair.head_b === k);
            if (at >= 0) return [trace.x[at], trace.y[at]];
          }
        }""",
        [int(n) for n in (i, h, j, k)],
    )
    click_at(page, "graph", *middle)
    settled(page, f"location.hash.includes('with=L{j}H{k}')")
    assert page.locator("#card-name").inner_text() == f"L{i}H{h}"


def test_no_more_edges_than_can_be_told_apart(visit, ds, tmp_path):
    L, H = 4, 6
    random = np.random.default_rng(4).normal(size=(L, H, L, H)) * 0.06 + 0.3
    random[~np.triu(np.ones((L, L), bool), 1)[:, None, :, None].repeat(H, 1).repeat(H, 3)] = np.nan
    big = measure(small_model(layers=L, heads=H), metrics=["projection_kernel"])
    big["cross"] = (("layer", "head", "layer_b", "head_b"), random, ds.cross.attrs)
    big["cross_null_mean"], big["cross_null_sd"] = 0.25, 0.02
    page = visit(report(big.assign_coords(layer_b=big.layer.values), tmp_path / "page.html"))
    scroll_to(page, "graph")
    assert 40 <= edges(page) <= 60
    limit = re.search(r"at least ([\d.]+) null sd", page.locator("#graph-caption").inner_text())
    assert edges(page) == ((random - 0.25) / 0.02 >= float(limit[1])).sum()


def test_choices_of_the_panels_are_in_the_address(visit, page_file):
    chosen = {
        "span": "shown", "partner": "head", "tell": "z", "least": "3", "order": "likeness",
        "x": "seen", "y": "per_head", "edges": "head", "beyond": "5",
    }  # fmt: skip
    said = "&".join(f"{name}={value}" for name, value in chosen.items())
    page = visit(page_file, f"#layer=L1&head=2&with=L1H3&matrix=projection_kernel&{said}")
    for name, value in chosen.items():
        assert page.locator(f"select[data-state={name}]").first.input_value() == value
    select(page, "tell", "null", "#joined")
    del chosen["tell"]
    for name, value in chosen.items():
        assert f"{name}={value}" in page.url


def test_layers_not_shown_are_in_no_panel(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&layers=L1-L2")
    for panel in ("overview", "labels", "across"):
        scroll_to(page, panel)
        assert len(cells(page, panel)) == 2
    scroll_to(page, "overview")
    assert page.evaluate("document.getElementById('overview-plot').layout.yaxis.ticktext") == [
        "L1",
        "L2",
    ]
    click_at(page, "overview", 1, 1)
    settled(page, "document.getElementById('card-name').textContent === 'L2H1'")
    scroll_to(page, "graph")
    assert "of 16 pairs" in page.locator("#graph-caption").inner_text()


def test_labels_along_x_do_not_overlap(visit, many_file):
    page = visit(many_file, width=330)
    scroll_to(page, "pairs")
    boxes = [b.bounding_box() for b in page.locator("#pairs-plot .xtick text").all()]
    assert len(boxes) >= 4
    for left, right in pairwise(boxes):
        assert left["x"] + left["width"] <= right["x"]


def test_the_chosen_label_is_told_in_a_line_a_layer(visit, page_file, ds):
    page = visit(page_file, "#layer=L1&label=1")
    scroll_to(page, "labels")
    told = page.locator("#labels-of")
    assert told.locator("h3").inner_text() == "place"
    most = ds.seen.sel(label="place", layer="L1").values
    row = told.locator("tbody tr").nth(1).inner_text()
    assert f"L1H{most.argmax()} {most.max():.3g}" in row
    assert f"{float(ds.told.sel(label='place', layer='L1')):.3g}" in row


def test_the_closest_by_a_divergence_are_those_least_apart(visit, ds, tmp_path):
    random = np.random.default_rng(5).random((3, 4, 4))
    apart = (random + random.mT) / 4 + 0.1
    apart[:, *np.diag_indices(4)] = 0
    made = ds.assign(pair_on_text=ds.pair_on_text.copy(data=apart))
    chosen = "#layer=L1&head=2&map=pair_on_text&over=max&x=pair_on_text&y=seen&reduce=max"
    page = visit(report(made, tmp_path / "page.html"), chosen)
    of_others = np.where(np.eye(4, dtype=bool), np.inf, apart)
    nearest = page.locator("#card section", has_text="Nearest by title of pair_on_text")
    order = np.argsort(of_others[1, 2])[:3]
    assert [t.inner_text() for t in nearest.locator("tbody th .place").all()] == [
        f"L1H{head}" for head in order
    ]
    scroll_to(page, "overview")
    assert np.allclose(cells(page, "overview"), of_others.min(-1), rtol=1e-5)
    assert "its closest pair" in page.locator("#overview-caption").inner_text()
    assert "closest of several lies below it" in page.locator("#overview-gauge").inner_text()
    for name in ("over", "reduce"):
        option = page.locator(f"select[data-state={name}] option[value=max]").first
        assert option.inner_text() == "closest"
    scroll_to(page, "scatter")
    assert "(closest pair)" in page.locator("#scatter-caption").inner_text()


def test_a_kv_head_that_a_layer_lacks_is_nowhere(visit, groups_file, groups):
    page = visit(groups_file, "#layer=L1&head=0&map=per_group&matrix=group_pairs&graph=group_cross")
    scroll_to(page, "overview")
    shown = cells(page, "overview")
    value = groups.per_group.values
    assert shown[1][1] is None
    assert np.allclose([shown[0], shown[2]], value[[0, 2]], rtol=1e-5)
    assert shown[1][0] == pytest.approx(value[1, 0], rel=1e-5)
    rows = table(saved(page, "overview", "csv")[1])
    assert {(row["layer"], row["kv_head"]) for row in rows} == {
        (f"L{layer}", str(kv)) for layer in range(3) for kv in range(2)
    } - {("L1", "1")}
    scroll_to(page, "pairs")
    assert page.evaluate("document.getElementById('pairs-plot').layout.yaxis.ticktext") == ["0"]
    select(page, "span", "shown", "#joined")
    assert sorted(names(page)) == ["L0KV0 – L0KV1", "L2KV0 – L2KV1"]
    scroll_to(page, "graph")
    dots = "document.getElementById('graph-plot').data.filter((t) => t.customdata?.[0]?.layer >= 0)"
    assert page.evaluate(f"{dots}[0].x.length") == 5


def test_two_heads_of_a_group_are_no_pair_of_groups(visit, groups_file):
    page = visit(groups_file, "#layer=L0&head=0&with=L0H1&cross=group_cross&graph=group_cross")
    ringed = "document.getElementById('across-plot').layout.shapes.length"
    thick = "document.getElementById('graph-plot').data.some((t) => t.name === 'the chosen pair')"
    current = page.locator("#across-strongest [aria-current]")
    scroll_to(page, "across")
    assert (page.evaluate(ringed), current.count()) == (0, 0)
    scroll_to(page, "graph")
    assert not page.evaluate(thick)
    page.locator("#across-strongest .with").first.click()
    settled(page, f"{thick} && {ringed} === 1")
    assert current.count() == 1
