"""Figures: one function per shape of result, never per metric; the null is always drawn."""

import textwrap

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import sample_colorscale

from headmix.shapes import UNITS, Measured, layer_name, metric_names, shape_of

#: Diverging: blue below the null, orange above, no colour at it; told apart in every common
#: colour blindness. Sequential: pale to blue, where there is no null to centre on.
SCALES = {
    "light": {
        "diverging": ["#123f73", "#2f6fae", "#86b4d8", "#f3f1ec", "#eeb07c", "#cf6a21", "#8a3a06"],
        "sequential": ["#f3f1ec", "#c3d7e8", "#86b4d8", "#2f6fae", "#123f73"],
    },
    "dark": {
        "diverging": ["#a5d0ff", "#5b9bdc", "#2f5f92", "#24272c", "#8f4f1f", "#d9803a", "#ffc894"],
        "sequential": ["#24272c", "#28486a", "#2f6fae", "#5b9bdc", "#a5d0ff"],
    },
}
INK, MUTED, GRID, ACCENT = "#1d2126", "#5f6670", "#e3e0d9", "#1f5f9c"
BAND = "rgba(120, 116, 106, 0.22)"
#: For curves of heads or layers in their order.
_ORDERED = "Cividis"
_LEGEND_BELOW = {"orientation": "h", "y": -0.24, "x": 0}

_LAYOUT = go.Layout(
    paper_bgcolor="#fdfcfa",
    plot_bgcolor="#fdfcfa",
    font={"family": "Inter, Helvetica Neue, Segoe UI, Arial, sans-serif", "size": 13, "color": INK},
    title={"x": 0, "xref": "paper", "font": {"size": 16}},
    margin={"l": 70, "r": 30, "t": 60, "b": 70},
    xaxis={
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": MUTED,
        "ticks": "outside",
        "title": {"font": {"size": 13}},
    },
    yaxis={
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": MUTED,
        "ticks": "outside",
        "title": {"font": {"size": 13}},
    },
    hoverlabel={"bgcolor": "#fdfcfa", "font": {"color": INK}},
)


def plot(
    ds: xr.Dataset,
    metric: str,
    layer: str | int | None = None,
    head: int | None = None,
    label: str | None = None,
) -> go.Figure:
    """Draw one metric of a Dataset from ``measure``, with its null.

    What is drawn follows from what is left after choosing: numbers along layers or heads are a
    profile, two such axes a map coloured by distance from the null, singular values and the like
    curves. Pairs are averaged over the other head where no layer is chosen; pairs of different
    layers show the strongest.

    Args:
        ds: from ``measure`` or ``open_results``.
        metric: the name of a variable.
        layer: a name, a number (5 is L5), or else a position.
        head: a head (or KV head, for metrics that count those).
        label: one of the labels that probes looked for.

    Raises:
        ValueError: no such metric, layer, head or label; the message lists those there are.
    """
    known = metric_names(ds)
    if metric not in known:
        raise ValueError(f"no metric {metric!r} in these results; there are {', '.join(known)}")
    chosen = Measured.of(ds, metric)
    where = []
    if layer is not None and "layer" in chosen.value.dims:
        name = layer_name(ds, layer)
        chosen, where = chosen.without_self().sel("layer", name), [name]
    unit = next((u for u in UNITS if u in chosen.value.dims), None)
    if head is not None and unit is not None:
        heads = chosen.value[unit].values.tolist()
        if head not in heads:
            raise ValueError(f"{metric} has no {unit} {head!r}; it has {heads}")
        chosen, where = chosen.without_self().sel(unit, head), [*where, f"{unit} {head}"]
    if label is not None and "label" in chosen.value.dims:
        labels = [str(name) for name in chosen.value.label.values]
        if label not in labels:
            raise ValueError(f"{metric} has no label {label!r}; it has {', '.join(labels)}")
        chosen, where = chosen.sel("label", label), [*where, label]
    if shape_of(ds[metric]) == "text":
        return _table(chosen.value, ds[metric].attrs, where)
    chosen, reduced = _to_two_axes(chosen)
    return _draw(chosen, ds[metric].attrs, where + reduced)


