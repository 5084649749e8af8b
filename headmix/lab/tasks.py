"""The tasks T1 to T5: small, generated from a seed, each split into train, validation and test.

Each asks something of the way heads are put together. What theory says of each is in its
docstring; what training finds is for the experiments to say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headmix.lab.transformer import Config
from headmix.text import read_text

#: Inputs [example, token] and labels [example, answer].
Examples = tuple[Int[Tensor, "example token"], Int[Tensor, "example answer"]]

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """What a model is trained and tested on.

    Attributes:
        name: a key of ``TASKS``.
        title: what is asked, in a line.
        vocabulary, length: of its sequences.
        classes: how many classes an answer has.
        answers: answers read at the last token; 0 where every token has one.
        chance: the value of a reader that knows no more than the classes; the null of ``value``.
        unit: of ``value``: "accuracy" or "nats per character" (of which less is better).
        draw: makes so many examples of a split from a generator; the same ones whenever it is
            seeded alike, and never one that another split could have.
        shape: fields of ``Config`` that fit the task.
        shortcut: the value that a half solution reaches, where there is one.
    """

    name: str
    title: str
    vocabulary: int
    length: int
    classes: int
    answers: int
    chance: float
    unit: str
    draw: Callable[[torch.Generator, int, str], Examples]
    shape: Mapping[str, Any] = field(default_factory=dict)
    shortcut: float | None = None

    def config(self, **more: Any) -> Config:
        """A model that fits the task; ``more`` are any fields of its Config."""
        return Config(
            vocabulary=self.vocabulary,
            length=self.length,
            classes=self.classes * max(1, self.answers),
            **{**self.shape, **more},
        )

    def read(
        self, logits: Float[Tensor, "*batch token output"]
    ) -> Float[Tensor, "*batch answer class"]:
        """The logits of the answers among those of all tokens."""
        if not self.answers:
            return logits
        return logits[..., -1, :].unflatten(-1, (self.answers, self.classes))


def xor(*, planted: bool = True) -> Task:
    """T1. Eight bits and a mark; whether the last two bits differ.

    ``planted``: four heads see one bit each, so that z and with it attn_out is a sum of functions
    of single bits, whatever W_O. A logit that is such a sum has, on four equally frequent cells, a
    mean loss of at least log 2 (by convexity: averaging it over the symmetries of XOR makes it
    constant), so that without norms and without a feed-forward no W_O can do better than
    guessing. A norm after it divides by a length that depends on both bits; a feed-forward bends
    their sum: either may solve it. Not planted, attention logits multiply query and key: that too
    may be enough.

    Split by the six bits that do not matter: 40, 12 and 12 of their 64 values.
    """
    values = torch.cartesian_prod(*[torch.arange(2)] * 6)
    parts = _split(values)

    def draw(generator: torch.Generator, n: int, split: str) -> Examples:
        rest = _pick(parts[split], n, generator)
        bits = torch.randint(2, (n, 2), generator=generator)
        mark = torch.full((n, 1), 2)
        return torch.cat([rest, bits, mark], 1), (bits[:, :1] ^ bits[:, 1:])

    offsets = (1, 2, 3, 4) if planted else None
    return Task(
        name="xor" if planted else "xor_free",
        title="T1: XOR of two positions"
        + (", one head each" if planted else ", heads look where they like"),
        vocabulary=3,
        length=9,
        classes=2,
        answers=1,
        chance=0.5,
        unit="accuracy",
        draw=draw,
        shape={"n_heads": 4, "d_head": 8, "d_model": 32, "d_ff": 64, "offsets": offsets},
    )


def threshold() -> Task:
    """T2. Four numbers below 16 and a mark; whether the last two add up to more than 15.

    One head each, as in ``xor``. The sum of a function of each number suffices, which identity and
    the read-out have without any mixing: no W_O, norm or feed-forward is needed.

    The sum is never 15, so that classes are even. Split by the two numbers that do not matter:
    154, 51 and 51 of 256 pairs.
    """
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    parts, summed = _split(pairs), pairs[pairs.sum(1) != 15]

    def draw(generator: torch.Generator, n: int, split: str) -> Examples:
        rest, pair = _pick(parts[split], n, generator), _pick(summed, n, generator)
        mark = torch.full((n, 1), 16)
        return torch.cat([rest, pair, mark], 1), (pair.sum(1, keepdim=True) > 15).long()

    return Task(
        name="threshold",
        title="T2: whether two numbers add up to more than a threshold, one head each",
        vocabulary=17,
        length=5,
        classes=2,
        answers=1,
        chance=0.5,
        unit="accuracy",
        draw=draw,
        shape={
            "n_heads": 4,
            "d_head": 8,
            "d_model": 32,
            "d_ff": 64,
            "offsets": (1, 2, 3, 4),
        },
    )


def induction() -> Task:
    """T3. Six items (a, b, y), then a, b of one of them: which y?

    To find it, a key of the second layer must hold both a and b of its item, which two heads of the
    first layer bring there (their views are planted). Two items share a with the one asked for and
    two share b, itself among them, and all y differ: knowing one of both is right half of the time
    (``shortcut``), knowing only which y occur one in six (``chance``).

    Split by the quadruples (a, b, another a, another b) of the three items that share something:
    88, 28 and 28 of 144.
    """
    called = torch.stack([torch.tensor(p) for p in permutations(range(4)) if p[2] < p[3]])
    quadruples = torch.cartesian_prod(torch.arange(12), torch.arange(12))  # names of a, of b
    parts = _split(quadruples)
    others = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4))  # share neither

    def draw(generator: torch.Generator, n: int, split: str) -> Examples:
        def order(k: int) -> Tensor:
            return torch.rand(n, k, generator=generator).argsort(1)

        names = called[_pick(parts[split], n, generator)]  # [n, feature, value]
        sharing = torch.tensor([[0, 0], [0, 1], [1, 0]]).expand(n, -1, -1)
        items = torch.cat([sharing, others[order(9)[:, :3]]], 1)  # [n, item, feature]
        a, b = names.gather(2, items.mT).unbind(1)
        y = order(8)[:, :6]
        tokens = torch.stack([a, 4 + b, 8 + y], -1)
        shuffled = tokens.gather(1, order(6)[..., None].expand(-1, -1, 3)).flatten(1)
        return torch.cat([shuffled, tokens[:, 0, :2]], 1), y[:, :1]

    return Task(
        name="induction",
        title="T3: induction on two features, brought together by two heads",
        vocabulary=16,
        length=20,
        classes=8,
        answers=1,
        chance=1 / 6,
        unit="accuracy",
        draw=draw,
        shape={
            "n_layers": 2,
            "n_heads": 4,
            "d_head": 8,
            "d_model": 32,
            "d_ff": 64,
            "offsets": (2, 1, 0, None),
        },
        shortcut=0.5,
    )


def crowd() -> Task:
    """T4. Eight tokens of three kinds and a mark; all eight, at the mark, from a stream of 8.

    Eight heads of width 4, one token each: Dc = 32 in D = 8, so that heads must share directions
    whatever W_O is. Without norms and feed-forward the read-out of token j is linear in
    Σ_i u_i(t_i); it is right on all sequences only if |w_j u_j| exceeds the sum of the other
    |w_j u_i| between any two kinds, a strictly dominant diagonal, so that the u_i span 8
    dimensions: all there are. A W_O that confines all heads to fewer (``shared``: 4,
    ``low_rank``: 2) cannot be right everywhere.

    Split by sequences: 3937, 1312 and 1312 of 6561.
    """
    parts = _split(torch.cartesian_prod(*[torch.arange(3)] * 8))

    def draw(generator: torch.Generator, n: int, split: str) -> Examples:
        tokens = _pick(parts[split], n, generator)
        return torch.cat([tokens, torch.full((n, 1), 3)], 1), tokens

    return Task(
        name="crowd",
        title="T4: eight tokens through a stream with room for them and no more (Dc > D)",
        vocabulary=4,
        length=9,
        classes=3,
        answers=8,
        chance=1 / 3,
        unit="accuracy",
        draw=draw,
        shape={
            "n_heads": 8,
            "d_head": 4,
            "d_model": 8,
            "d_ff": 16,
            "offsets": (1, 2, 3, 4, 5, 6, 7, 8),
        },
    )


@lru_cache(maxsize=1)
def characters() -> Task:
    """T5. The next character of the help topics of Python itself, which need no download.

    Split by topics, one in ten each for validation and test. ``chance`` is the loss on the test
    topics of a reader that knows how frequent characters are.
    """
    documents = [document.text for document in read_text("default")]
    parts = {
        split: "\n".join(d for n, d in enumerate(documents) if _SPLIT_OF[n % 10] == split)
        for split in SPLITS
    }
    alphabet = sorted(set(parts["train"]))
    ids = {c: n for n, c in enumerate(alphabet, 1)}  # 0: a character never seen in training
    coded = {s: torch.tensor([ids.get(c, 0) for c in text]) for s, text in parts.items()}
    length = 64

    def draw(generator: torch.Generator, n: int, split: str) -> Examples:
        text = coded[split]
        start = torch.randint(len(text) - length, (n, 1), generator=generator)
        windows = text[start + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]

    counts = torch.bincount(coded["train"], minlength=len(alphabet) + 1) + 1.0
    seen = (counts / counts.sum()).log()
    return Task(
        name="characters",
        title="T5: the next character",
        vocabulary=len(alphabet) + 1,
        length=length,
        classes=len(alphabet) + 1,
        answers=0,
        chance=-float(seen[coded["test"]].mean()),
        unit="nats per character",
        draw=draw,
        shape={"n_layers": 2, "n_heads": 4, "d_head": 8, "d_model": 32, "d_ff": 64},
    )


#: Each task by name.
TASKS: dict[str, Callable[[], Task]] = {
    "xor": xor,
    "xor_free": lambda: xor(planted=False),
    "threshold": threshold,
    "induction": induction,
    "crowd": crowd,
    "characters": characters,
}

#: Of every ten documents.
_SPLIT_OF = ["train"] * 8 + ["validation", "test"]


def _split(values: Int[Tensor, "value *rest"]) -> dict[str, Tensor]:
    """Shuffled once and for all; a fifth each for validation and test."""
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    held = len(values) // 5
    train = len(values) - 2 * held
    return dict(zip(SPLITS, shuffled.split([train, held, held]), strict=True))


def _pick(
    values: Int[Tensor, "value *rest"], n: int, generator: torch.Generator
) -> Int[Tensor, "n *rest"]:
    return values[torch.randint(len(values), (n,), generator=generator)]
