"""All activation metrics of a layer from its moments, against one inverse of its covariance."""

import torch
from bench_cka import D_HEAD, D_MODEL, FOLDS, HEADS, accumulated, layer
from table import seconds, show

import headmix as hm
from headmix.heads import Heads

KV_HEADS = 3


def main() -> None:
    torch.set_num_threads(1)
    weights, z = layer()
    heads = Heads(weights.W_O, kv_of_head=[h * KV_HEADS // HEADS for h in range(HEADS)])
    moments = accumulated(heads, z, z @ heads.W_O.flatten(0, 1))
    metrics = [m for m in hm.catalogue().values() if m.needs == ("heads", "moments")]

    def ours() -> None:
        fresh = moments.select(range(FOLDS))  # nothing derived beforehand
        for metric in metrics:
            metric(heads, fresh)

    sigma = moments.covariance
    for repeat in (1, 5):  # the first call of a LAPACK routine is slow
        inverse, _ = seconds(lambda: torch.linalg.inv(sigma), repeats=repeat)
        time, _ = seconds(ours, repeats=repeat)
    what = f"{len(metrics)} metrics of {HEADS} heads of {D_HEAD}, D = {D_MODEL}, {FOLDS} folds"
    show(
        what, f"{inverse * 1e3:.1f} ms", f"{time * 1e3:.0f} ms", f"{time / inverse:.0f}×",
        "≤ 40×", time / inverse <= 40,
    )  # fmt: skip


if __name__ == "__main__":
    main()