def _to_two_axes(chosen: Measured) -> tuple[Measured, list[str]]:
    """Reduce over axes until two are left; returns what was done, in words."""
    dims = [str(d) for d in chosen.value.dims]
    if len(dims) <= 2:
        return chosen.without_self(), []
    if "layer_b" in dims:
        over = tuple(d for d in dims if d in UNITS or d.removesuffix("_b") in UNITS)[
            2 - len(dims) :
        ]
        return chosen.without_self().reduce("max", over), [f"strongest over {_several(over)}"]
    if "label" in dims and "layer" in dims:
        return chosen.reduce("mean", ("layer",)), [f"mean over {_several(('layer',))}"]
    over = tuple(d for d in dims if d.endswith("_b")) or tuple(d for d in dims if d in UNITS)
    over = over or tuple(dims[: len(dims) - 2])
    reduced, words = chosen.without_self().reduce("mean", over), [f"mean over {_several(over)}"]
    further, more = _to_two_axes(reduced)
    return further, words + more


def _several(dims: tuple[str, ...]) -> str:
    return " and ".join(f"{_axis(d)}s" for d in dims)


def _draw(chosen: Measured, attrs: dict[str, str], where: list[str]) -> go.Figure:
    dims = [str(d) for d in chosen.value.dims]
    curve = next((d for d in dims if not _counts_parts(d)), None)
    if curve is not None:
        figure = _curves(chosen, curve, attrs)
    elif len(dims) == 2:
        figure = _map(chosen, attrs)
    else:
        figure = _profile(chosen, attrs)
    interval = ["interval: 95 %, over documents"] if chosen.low is not None else []
    return _titled(figure, attrs, where, _caption(attrs) + interval)


def _titled(
    figure: go.Figure, attrs: dict[str, str], where: list[str], lines: list[str]
) -> go.Figure:
    """Title, and under it the definition in as many lines as it needs."""
    title = " · ".join([f"<b>{_plain(attrs['title'])}</b>", *map(_plain, where)])
    subtitle = {"text": "<br>".join(map(_plain, lines)), "font": {"color": MUTED, "size": 11}}
    return figure.update_layout(_LAYOUT).update_layout(
        title={"text": title, "subtitle": subtitle, "y": 0.97, "yanchor": "top"},
        margin_t=56 + 15 * len(lines),
    )


def _counts_parts(dim: str) -> bool:
    return dim.removesuffix("_b") in ("layer", "label", "read_out", *UNITS)


def _map(chosen: Measured, attrs: dict[str, str]) -> go.Figure:
    """Two axes of parts: one cell each, coloured by the distance from the null."""
    rows, columns = chosen.value.dims
    hover = f"{_axis(rows)} %{{y}}, {_axis(columns)} %{{x}}<br>%{{z:.4g}}"
    beside: list[np.ndarray] = []
    known = {"null": chosen.mean, "low": chosen.low, "high": chosen.high}
    for name, part in known.items():
        if part is not None:
            hover += f"<br>{name} %{{customdata[{len(beside)}]:.4g}}"
            beside.append(part.values)
    cells = go.Heatmap(
        z=chosen.value.values,
        x=_labels(chosen.value[columns]),
        y=_labels(chosen.value[rows]),
        customdata=np.stack(beside, -1) if beside else None,
        **_colours(chosen),
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": _quantity(attrs), "side": "right"}, "outlinewidth": 0},
        hovertemplate=hover + "<extra></extra>",
    )
    figure = go.Figure(cells)
    figure.update_xaxes(title=_axis(columns), type="category", showgrid=False)
    figure.update_yaxes(title=_axis(rows), type="category", showgrid=False)
    if str(rows) != "layer":  # depth goes up, a matrix reads from the top
        figure.update_yaxes(autorange="reversed")
    return figure


def _colours(chosen: Measured) -> dict[str, object]:
    """A scale centred on the null, equally strong on both sides; the part in use is shown."""
    finite = chosen.value.values[np.isfinite(chosen.value.values)]
    if chosen.mean is None or not finite.size:
        return {"colorscale": SCALES["light"]["sequential"]}
    null = float(chosen.mean.mean())
    low, high = min(float(finite.min()), null), max(float(finite.max()), null)
    span = max(null - low, high - null) or 1.0
    part = np.linspace(0.5 + (low - null) / (2 * span), 0.5 + (high - null) / (2 * span), 25)
    scale = sample_colorscale(SCALES["light"]["diverging"], part.tolist())
    return {"colorscale": scale, "zmin": low, "zmax": high}


