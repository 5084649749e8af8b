"""A figure for every shape of result, with its null; driven by dims and attributes alone."""

import numpy as np
import pytest
from small import any_layer, every_shape, hostile, on_text

from headmix.plots import plot
from headmix.shapes import Measured, group_of, is_directed, metric_names, shape_of


@pytest.fixture(scope="module")
def ds():
    return every_shape()


SHAPES = {
    "projection_kernel": "matrix",
    "per_layer": "profile",
    "per_head": "map",
    "per_group": "map",
    "eigen": "layer_spectrum",
    "sigma": "spectrum",
    "cross": "cross",
    "words": "text",
    "surprise": "other",
    "told": "labelled",
    "read": "labelled",
    "seen": "labelled",
    "costs": "labelled",
}


def test_shapes_are_known_by_their_axes(ds):
    assert {n: shape_of(ds[n]) for n in metric_names(ds)} == SHAPES


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layer", [None, "L1", -1])
@pytest.mark.parametrize("head", [None, 1])
def test_every_shape_has_a_figure_for_every_choice(ds, name, layer, head):
    figure = plot(ds, name, layer=layer, head=head)
    assert figure.data
    assert ds[name].attrs["title"] in figure.layout.title.text
    figure.to_json()


def test_a_label_can_be_chosen(ds):
    cells = plot(ds, "read", label="place").data[0]
    assert np.array_equal(cells.z, ds.read.sel(label="place").values)
    assert list(cells.x) == ["concat", "attn_out", "resid_post"]
    with pytest.raises(ValueError, match="read has no label 'verb'; it has pos, place"):
        plot(ds, "read", label="verb")


def test_a_map_shows_the_values_centred_on_the_null(ds):
    cells = plot(ds, "projection_kernel", layer="L1").data[0]
    value = ds.projection_kernel.sel(layer="L1").values
    off = ~np.eye(len(value), dtype=bool)
    assert np.array_equal(cells.z[off], value[off])
    assert np.isnan(np.diag(cells.z)).all()  # a head with itself compares nothing
    null = 4 / 16  # d_head / d_model
    span = max(cells.zmax - null, null - cells.zmin)
    neutral = cells.colorscale[round(24 * (null - cells.zmin) / (cells.zmax - cells.zmin))][1]
    assert (cells.zmin, cells.zmax) == pytest.approx(
        (min(value[off].min(), null), value[off].max())
    )
    assert span == pytest.approx(value[off].max() - null)
    assert min(map(int, neutral[4:-1].split(","))) > 200  # pale, as in the middle of the scale


def test_without_a_layer_pairs_are_averaged_over_the_others(ds):
    figure = plot(ds, "projection_kernel")
    value = ds.projection_kernel.values
    others = (value.sum(-1) - 1) / (value.shape[-1] - 1)
    np.testing.assert_allclose(figure.data[0].z, others, rtol=1e-5)
    assert "mean over other heads" in figure.layout.title.text


def test_pairs_across_layers_show_the_strongest(ds):
    figure = plot(ds, "cross")
    np.testing.assert_array_equal(figure.data[0].z, ds.cross.max(("head", "head_b")))
    one = plot(ds, "cross", layer=0, head=2)
    np.testing.assert_array_equal(one.data[0].z, ds.cross[0, 2])


def test_a_profile_has_the_null_band(ds):
    low, high, line, value = plot(ds, "per_layer").data
    np.testing.assert_allclose(low.y, 0.3)
    np.testing.assert_allclose(high.y, 0.7)
    np.testing.assert_allclose(line.y, 0.5)
    np.testing.assert_array_equal(value.y, ds.per_layer)


def test_a_null_without_a_spread_is_a_line(ds):
    assert [t.name for t in plot(ds, "per_head", layer=0).data] == [
        "null mean",
        "Title of per_head",
    ]


def test_a_metric_without_a_null_draws_none(ds):
    assert plot(ds, "per_group").data[0].zmax is None  # nothing to centre on
    assert [t.name for t in plot(ds, "eigen", layer=0).data] == ["Title of eigen"]


