"""The two laws that prove a head layout on the model itself.

1. *Sum law*: ``Σ_h z_h W_O[h] + b_O`` equals what the output projection really returned.
2. *Independence law*: shift the values of one KV head by a constant, and exactly the z-blocks of
   the query heads that ``kv_of_head`` names move.

The sum law alone holds for any way of cutting the concatenation, because the same cut is applied
to z and to W_O; the independence law is what proves order, width and grouping. Because attention
rows sum to one, a constant shift of the values arrives at z unchanged: that also proves that
coordinate i of a value is coordinate i of its z-block, and shows gates, sinks and norms on the
way (``values`` in the result). A last shift differs from token to token: all coordinates of one
head take it over with the same attention weights, so that blocks which hold several heads, or part
of one, are found as well.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headmix.heads import Heads
from headmix.model import VALUES, AttentionModel, Enough, Site
from headmix.registry import NotApplicable

#: Largest relative error of the sum law, by the precision the model runs in; that of the weights
#: as read counts where it is coarser.
SUM_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}

#: Two z-blocks count as unmoved below this fraction of the shift (rounding only).
STILL = 1e-3

#: Attention weights of two heads count as the very same below this difference (rounding only).
SAME = 1e-6


@dataclass(frozen=True)
class LayerCheck:
    """Both laws on one layer.

    Attributes:
        layer: its name.
        sum_error: largest error of the sum law relative to the largest output; None if not run.
        independent: whether exactly the named z-blocks moved, for every KV head.
        values: what a constant shift of the values becomes on its way to z: "exact" (unchanged, as
            plain softmax attention does), "scaled" (by a factor a token, as with attention sinks)
            or "not linear" (through a gate or a norm: W_V and b_V then say nothing about z alone).
        reason: why the layer is refused; empty when both laws hold.
    """

    layer: str
    sum_error: float | None
    independent: bool
    values: str
    reason: str

    @property
    def ok(self) -> bool:
        return not self.reason

    @property
    def ran(self) -> bool:
        """Whether the batch reached this layer at all."""
        return self.sum_error is not None


@dataclass(frozen=True)
class Check:
    """The laws on every layer of a model."""

    model: str
    rows: tuple[LayerCheck, ...]

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)


def verify(
    model: AttentionModel | Any,
    inputs: Any = None,
    *,
    layers: Iterable[str | int] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **load_options: Any,
) -> Check:
    """Run both laws on the layers of a model, on a tiny batch.

    Args:
        model: an AttentionModel, or anything that ``load`` accepts.
        inputs: keyword arguments (a mapping), positional arguments (a tuple) or one tensor for the
            model's forward; by default a tiny batch made for it, where its source knows how.
        layers: names or positions; by default all.
        progress: called with (layer, done, total).
        **load_options: passed to ``load``.

    Returns:
        A Check: ``check.ok``, and a row a layer with the error found and the reason of a refusal.

    Raises:
        NotApplicable: the model was read for its weights alone, or no batch is known for it.
    """
    if not isinstance(model, AttentionModel):
        from headmix.sources import load

        model = load(model, **load_options)
    if model.module is None:
        raise NotApplicable(
            f"{model.name} was read for its weights alone; the laws need a model that runs: verify "
            "the model itself"
        )
    if inputs is None:
        if model.example is None:
            raise NotApplicable(
                f"no test batch is known for {model.name}: pass inputs=, a batch for its forward"
            )
        inputs = model.example()
    names = [model.layer_name(n) for n in layers] if layers is not None else model.layers
    rows = []
    for done, name in enumerate(names):
        if progress:
            progress(name, done, len(names))
        rows.append(_check_layer(model, name, inputs))
    return Check(model.name, tuple(rows))


def prove(model: AttentionModel, inputs: Any = None) -> AttentionModel:
    """The model with what the laws found: refused layers, and how values reach z.

    Raises:
        ValueError: no layer that the batch reached passed; the message holds the first reasons.
    """
    check = verify(model, inputs)
    refused = {row.layer: row.reason for row in check.rows if row.ran and not row.ok}
    if not any(row.ok for row in check.rows):
        reasons = "; ".join(f"{row.layer}: {row.reason}" for row in check.rows[:3])
        raise ValueError(
            f"{model.name}: the head layout that was recognised does not hold ({reasons}). "
            "Recognised: "
            + ", ".join(sorted({str(s.attention.layout) for s in model.sites.values()}))
            + ". Name the right one: layout=headmix.Layout(o=..., v=..., q=..., k=..., n_heads=...)"
        )
    for row in check.rows:
        site = model.sites[row.layer]
        if row.ok:
            site.notes = tuple(n for n in site.notes if not n.startswith("not proven"))
            settle(site, row.values)
        elif not row.ran:
            site.notes += ("not proven: the test batch never reached this layer",)
    return replace(model, refused=refused)


def settle(site: Site, values: str) -> None:
    """Write down how values reach z at this site."""
    site.values = values
    if VALUES[values]:
        site.notes += (VALUES[values],)


def _check_layer(model: AttentionModel, layer: str, inputs: Any) -> LayerCheck:
    heads = model.heads(layer)
    if (bad := heads.nonfinite()) is not None:
        return LayerCheck(layer, None, False, "", f"NaN or infinity in {bad}")
    seen = _observe(model, layer, inputs)
    if seen is None:
        return LayerCheck(
            layer,
            None,
            False,
            "",
            "the batch never reached its output projection: pass inputs= that do",
        )
    z, out, precision = seen
    error = _sum_error(heads, z, out)
    tolerance = max(SUM_TOLERANCE[precision], SUM_TOLERANCE[heads.W_O.dtype])
    if error > tolerance:
        reason = f"sum law: relative error {error:.1e} exceeds {tolerance:.0e}"
        return LayerCheck(layer, error, False, "", reason)
    shifts = _shifts(heads, z)
    # what moved is the difference of two passes, each rounded by as much as the sum law allows
    rounding = max(10 * STILL, 2 * tolerance)
    values, reason = _independence(model, heads, inputs, z, shifts, rounding)
    if not reason and values != "not linear":
        reason = _one_pattern_a_head(model, heads, inputs, z, shifts, 10 * max(STILL, tolerance))
    return LayerCheck(layer, error, not reason, values, reason)


def _observe(
    model: AttentionModel,
    layer: str,
    inputs: Any,
    shift: Tensor | None = None,
    uneven: bool = False,
) -> tuple[Float[Tensor, "token concat"], Float[Tensor, "token d_model"], torch.dtype] | None:
    """z and the projection's output as float64 rows, with the precision they were computed in."""
    site, seen = model.sites[layer], []

    def watcher(z: Tensor, out: Tensor) -> None:
        a, b = (t.detach().to("cpu", torch.float64).flatten(0, -2) for t in (z, out))
        seen.append((a, b, z.dtype))
        raise Enough

    with ExitStack() as stack:
        stack.enter_context(site.watch(watcher))
        if shift is not None:
            stack.enter_context(site.shift_values(shift, uneven=uneven))
        model.forward(inputs)
    return seen[0] if seen else None


