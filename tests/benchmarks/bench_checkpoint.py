"""Reading weights alone: 4 layers shaped like a 70 B model, against what this machine could do.

The floor is the bytes that the metrics need, at the rate a file is read here, and the flops of QR
and Gram matrices, at the rate of a large matrix product here; conversions, nulls and copies come
on top. The measured side runs in a process of its own, so that its peak memory is the whole of it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from table import peak_memory, seconds, show

import headmix as hm

D, HEADS, KV_HEADS, D_HEAD, LAYERS = 8192, 64, 8, 128, 4
METRICS = ("projection_kernel", "ov_spectrum")


def write_checkpoint(folder: Path) -> None:
    """One shard a layer, attention weights only, bf16."""
    generator = torch.Generator().manual_seed(0)
    widths = {"q": HEADS * D_HEAD, "k": KV_HEADS * D_HEAD, "v": KV_HEADS * D_HEAD}
    places = {}
    for n in range(LAYERS):
        path, file = f"model.layers.{n}.self_attn", f"model-{n + 1:05}-of-{LAYERS:05}.safetensors"
        shapes = {f"{path}.{p}_proj.weight": (width, D) for p, width in widths.items()}
        shapes[f"{path}.o_proj.weight"] = (D, HEADS * D_HEAD)
        weights = {
            name: torch.randn(shape, generator=generator).bfloat16() / D**0.5
            for name, shape in shapes.items()
        }
        save_file(weights, folder / file)
        places |= dict.fromkeys(weights, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "llama", "hidden_size": D, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": D_HEAD, "num_hidden_layers": LAYERS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def floor(folder: Path) -> float:
    """Seconds a layer, from rates measured now."""
    file = min(folder.glob("*.safetensors"))
    reading, content = seconds(file.read_bytes, repeats=3)
    A = torch.randn(4096, 4096)
    A @ A
    multiplying, _ = seconds(lambda: A @ A, repeats=5)
    flops_a_second = 2 * 4096**3 / multiplying
    needed = 2 * D * D_HEAD * (HEADS + KV_HEADS)  # bytes of W_O and W_V
    with_q = 4 * D * D_HEAD**2 * HEADS  # QR of each head's W_O, its Q formed
    without_q = 2 * D * D_HEAD**2 * KV_HEADS
    gram = (HEADS * D_HEAD) ** 2 * D  # each pair once: half of 2 Dc² D
    return needed * reading / len(content) + (with_q + without_q + gram) / flops_a_second


def measure(folder: Path) -> None:
    """The measured side: seconds for 1, 2 and 4 layers and the peak memory, as JSON."""
    hm.measure(torch.nn.MultiheadAttention(64, 4), metrics=METRICS)  # imports, first BLAS calls
    model = hm.load(folder, weights_only=True)
    times = {
        n: seconds(lambda n=n: hm.measure(model, metrics=METRICS, layers=range(n)))[0]
        for n in (1, 2, LAYERS)
    }
    print(json.dumps({"times": list(times.values()), "peak": peak_memory()}))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder)
        before = floor(folder)
        done = subprocess.run(
            [sys.executable, __file__, name], capture_output=True, check=True, text=True
        )
        best = LAYERS * (before + floor(folder)) / 2  # the machine may be busier now, or less
    result = json.loads(done.stdout.splitlines()[-1])
    one, two, four = result["times"]
    what = f"weights of {LAYERS} layers of a 70 B shape, bf16: {', '.join(METRICS)}"
    show(what, f"{best:.1f} s", f"{four:.1f} s", f"{four / best:.2f}×", "≤ 2×", four / best <= 2)
    show(
        "… time of 1, 2 and 4 layers", "", f"{one:.1f} {two:.1f} {four:.1f}",
        f"{four / one:.2f}×", "≤ 4.4×", four / one <= 4.4,
    )  # fmt: skip
    peak = result["peak"]
    show("… peak memory of the whole process", "", f"{peak / 1e9:.2f} GB", "", "< 3 GB", peak < 3e9)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
    else:
        main()
