"""The lab's transformer against torch's own, and training side by side against one by one.

Both sides of the first are the same function class: pre-norm, ReLU, causal, no dropout, the same
embeddings, read-out, optimiser and batch. One step of each in turn, the fastest of several.
"""

import time
from collections.abc import Callable

import torch
from table import show
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headmix import lab
from headmix.lab.stack import Adam, Stack
from headmix.lab.training import losses

WIDTH, HEADS, LAYERS, LENGTH, BATCH, TOKENS = 256, 8, 4, 128, 16, 512


class Plain(nn.Module):
    """``nn.TransformerEncoder`` between the embeddings and the read-out that the lab has."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.head = nn.Linear(WIDTH, TOKENS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        return self.head(self.encoder(x, mask=self.mask, is_causal=True))


@torch.no_grad()
def copy(plain: Plain, ours: lab.Transformer) -> float:
    """Give the lab's model the weights of torch's; the largest difference of their logits."""
    pairs = [
        (ours.embed_tokens, plain.tokens), (ours.embed_positions, plain.positions),
        (ours.norm, plain.encoder.norm), (ours.lm_head, plain.head),
    ]  # fmt: skip
    for mine, theirs in zip(ours.layers, plain.encoder.layers, strict=True):
        pairs += [
            (mine.attention.o_proj, theirs.self_attn.out_proj),
            (mine.attention_norm, theirs.norm1), (mine.mlp_norm, theirs.norm2),
            (mine.mlp.fc1, theirs.linear1), (mine.mlp.fc2, theirs.linear2),
        ]  # fmt: skip
        projections = (mine.attention.q_proj, mine.attention.k_proj, mine.attention.v_proj)
        weights = theirs.self_attn.in_proj_weight.chunk(3)
        biases = theirs.self_attn.in_proj_bias.chunk(3)
        for projection, weight, bias in zip(projections, weights, biases, strict=True):
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
    for mine, theirs in pairs:
        for parameter, value in zip(mine.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(value)
    ids = torch.randint(TOKENS, (2, LENGTH))
    expected = plain(ids)
    return float((ours(ids) - expected).abs().max() / expected.abs().max())


def step_of(model: nn.Module) -> Callable[[], None]:
    """One training step, forward, backward and Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ids = torch.randint(TOKENS, (BATCH, LENGTH + 1))

    def step() -> None:
        logits = model(ids[:, :-1])
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fastest(steps: list[Callable[[], None]], rounds: int) -> list[float]:
    """The shortest time of each, in turn within every round, after one round that is not timed."""
    best = [float("inf")] * len(steps)
    for n in range(rounds + 1):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            step()
            if n:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def against_torch(variant: str, bar: str) -> None:
    config = lab.Config(
        vocabulary=TOKENS, length=LENGTH, n_layers=LAYERS, n_heads=HEADS,
        d_head=WIDTH // HEADS, d_model=WIDTH, **lab.VARIANTS[variant],
    )  # fmt: skip
    plain, ours = Plain(), lab.build(config, 0)
    apart = copy(plain, ours) if variant == "full" else None
    slow, fast = fastest([step_of(plain), step_of(ours)], rounds=8)
    rate = BATCH * LENGTH
    show(
        f"training step, {LAYERS} layers of {WIDTH}, nn.TransformerEncoder / {variant}",
        f"{rate / slow / 1e3:.2f} ktok/s", f"{rate / fast / 1e3:.2f} ktok/s",
        f"{slow / fast:.2f}×", bar, slow / fast >= 0.8 if bar else None, apart,
    )  # fmt: skip


def side_by_side(name: str, runs: int, batch: int) -> None:
    """A step of several models: one after the other with torch's Adam, and as one stack."""
    task = lab.TASKS[name]()
    config = task.config()
    inputs, labels = task.draw(torch.Generator().manual_seed(0), batch, "train")
    models = [lab.build(config, seed) for seed in range(runs)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    stack = Stack(models)
    ours = Adam(stack.flat, torch.full((runs,), 1e-3), 1000)

    def one_by_one() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            answers = task.read(model(inputs))
            cross_entropy(answers.flatten(0, -2), labels.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def together() -> None:
        out = stack(inputs.expand(runs, -1, -1))
        losses(task, out, labels.expand(runs, -1, -1)).sum().backward()
        ours.step()

    slow, fast = fastest([one_by_one, together], rounds=15)
    show(
        f"step of {runs} models on {name}, batch {batch}: one by one / side by side",
        f"{slow * 1e3:.1f} ms", f"{fast * 1e3:.1f} ms", f"{slow / fast:.1f}×",
        "> 1×", slow > fast,
    )  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    against_torch("full", "≥ 0.80×")
    for variant in ("identity", "low_rank", "talking"):
        against_torch(variant, "")
    torch.set_num_threads(1)  # as training does
    side_by_side("xor", 5, 32)
    side_by_side("induction", 5, 32)
    side_by_side("characters", 5, 16)


if __name__ == "__main__":
    main()