def _sum_error(heads: Heads, z: Tensor, out: Tensor) -> float:
    per_head = z.unflatten(-1, (heads.n_heads, heads.d_head))
    predicted = torch.einsum("thd,hdm->tm", per_head, heads.W_O.double())
    if heads.b_O is not None:
        predicted = predicted + heads.b_O.double()
    scale = out.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((predicted - out).abs().max() / scale)


def _shifts(heads: Heads, z: Tensor) -> Float[Tensor, "kv_head d_head"]:
    """Values to add, of the size of z, none near zero."""
    generator = torch.Generator().manual_seed(0)
    size = float(z.abs().max()) or 1.0
    shifts = torch.randn(heads.n_kv_heads, heads.d_head, generator=generator).sign() * size
    return shifts * (1 + torch.rand(shifts.shape, generator=generator))


def _independence(
    model: AttentionModel, heads: Heads, inputs: Any, z: Tensor, shifts: Tensor, rounding: float
) -> tuple[str, str]:
    """Shift one KV head after the other; return (values, reason of refusal)."""
    size = float(z.abs().max()) or 1.0
    kinds = set()
    for g in range(heads.n_kv_heads):
        shift = torch.zeros_like(shifts)
        shift[g] = shifts[g]
        shifted = _observe(model, heads.layer, inputs, shift)
        assert shifted is not None
        moved = (shifted[0] - z).unflatten(-1, (heads.n_heads, heads.d_head)) / size
        named = torch.tensor([k == g for k in heads.kv_index.tolist()])
        reach = moved.abs().amax(0)  # [head, d_head]: how far each coordinate moved at all
        wrong = (reach[~named] > STILL).any(-1).nonzero().flatten()
        still = (reach[named] <= STILL).any(-1).nonzero().flatten()
        if len(wrong) or len(still):
            others = (~named).nonzero().flatten()[wrong].tolist()
            own = named.nonzero().flatten()[still].tolist()
            return "", (
                f"independence law: shifting the values of KV head {g} "
                + (f"moved heads {others}, which do not use it" if others else "")
                + (" and " if others and own else "")
                + (f"left part of heads {own} still, which do" if own else "")
            )
        kinds.add(_kind(moved[:, named], shifts[g].double() / size, rounding))
    order = ("not linear", "scaled", "exact")
    return next(k for k in order if k in kinds), ""


