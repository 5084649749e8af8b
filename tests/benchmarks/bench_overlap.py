"""Overlap of all pairs of heads within each layer: TransformerLens pair by pair against ours."""

from dataclasses import replace

import torch
from smollm2 import bridge, heads_of
from table import difference, seconds, show
from transformer_lens.tools.analysis.projection_kernel import (
    orthonormal_subspace,
    projection_kernel,
)

import headmix as hm


def pair_by_pair(W_O: torch.Tensor) -> torch.Tensor:
    """[layer, pair]: both bases of each pair from scratch."""

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return projection_kernel(orthonormal_subspace(a.T), orthonormal_subspace(b.T)).normalized

    return torch.stack([torch.stack([pair(W[i], W[j]) for i, j in pairs(W)]) for W in W_O])


def bases_once(W_O: torch.Tensor) -> torch.Tensor:
    """The same by a careful user, who keeps each head's basis."""
    rows = []
    for W in W_O:
        bases = [orthonormal_subspace(w.T) for w in W]
        rows.append(
            torch.stack([projection_kernel(bases[i], bases[j]).normalized for i, j in pairs(W)])
        )
    return torch.stack(rows)


def pairs(W: torch.Tensor) -> list[list[int]]:
    return torch.triu_indices(len(W), len(W), offset=1).T.tolist()


def main() -> None:
    model = bridge()
    W_O, layers = model.W_O.detach(), heads_of(model)  # both sides begin with their weights read
    i, j = torch.triu_indices(W_O.shape[1], W_O.shape[1], offset=1)

    def ours() -> torch.Tensor:
        return torch.stack([hm.metrics.projection_kernel(replace(h))[i, j] for h in layers])

    ours()
    fast, value = seconds(ours, repeats=3)
    what = f"overlap of all same-layer pairs, SmolLM2-135M: {i.numel() * len(W_O)} pairs"
    slow, expected = seconds(lambda: pair_by_pair(W_O))
    apart = difference(value, expected)
    show(
        what, f"{slow:.2f} s", f"{fast:.3f} s", f"{slow / fast:.0f}×", "≥ 50×",
        slow / fast >= 50 and apart <= 1e-5, apart,
    )  # fmt: skip
    careful, expected = seconds(lambda: bases_once(W_O))
    show(
        "… where the baseline keeps each head's basis", f"{careful:.2f} s", f"{fast:.3f} s",
        f"{careful / fast:.0f}×", difference=difference(value, expected),
    )  # fmt: skip


if __name__ == "__main__":
    main()
