"""Where attention layers keep their projections: naming patterns, head orders, layer names.

Everything here works on the *shapes* of a model's weight matrices by path, so that a live module
and a checkpoint nobody has built are read by the same rules. What a pattern claims about heads is
only a claim until the two laws (``headmix.laws``) have held.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

#: Names of separate query, key and value projections inside one module.
SEPARATE = tuple(
    tuple(names.split())
    for names in (
        "q_proj k_proj v_proj",
        "query key value",
        "q k v",
        "query_proj key_proj value_proj",
        "q_lin k_lin v_lin",
        "linear_q linear_k linear_v",
        "q_linear k_linear v_linear",
        "Wq Wk Wv",
        "wq wk wv",
        "q_head k_head v_head",
        "project_q project_k project_v",
        "to_q to_k to_v",
    )
)

#: Names of fused projections, and the order of features that such a name usually stands for.
FUSED = {
    "qkv_proj": "thirds",
    "c_attn": "thirds",
    "Wqkv": "thirds",
    "qkv": "thirds",
    "att_proj": "thirds",
    "W_pack": "thirds",
    "query_key_value": "grouped",
    "in_proj": "grouped",
    "in_proj_weight": "thirds",  # of nn.MultiheadAttention, in a checkpoint
}

#: Names of the output projection: beside the value projection, or one level up.
OUTPUT = (
    "o_proj", "out_proj", "c_proj", "proj", "o", "dense", "Wo", "wo", "out_lin", "linear_out",
    "projection", "projection_layer", "output_proj", "attention_out", "post_proj", "to_out",
    "to_out.0", "post", "output", "output.dense",
)  # fmt: skip

#: Model types whose fused projection is not in the order its name usually stands for.
ORDER_OF = {"codegen": "codegen", "gpt_bigcode": "grouped"}

#: Attributes and config fields that hold the number of query heads, most specific first.
HEAD_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_head",
    "attention_heads", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip

_CROSS = re.compile(r"cross|enc_?dec_?att|encoder_attn|encoder_attention|encoder_decoder")

#: Looks up the first of several attribute or config names for the module at a path.
Lookup = Callable[[str, Iterable[str]], int | None]


class UnknownLayout(ValueError):
    """No attention layer was recognised; the message lists what was looked for and seen."""


@dataclass(frozen=True)
class Layout:
    """Where one kind of attention module keeps its projections, by name relative to itself.

    For a hand-built module one line is enough::

        hm.load(model, layout=hm.Layout(o="mix", v="value", q="query", k="key", n_heads=4))

    Every module with children of these names is then read as an attention layer.

    Attributes:
        o: the output projection; a path such as "output.dense" may go deeper.
        v: the value projection, or the fused one (then leave out q and k).
        q: the query projection.
        k: the key projection.
        order: how a fused projection arranges its output features:
            "separate": it is not fused; "thirds": all queries, all keys, all values;
            "grouped": for each KV head its queries, then its key and its value;
            "key_value": all keys, then all values; "latent": for each head the keys' part, then
            the values (multi-head latent attention); "codegen": thirds as q, v, k in four shards.
        n_heads: the number of query heads; looked up in the module and its config when None.
        kv_of_head: the KV head that each query head uses, for example ``(0, 1, 0, 1)``; by default
            consecutive query heads share one.
    """

    o: str
    v: str
    q: str | None = None
    k: str | None = None
    order: str = "separate"
    n_heads: int | None = None
    kv_of_head: tuple[int, ...] | None = None

    @property
    def fused(self) -> bool:
        return self.order not in ("separate", "latent")

    def __str__(self) -> str:
        names = [n for n in (self.q, self.k, self.v) if n]
        order = "" if self.order == "separate" else f" ({self.order})"
        return f"{', '.join(dict.fromkeys(names))}{order} → {self.o}"


@dataclass(frozen=True, eq=False)
class Projection:
    """One projection's weight by path, and which of its features belong to which head."""

    path: str
    features: Int[Tensor, "head feature"]


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention layer: its name, and where each projection of each head is.

    ``call`` counts the calls of one module within a forward pass, where layers share it.
    """

    name: str
    path: str
    layout: Layout
    o: Projection
    v: Projection
    q: Projection | None = None
    k: Projection | None = None
    cross: bool = False
    call: int = 0

    @property
    def n_heads(self) -> int:
        return self.o.features.shape[0]

    @property
    def n_kv_heads(self) -> int:
        return self.v.features.shape[0]

    @property
    def kv_of_head(self) -> tuple[int, ...]:
        H, KV = self.n_heads, self.n_kv_heads
        return self.layout.kv_of_head or tuple(h * KV // H for h in range(H))


Shapes = Mapping[str, tuple[int, int]]


def find_attention(
    shapes: Shapes,
    lookup: Lookup,
    *,
    layout: Layout | None = None,
    model_type: str = "",
    order: str | None = None,
) -> list[Attention]:
    """Recognise the attention layers of a model from the shapes of its weight matrices.

    Args:
        shapes: (out features, in features) of every weight matrix, by module path, in order.
        lookup: finds the number of heads for a path.
        layout: the only layout to look for; by default all known names.
        model_type: as in a transformers config; settles the order of some fused projections.
        order: the order to try for every fused projection, in place of the usual one.

    Raises:
        UnknownLayout: nothing was recognised.
    """
    rows = list(_named(shapes, layout) if layout else _recognised(shapes, model_type, order))
    found, refused = [], []
    for path, row in rows:
        try:
            found.append(_attention(path, row, shapes, lookup))
        except UnknownLayout as reason:
            refused.append(str(reason))
    if not found:
        looked = f"a module with children {layout}" if layout else "projections of known names"
        seen = sorted({p.rsplit(".", 1)[-1] for p in shapes})
        raise UnknownLayout(
            f"no attention layer recognised: looked for {looked}; "
            + (f"refused: {'; '.join(refused[:3])}. " if refused else "")
            + f"Weight matrices seen are named {', '.join(seen[:40]) or '(none)'}. "
            "Name yours in one line: layout=headmix.Layout(o=..., v=..., q=..., k=..., n_heads=...)"
        )
    return _unrolled(name_layers(found), lookup)


def _join(*parts: str) -> str:
    return ".".join(p for p in parts if p)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _named(shapes: Shapes, layout: Layout) -> Iterable[tuple[str, Layout]]:
    """Every module that has all the children a layout names."""
    names = {n for n in (layout.o, layout.v, layout.q, layout.k) if n}
    for path in shapes:
        if path == layout.v or path.endswith("." + layout.v):
            home = path[: -len(layout.v)].rstrip(".")
            if all(_join(home, n) in shapes for n in names):
                yield home, layout


def _recognised(shapes: Shapes, model_type: str, order: str | None) -> Iterable[tuple[str, Layout]]:
    """Every module whose children have names in the tables above."""
    taken: set[str] = set()
    for path in shapes:
        home, _, name = path.rpartition(".")
        row = _row_for(home, name, shapes, model_type)
        if row is None:
            continue
        if order and row.fused:
            row = replace(row, order=order)
        for up in (home, _parent(home)) if home else ("",):
            output = next((o for o in OUTPUT if _output_fits(_join(up, o), path, shapes)), None)
            if output is not None and _join(up, output) not in taken:
                inner = home[len(up) :].lstrip(".")
                taken.add(_join(up, output))
                q, k = (n and _join(inner, n) for n in (row.q, row.k))
                yield up, replace(row, o=output, v=_join(inner, row.v), q=q, k=k)
                break


def _output_fits(output: str, value: str, shapes: Shapes) -> bool:
    return output in shapes and output != value


def _row_for(home: str, name: str, shapes: Shapes, model_type: str) -> Layout | None:
    if name == "kv_b_proj":
        return Layout(o="", v=name, order="latent")
    for q, k, v in SEPARATE:
        if name == v and _join(home, k) in shapes:
            has_q = _join(home, q) in shapes
            return Layout(o="", v=v, q=q if has_q else None, k=k)
    if name in FUSED:
        if name == "c_attn" and _join(home, "q_attn") in shapes:
            return Layout(o="", v=name, q="q_attn", k=name, order="key_value")
        return Layout(o="", v=name, order=ORDER_OF.get(model_type, FUSED[name]))
    return None


def _attention(path: str, row: Layout, shapes: Shapes, lookup: Lookup) -> Attention:
    """Divide the features of one recognised module among its heads."""
    o, v = _join(path, row.o), _join(path, row.v)
    concat, out = shapes[o][1], shapes[v][0]
    n_heads = row.n_heads or lookup(v, HEAD_COUNTS)
    if not n_heads or concat % n_heads:
        raise UnknownLayout(
            f"{path or 'the module'}: {o} takes {concat} features, which do not divide among "
            f"{n_heads} heads; pass layout=headmix.Layout(o={row.o!r}, v={row.v!r}, n_heads=...)"
        )
    d = concat // n_heads
    qk = {p: (_join(path, n), shapes[_join(path, n)][0]) for p in "qk" if (n := getattr(row, p))}
    features = _features(row.order, n_heads, d, out, {p: size for p, (_, size) in qk.items()})
    if features is None:
        raise UnknownLayout(
            f"{path or 'the module'}: {v} has {out} features, which do not hold the "
            f"{row.order} projections of {n_heads} heads of width {d}"
        )
    if "q" in features and "k" in features and features["q"].shape[1] != features["k"].shape[1]:
        features = {"v": features["v"]}  # the query projection holds more than queries (a gate)
    fused = dict.fromkeys("qk", (v, out)) | qk
    q, k = (Projection(fused[p][0], features[p]) if p in features else None for p in "qk")
    whole = torch.arange(concat).reshape(n_heads, d)
    return Attention(
        name=path,
        path=path,
        layout=row,
        o=Projection(o, whole),
        v=Projection(v, features["v"]),
        cross=bool(_CROSS.search(path.lower())),
        q=q,
        k=k,
    )


def _features(
    order: str, H: int, d: int, out: int, qk: Mapping[str, int]
) -> dict[str, Tensor] | None:
    """Which output features are whose, by projection; None where the sizes do not fit."""
    rows = torch.arange(out)
    if order == "latent":
        return {"v": rows.reshape(H, -1)[:, -d:]} if out % H == 0 and out // H >= d else None
    if order in ("separate", "key_value"):
        n_kv = out // d // (2 if order == "key_value" else 1)
        if n_kv == 0 or out % (out // n_kv) or H % n_kv or out % d:
            return None
        if order == "key_value":
            k, v = rows.reshape(2, n_kv, d)
            return {"k": k, "v": v} | {"q": torch.arange(qk["q"]).reshape(H, -1)}
        if any(size % n for size, n in ((qk.get("q", H), H), (qk.get("k", n_kv), n_kv))):
            return None
        own = {p: torch.arange(s).reshape(H if p == "q" else n_kv, -1) for p, s in qk.items()}
        return {"v": rows.reshape(n_kv, d)} | own
    n_kv = (out // d - H) // 2
    if n_kv <= 0 or out != (H + 2 * n_kv) * d or H % n_kv:
        return None
    if order == "thirds":
        q, k, v = rows.split([H * d, n_kv * d, n_kv * d])
    elif order == "grouped":
        q, k, v = rows.reshape(n_kv, -1, d).split([H // n_kv, 1, 1], dim=1)
    elif order == "codegen":
        if H % 4 or n_kv != H:
            return None
        q, v, k = rows.reshape(4, 3, -1).unbind(1)
    else:
        raise UnknownLayout(
            f"unknown order {order!r}; known: separate, thirds, grouped, key_value, latent, codegen"
        )
    return {"q": q.reshape(H, d), "k": k.reshape(n_kv, d), "v": v.reshape(n_kv, d)}


def name_layers(found: list[Attention]) -> list[Attention]:
    """Name layers "L0", "encoder.L3", "decoder.L3.cross" from their paths.

    The number is the first index in the path; the stream is the first part of the path before it
    that tells the towers of a model apart.
    """
    if not found:
        return []
    towers = _tower_names([_before_index(a.path) for a in found])
    named: list[tuple[Attention, str]] = []
    for a in found:
        tower = towers[_before_index(a.path)]
        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", a.path)
        short = _join(tower, f"L{numbers[0] if numbers else 0}")
        named.append((a, _join(short, "cross") if a.cross else short))
    counts = _counted(name for _, name in named)
    names = [
        name if counts[name] == 1 else _distinguish(a, name, [b for b, n in named if n == name])
        for a, name in named
    ]
    return [replace(a, name=n) for a, n in zip(found, names, strict=True)]


def _unrolled(layers: list[Attention], lookup: Lookup) -> list[Attention]:
    """Spell out layers that share their weights (ALBERT): one entry for each time one is used."""
    groups: dict[str, list[Attention]] = {}
    for a in layers:
        if match := re.search(r"layer_groups\.(\d+)\.", a.path):
            groups.setdefault(match[1], []).append(a)
    depth = lookup("", ("num_hidden_layers",)) if groups else None
    if not depth:
        return layers
    order = [a for i in range(depth) for a in groups[str(i * len(groups) // depth)]]
    calls = _counted(())
    unrolled = []
    for i, a in enumerate(order):
        unrolled.append(replace(a, name=f"L{i}", call=calls.get(a.path, 0)))
        calls[a.path] = calls.get(a.path, 0) + 1
    return unrolled


def _before_index(path: str) -> str:
    return re.split(r"(?:^|\.)\d+(?:\.|$)", path)[0]


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def _tower_names(prefixes: list[str]) -> dict[str, str]:
    """A short name for each distinct prefix: the first component not common to all."""
    distinct = list(dict.fromkeys(prefixes))
    if len(distinct) == 1:
        return {distinct[0]: ""}
    parts = {p: p.split(".") for p in distinct}
    common = set.intersection(*(set(v) for v in parts.values()))
    short = {
        p: re.sub(r"_(model|tower|blocks)$", "", next((c for c in v if c not in common), v[-1]))
        for p, v in parts.items()
    }
    unique = _counted(short.values())
    return {p: s if unique[s] == 1 else p for p, s in short.items()}


def _distinguish(a: Attention, name: str, same: list[Attention]) -> str:
    """Tell apart layers that share a first index: by second index, else by module name."""
    numbers = {b.path: re.findall(r"\d+", b.path)[1:] for b in same}
    if len({tuple(n) for n in numbers.values()}) == len(same):
        return ".".join([name, *numbers[a.path]])
    tail = a.path.rsplit(".", 1)[-1]
    if len({b.path.rsplit(".", 1)[-1] for b in same}) == len(same):
        return _join(name, tail)
    return f"{name}.{a.path}"