def test_an_interval_is_drawn_as_whiskers_and_told_on_a_map():
    ds = on_text()
    for figure in (plot(ds, "layer_on_text"), plot(ds, "head_on_text", layer=1)):
        drawn = figure.data[-1]
        np.testing.assert_allclose(drawn.error_y.array, 0.03)
        np.testing.assert_allclose(drawn.error_y.arrayminus, 0.02)
        assert "interval: 95 %, over documents" in figure.layout.title.subtitle.text
    cells = plot(ds, "head_on_text").data[0]
    np.testing.assert_array_equal(cells.customdata[..., 1], ds.head_on_text_low)
    np.testing.assert_array_equal(cells.customdata[..., 2], ds.head_on_text_high)
    assert "low %{customdata[1]" in cells.hovertemplate
    assert plot(ds, "pair_on_text").data[0].customdata.shape[-1] == 1  # a mean has no interval
    assert plot(ds, "per_layer").data[-1].error_y.array is None


def test_axes_say_title_unit_and_range(ds):
    figure = plot(ds, "per_head", layer=0)
    assert figure.layout.yaxis.title.text == "Title of per_head [nat]"
    assert figure.layout.xaxis.title.text == "head"
    assert "range [0, 1]" in figure.layout.title.subtitle.text
    assert "null: flat" in figure.layout.title.subtitle.text


def test_z_null_counts_null_standard_deviations(ds):
    z = Measured.of(ds, "per_layer").z_null
    np.testing.assert_allclose(z, (ds.per_layer - 0.5) / 0.1)
    assert Measured.of(ds, "per_head").z_null is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "nothing"}, r"no metric 'nothing' in these results; there are projection_kern"),
        ({"metric": "d_head"}, r"no metric 'd_head'"),
        (
            {"metric": "per_head", "layer": "L9"},
            r"no layer 'L9' in these results; they have L0, L1",
        ),
        ({"metric": "per_head", "layer": 3}, r"no layer 3 in these results"),
        ({"metric": "per_head", "head": 4}, r"per_head has no head 4; it has \[0, 1, 2, 3\]"),
        ({"metric": "per_group", "head": 2}, r"per_group has no kv_head 2; it has \[0, 1\]"),
    ],
)
def test_errors_list_what_is_known(ds, arguments, message):
    with pytest.raises(ValueError, match=message):
        plot(ds, **arguments)


def test_text_from_the_data_is_never_markup():
    ds = hostile()
    for name in metric_names(ds):
        written = plot(ds, name).to_json()
        for tag in ("<img", "<script", "<a href", "\\u003cimg", "\\u003cscript", "\\u003ca href"):
            assert tag not in written


def test_a_pair_of_any_layers_has_no_direction_where_both_ends_give_the_same(ds):
    both = any_layer()
    assert is_directed(both.cross)
    assert not is_directed(both.alike)
    assert not is_directed(both.projection_kernel)
    assert group_of(both.alike) == "text"  # "joint" comes from text too
    blank = Measured.of(both, "alike").without_self().value
    own = np.eye(12, dtype=bool).reshape(3, 4, 3, 4)
    np.testing.assert_array_equal(np.isnan(blank), own)
    assert plot(both, "alike").data[0].zmax < 1  # a head with itself would be 2 and more


def test_layers_are_found_by_name_by_number_and_else_by_position(ds):
    upper = ds.sel(layer=["L1", "L2"])

    def shown(layer):
        return plot(upper, "per_head", layer=layer).layout.title.text

    assert "L1" in shown(1)
    assert "L1" in shown("1")
    assert "L1" in shown(0)
    assert "L2" in shown(-1)


@pytest.mark.parametrize("name", SHAPES)
def test_a_choice_of_layers_and_heads_is_drawn(ds, name):
    assert plot(ds.sel(layer=["L1"]), name).data
    assert plot(ds.isel(head=[0, 2]), name).data


def test_a_choice_of_heads_leaves_out_each_with_itself(ds):
    cells = plot(ds.isel(head=[2, 0]), "projection_kernel", layer="L1").data[0]
    assert np.isnan(cells.z[[0, 1], [2, 0]]).all()
    assert np.isnan(cells.z).sum() == 2
