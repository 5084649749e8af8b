"""Singular values of every OV matrix: TransformerBridge.OV.svd() against ours."""

from dataclasses import replace

import torch
from smollm2 import bridge, heads_of
from table import difference, seconds, show

import headmix as hm


def main() -> None:
    model = bridge()
    layers = heads_of(model)  # read; replace() drops what was computed from them

    def ours() -> torch.Tensor:
        return torch.stack([hm.metrics.ov_spectrum(replace(h)) for h in layers])

    ours()
    fast, value = seconds(ours, repeats=3)
    with torch.no_grad():
        slow, (_, expected, _) = seconds(lambda: model.OV.svd())
    # singular values below rounding are noise on both sides
    known = expected > expected[..., :1] * 1e-5
    apart = difference(value[known], expected[known])
    show(
        f"OV spectra of all {value[..., 0].numel()} heads, SmolLM2-135M", f"{slow:.2f} s",
        f"{fast:.3f} s", f"{slow / fast:.0f}×", "≥ 10×", slow / fast >= 10, apart,
    )  # fmt: skip


if __name__ == "__main__":
    main()
