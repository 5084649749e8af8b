"""matching: which head of one model stands for which of another, and what their weights say."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from headmix import linalg
from headmix.capture import Batch
from headmix.heads import Heads
from headmix.metrics.redundancy import cka
from headmix.model import AttentionModel
from headmix.moments import Moments
from headmix.packing import batches

#: How heads of two models can find each other.
MATCHES = ("index", "overlap", "cka")

Order = Int[np.ndarray, "layer head"]
Pair = tuple[AttentionModel, AttentionModel]


def by_index(run: xr.Dataset) -> Order:
    """Every head stands for that of its own number."""
    return np.tile(np.arange(run.sizes["head"]), (run.sizes["layer"], 1))


def matched(models: Pair, run: xr.Dataset, match: str, options: Mapping[str, Any]) -> Order:
    """For each layer and head of A, the head of B.

    Args:
        models: A and B.
        run: from ``measure``, for layers, heads and KV groups.
        match: of ``MATCHES``.
        options: what ``measure`` was given, for the text.

    Raises:
        ValueError: the widths of a layer differ; or, for "cka", there is no text or the models do
            not read the same token ids.
    """
    order = by_index(run)
    if match == "index":
        return order
    layers = {n: pair for n, pair in _layers(models, run) if pair is not None}
    scores = (
        {name: _overlaps(*pair) for name, pair in layers.items()}
        if match == "overlap"
        else _alignments(models, layers, options)
    )
    for i, name in enumerate(run.layer.values.tolist()):
        if name in scores:
            groups = np.array(layers[name][0].kv_of_head)
            order[i, : len(groups)] = _assigned(scores[name].double().numpy(), groups)
    return order


def what_changed(models: Pair, ds: xr.Dataset) -> dict[str, tuple[str, str, np.ndarray]]:
    """Title, formula and values [layer, head] of what the weights of head and match say."""
    found = {
        "ov_change": ("Change of the OV matrix", "‖M^B − M^A‖_F / ‖M^A‖_F, M = W_V W_O"),
        "write_change": ("Change of W_O", "‖W_O^B − W_O^A‖_F / ‖W_O^A‖_F"),
        "write_overlap": ("Overlap of a head with its match", "tr(P_A P_B) / √(d_A d_B)"),
    }
    values = {name: np.full(ds.match.shape, np.nan) for name in found}
    for i, (_, pair) in enumerate(_layers(models, ds)):
        if pair is None:
            continue
        a, b = pair
        order = ds.match.values[i, : a.n_heads]
        values["write_overlap"][i, : a.n_heads] = _overlaps(a, b)[range(a.n_heads), order]
        values["write_change"][i, : a.n_heads] = _change(a.W_O, b.W_O[order])
        if a.W_V is not None and b.W_V is not None:
            values["ov_change"][i, : a.n_heads] = _ov_change(a, b, order)
    return {name: (*about, values[name]) for name, about in found.items()}


def _layers(models: Pair, run: xr.Dataset) -> Iterator[tuple[str, tuple[Heads, Heads] | None]]:
    """Each layer's weights in both models; None where it is invalid."""
    for name, valid in zip(run.layer.values.tolist(), run.valid.values, strict=True):
        if not valid:
            yield name, None
            continue
        a, b = (model.heads(name) for model in models)
        if a.W_O.shape != b.W_O.shape:
            raise ValueError(
                f"{name}: W_O is {list(a.W_O.shape)} in one model and {list(b.W_O.shape)} in the "
                "other"
            )
        yield name, (a, b)