def _profile(chosen: Measured, attrs: dict[str, str]) -> go.Figure:
    """One number a layer or head with its interval, over the null's mean ± 2 sd."""
    dims = chosen.value.dims
    x = _labels(chosen.value[dims[0]]) if dims else [""]
    figure = go.Figure(_null(chosen, x))
    figure.add_scatter(
        x=x,
        y=chosen.value.values.reshape(-1),
        error_y=_whiskers(chosen),
        mode="lines+markers" if dims == ("layer",) else "markers",  # heads have no order
        name=_plain(attrs["title"]),
        line={"color": ACCENT},
        marker={"size": 8},
    )
    figure.update_layout(legend=_LEGEND_BELOW)
    figure.update_xaxes(title=_axis(dims[0]) if dims else "", type="category")
    figure.update_yaxes(title=_quantity(attrs))
    return figure


def _whiskers(chosen: Measured) -> dict[str, object] | None:
    """The interval as plotly takes it: distances from the value."""
    if chosen.low is None or chosen.high is None:
        return None
    value, low, high = (a.values.reshape(-1) for a in (chosen.value, chosen.low, chosen.high))
    ends = {"array": high - value, "arrayminus": value - low, "symmetric": False}
    return ends | {"type": "data", "color": ACCENT, "thickness": 1.5, "width": 3}


def _curves(chosen: Measured, along: str, attrs: dict[str, str]) -> go.Figure:
    """A curve for each layer or head over an axis of singular values or the like."""
    others = [d for d in chosen.value.dims if d != along]
    x = list(range(1, chosen.value.sizes[along] + 1))
    one_null = Measured(
        chosen.value,
        chosen.mean if chosen.mean is None else chosen.mean.mean(others),
        chosen.sd if chosen.sd is None else chosen.sd.mean(others),
    )
    figure = go.Figure(_null(one_null, x))
    curves = chosen.value.transpose(*others, along).values.reshape(-1, len(x))
    names = _labels(chosen.value[others[0]]) if others else [attrs["title"]]
    shades = sample_colorscale(_ORDERED, max(len(curves), 2)) if others else [ACCENT]
    for name, curve, shade in zip(names, curves, shades, strict=False):
        figure.add_scatter(x=x, y=curve, mode="lines", name=_plain(name), line={"color": shade})
    legend = _axis(others[0]) if others else ""
    figure.update_layout(legend={"title": {"text": legend}})
    figure.update_xaxes(title=_axis(along))
    figure.update_yaxes(title=_quantity(attrs))
    return figure


def _null(chosen: Measured, x: list[str] | list[int]) -> list[go.Scatter]:
    """The null as a dashed line, in a band of two standard deviations where these are known."""
    if chosen.mean is None:
        return []
    mean = chosen.mean.values.reshape(-1)
    line = go.Scatter(
        x=x, y=mean, mode="lines", name="null mean", line={"dash": "dash", "color": MUTED}
    )
    if chosen.sd is None:
        return [line]
    sd = chosen.sd.values.reshape(-1)
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        go.Scatter(x=x, y=mean - 2 * sd, showlegend=False, **edge),
        go.Scatter(
            x=x, y=mean + 2 * sd, fill="tonexty", fillcolor=BAND, name="null ± 2 sd", **edge
        ),
        line,
    ]


def _table(value: xr.DataArray, attrs: dict[str, str], where: list[str]) -> go.Figure:
    """Words: one row a layer and head, one column a rank."""
    header = [*(_axis(d) for d in value.dims), _plain(attrs["title"])]
    places = np.indices(value.shape).reshape(value.ndim, value.size)
    columns = [
        [_plain(label) for label in value[d].values[at]]
        for d, at in zip(value.dims, places, strict=True)
    ]
    columns.append([_plain(text) for text in value.values.ravel()])
    figure = go.Figure(go.Table(header={"values": header}, cells={"values": columns}))
    return _titled(figure, attrs, where, [])


def _caption(attrs: dict[str, str]) -> list[str]:
    definition = " · ".join(
        part
        for part in (attrs.get("formula"), attrs.get("range") and f"range {attrs['range']}")
        if part
    )
    null = f"null: {attrs['null']}" if attrs.get("null") else ""
    return textwrap.wrap(definition, 90) + textwrap.wrap(null, 90)


def _quantity(attrs: dict[str, str]) -> str:
    return _plain(attrs["title"] + (f" [{attrs['units']}]" if attrs.get("units") else ""))


def _axis(dim: object) -> str:
    """A dim's name as an axis says it: head_b → "other head"."""
    name = str(dim)
    name = f"other {name[:-2]}" if name.endswith("_b") else name
    return _plain(name.replace("kv_head", "KV head").replace("_", " "))


def _labels(coordinate: xr.DataArray) -> list[str]:
    return [_plain(label) for label in coordinate.values]


def _plain(text: object) -> str:
    """Text that plotly shows as it is; it takes a subset of HTML for markup."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