def _one_pattern_a_head(
    model: AttentionModel, heads: Heads, inputs: Any, z: Tensor, shifts: Tensor, tolerance: float
) -> str:
    """The reason of refusal where the blocks are not whole heads, each with one attention pattern.

    Values shifted by another amount at each token reach the coordinates of one head with the same
    weights. Where they do not, several heads were taken for one; where all heads come in groups of
    the very same weights, one was taken for several.
    """
    shifted = _observe(model, heads.layer, inputs, shifts, uneven=True)
    assert shifted is not None
    direction = shifts[heads.kv_index].double()
    moved = (shifted[0] - z).unflatten(-1, (heads.n_heads, heads.d_head))
    factor = (moved * direction).sum(-1) / direction.square().sum(-1)  # [token, head]
    rest = (moved - factor[..., None] * direction).abs().amax((0, 2)) / direction.abs().max()
    if several := (rest > tolerance).nonzero().flatten().tolist():
        return (
            f"independence law: the coordinates of heads {several} attend with different weights, "
            "so that each holds several heads: n_heads is too small, or their order another"
        )
    for size in range(heads.n_heads // 2, 1, -1):
        if heads.n_heads % size:
            continue
        groups = factor.unflatten(1, (-1, size))
        inside = (groups - groups[..., :1]).abs().max()
        between = (groups - groups[:, :1]).abs().max()
        if inside <= SAME and between > 100 * SAME:  # where all heads are alike, nothing is known
            members = [list(range(h, h + size)) for h in range(0, heads.n_heads, size)]
            return (
                f"independence law: heads {' and '.join(map(str, members))} attend with the very "
                "same weights, so that each group is one head: n_heads is too large"
            )
    return ""


def _kind(
    moved: Float[Tensor, "token head d_head"], shift: Float[Tensor, "d_head"], rounding: float
) -> str:
    """What became of a constant shift on its way from the values to z."""
    factor = moved @ shift / shift.square().sum()
    rest = moved - factor[..., None] * shift
    if rest.abs().max() > rounding:
        return "not linear"
    touched = factor[factor.abs() > STILL]
    return "exact" if (touched - 1).abs().max() <= rounding else "scaled"