def _alignments(
    models: Pair, layers: Mapping[str, tuple[Heads, Heads]], options: Mapping[str, Any]
) -> dict[str, Float[torch.Tensor, "head head_b"]]:
    """Debiased CKA of every head of A with every head of B, on the same tokens."""
    if options.get("text") is None:
        raise ValueError("heads are matched by cka on a text: name one, text='default' say")
    words = [m.tokenizer.get_vocab() if m.tokenizer is not None else None for m in models]
    if words[0] != words[1]:
        raise ValueError("heads are matched by cka on the same tokens: the vocabularies differ")
    joint = {name: Heads.side_by_side(pair) for name, pair in layers.items()}
    folds = options.get("folds", 5)
    sums = {name: Moments.zeros(h.W_O, folds=folds) for name, h in joint.items()}
    known = ("max_tokens", "tokens_per_batch", "max_length")
    feed = batches(
        models[0], options["text"], folds=folds, **{k: options[k] for k in known if k in options}
    )
    for batch in feed:
        z_a, z_b = (_seen(model, batch, layers) for model in models)
        for name in layers:
            sums[name].update(torch.cat([z_a[name], z_b[name]], -1), fold=batch.fold)
    H = {name: pair[0].n_heads for name, pair in layers.items()}
    return {n: cka(joint[n], sums[n])[: H[n], H[n] :] for n in layers}


def _seen(
    model: AttentionModel, batch: Batch, layers: Mapping[str, tuple[Heads, Heads]]
) -> dict[str, Float[torch.Tensor, "token concat"]]:
    """z of every layer for the tokens of one batch that count."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, z: torch.Tensor, out: torch.Tensor) -> None:
        keep = batch.keep.get(layers[name][0].stream)
        found[name] = (z.flatten(0, -2) if keep is None else z[keep.to(z.device)]).cpu()

    with ExitStack() as stack:
        for name in layers:
            stack.enter_context(model.sites[name].watch(partial(note, name)))
        model.forward(batch.inputs)
    return found


def _overlaps(a: Heads, b: Heads) -> Float[torch.Tensor, "head head_b"]:
    """The projection kernel of every head of one model with every head of the other."""
    Q_a, Q_b = a.write_basis, b.write_basis
    H, k, _ = Q_a.Q.shape
    inner = (Q_a.Q.flatten(0, 1) @ Q_b.Q.flatten(0, 1).T).reshape(H, k, H, -1)
    norm = (Q_a.rank[:, None] * Q_b.rank[None, :]).sqrt()
    return inner.square().sum((1, 3)) / norm


def _assigned(
    overlap: Float[np.ndarray, "head head_b"], kv_of_head: Int[np.ndarray, "head"]
) -> Int[np.ndarray, "head"]:
    """The heads of B that make the sum of overlaps largest, KV groups going as wholes."""
    members = [np.flatnonzero(kv_of_head == g) for g in range(kv_of_head.max() + 1)]
    n = len(members)
    within: dict[tuple[int, int], np.ndarray] = {}
    score = np.full((n, n), -np.inf)
    overlap = np.nan_to_num(overlap)
    for i, mine in enumerate(members):
        for j, theirs in enumerate(members):
            if len(mine) == len(theirs):
                pairs = overlap[np.ix_(mine, theirs)]
                _, columns = linear_sum_assignment(pairs, maximize=True)
                within[i, j] = theirs[columns]
                score[i, j] = pairs[range(len(mine)), columns].sum()
    order = np.empty_like(kv_of_head)
    for i, j in zip(*linear_sum_assignment(score, maximize=True), strict=True):
        order[members[i]] = within[int(i), int(j)]
    return order


def _change(
    before: Float[torch.Tensor, "head m n"], after: Float[torch.Tensor, "head m n"]
) -> Float[np.ndarray, "head"]:
    norm = torch.linalg.matrix_norm
    return (norm(after - before) / norm(before)).numpy()


def _ov_change(a: Heads, b: Heads, order: Int[np.ndarray, "head"]) -> Float[np.ndarray, "head"]:
    """‖M^B − M^A‖ from the product of ``[W_V^A, W_V^B]`` and ``[−W_O^A; W_O^B]``, factored."""
    readers = torch.cat([a.values[a.kv_index], b.values[b.kv_index][order]], -1)
    writers = torch.cat([-a.W_O, b.W_O[order]], 1)
    small = linalg.triangular_factor(readers) @ linalg.triangular_factor(writers.mT).mT
    norm = torch.linalg.matrix_norm
    return (norm(small) / norm(a.ov_reader)).numpy()
