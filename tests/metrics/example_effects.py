"""What replacing heads does in a tiny model made of an example's layers: sums for causal metrics.

The stream is what the first layer's heads write. A norm, the feed-forward's neurons and the second
layer's queries and keys read it, and the vocabulary predicts from it. Heads are resampled from the
token 24 further on, which is of another document.
"""

from typing import Any

import torch

from headmix.effects import REPLACEMENTS, Effects, Interactions, units
from headmix.outcomes import distance, divergence, losses

FOLDS, DOCUMENT = 5, 8


def _folds(e: Any) -> torch.Tensor:
    return torch.arange(len(e.z)) // DOCUMENT % FOLDS


def _documents(e: Any) -> torch.Tensor:
    return torch.full((FOLDS,), len(e.z) / DOCUMENT / FOLDS, dtype=torch.float64)


def _stream(e: Any, members: torch.Tensor, replacement: str) -> torch.Tensor:
    heads = e.layers[0]
    z = e.z.unflatten(1, (heads.n_heads, -1))
    new = {
        "resample": z.roll(3 * DOCUMENT, 0),
        "mean": z.mean(0).expand_as(z),
        "zero": torch.zeros_like(z),
    }
    z = torch.where(members[:, None], new[replacement], z)
    return torch.einsum("thd,hdm->tm", z, heads.W_O) + heads.b_O


def effects_of(e: Any) -> Effects:
    """Every head, group and pair of the first layer, replaced in every way."""
    H = e.layers[0].n_heads
    members = units(e.layers[0], [(i, j) for i in range(H) for j in range(i)])
    sums, fold = Effects.zeros(members, folds=FOLDS), _folds(e)
    y = _stream(e, torch.zeros(H, dtype=torch.bool), "zero")
    W_U = e.vocabulary.W_U
    answers = torch.arange(len(y)) % W_U.shape[1]
    before = losses(y @ W_U, answers)
    sums.clean(fold, _documents(e), before, fold)
    for replacement in REPLACEMENTS:
        for unit, who in enumerate(members):
            if who.sum() > 1 and replacement != "resample":
                continue
            there = _stream(e, who, replacement)
            sums.add("distance", replacement, unit, fold, distance(there, y))
            sums.add("loss", replacement, unit, fold, losses(there @ W_U, answers) - before)
            sums.add("divergence", replacement, unit, fold, divergence(y @ W_U, there @ W_U))
    return sums


def _read(e: Any, members: torch.Tensor) -> dict[str, torch.Tensor]:
    out = _stream(e, members, "resample")
    normed = out / out.square().mean(1, keepdim=True).sqrt()
    later = e.layers[1]
    q = torch.einsum("tm,hmd->thd", normed, later.W_Q)
    k = torch.einsum("tm,hmd->thd", normed, later.W_K)[:, list(later.kv_of_head)]
    docs = [x.unflatten(0, (-1, DOCUMENT)) for x in (q, k)]
    scores = torch.einsum("xqhd,xkhd->xqhk", *docs).flatten(0, 1)
    return {
        "attn_out": out,
        "mlp_in": normed,
        "mlp_out": (normed @ e.reads.W_in).relu(),
        "next_logits": scores - scores.mean(-1, keepdim=True),
    }


def interactions_of(e: Any) -> Interactions:
    """Every pair of the first layer's heads, at every read-out."""
    H, fold = e.layers[0].n_heads, _folds(e)
    sums = Interactions.zeros(~torch.eye(H, dtype=torch.bool), [0, 0, 0, 0], folds=FOLDS)
    sums.clean(fold, _documents(e))
    eye = torch.eye(H, dtype=torch.bool)
    clean = _read(e, torch.zeros(H, dtype=torch.bool))
    for r, value in clean.items():
        sums.add_clean(r, fold, value)
    alone = [{r: v - clean[r] for r, v in _read(e, eye[i]).items()} for i in range(H)]
    for i in range(H):
        for r, moved in alone[i].items():
            sums.add(r, (i,), fold, moved)
        for j in range(i):
            for r, v in _read(e, eye[i] | eye[j]).items():
                sums.add(r, (i, j), fold, v - clean[r] - alone[i][r] - alone[j][r])
    return sums
