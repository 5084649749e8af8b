"""AttentionPatterns: where a layer's heads look, from one pass, in sums that add up."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headmix.heads import NotApplicable
from headmix.sums import Sums

#: Numbers taken together while divergences are computed: few enough for a processor's cache.
ELEMENTS = 2**18

#: How far a row of attention weights may sum from one, beside what its precision explains.
SLACK = 1e-4

#: Which rows and keys count; said in every result.
RULE = (
    "Query rows: the tokens of the text that count. Keys: all that a query sees, special tokens "
    "and the start of the sequence included; padding is none, since no head gives it any weight."
)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPatterns(Sums):
    """Sums over query rows for one attention layer, one entry a fold of documents.

    A row ``a_h`` holds the attention weights that head h gives, from one query, to the ``t`` keys
    which that query sees: those to which any head of the layer gives a weight. It sums to one.

    Attributes:
        count: ``[fold]``, query rows.
        documents: ``[fold]``, documents.
        entropy: ``[fold, head]``, Σ H(a_h), in nats.
        first: ``[fold, head]``, Σ of the weight on the first key of the sequence.
        divergence: ``[fold, head, head]``, Σ JS(a_i, a_j), in nats.
        uniform_entropy: ``[fold]``, Σ ln t: what looking everywhere alike would give.
        uniform_first: ``[fold]``, Σ 1/t over the rows that see the first key, likewise.
        shifted_divergence: ``[fold, head, head]``, Σ JS(a_i, a_j moved on): head j looks elsewhere,
            but as sharply (see ``moved_on``).

    Each row is taken in the precision of the pattern (at least float32); all sums are float64.
    """

    entropy: Float[Tensor, "fold head"]
    first: Float[Tensor, "fold head"]
    divergence: Float[Tensor, "fold head head"]
    uniform_entropy: Float[Tensor, "fold"]
    uniform_first: Float[Tensor, "fold"]
    shifted_divergence: Float[Tensor, "fold head head"]

    @classmethod
    def zeros(
        cls, n_heads: int, *, folds: int, device: torch.device | str = "cpu"
    ) -> "AttentionPatterns":
        """Nothing seen yet, of so many query heads."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(folds, *shape, dtype=torch.float64, device=device)

        H = n_heads
        return cls(
            count=zeros(),
            documents=zeros(),
            entropy=zeros(H),
            first=zeros(H),
            divergence=zeros(H, H),
            uniform_entropy=zeros(),
            uniform_first=zeros(),
            shifted_divergence=zeros(H, H),
        )

    @property
    def n_heads(self) -> int:
        return self.entropy.shape[1]

    def __repr__(self) -> str:
        return (
            f"AttentionPatterns({self.n_heads} heads, {int(self.n)} query rows of "
            f"{int(self.documents.sum())} documents in {self.n_folds} folds)"
        )

    def update(
        self,
        pattern: Float[Tensor, "sequence head query key"],
        keep: Bool[Tensor, "sequence query"] | None = None,
        *,
        fold: int,
    ) -> None:
        """Add the rows of one fold, in place.

        Args:
            pattern: attention weights.
            keep: the query rows that count; all by default.
            fold: the fold that the sequences' documents belong to.

        Raises:
            NotApplicable: rows do not sum to one: they are not all of the layer's attention.
        """
        self.forget()
        if keep is None:
            keep = torch.ones(pattern.shape[0], pattern.shape[2], dtype=torch.bool)
        keep = keep.to(pattern.device)
        sequence, query = keep.nonzero(as_tuple=True)
        rows = _distributions(pattern.transpose(1, 2)[keep])
        rows, sequence, query = (x.to(self.count.device) for x in (rows, sequence, query))
        seen = (rows > 0).any(1)
        first = _first_key(seen, sequence, pattern.shape[0])
        length = max(1, ELEMENTS // max(1, rows[:1].numel()))
        for part in torch.arange(len(rows), device=rows.device).split(length):
            self._add(rows[part], seen[part], first[part], query[part], fold)

    def _add(
        self,
        rows: Float[Tensor, "row head key"],
        seen: Bool[Tensor, "row key"],
        first: Int[Tensor, "row"],
        query: Int[Tensor, "row"],
        fold: int,
    ) -> None:
        t = seen.sum(1).double()
        at_first = seen.gather(1, first[:, None]).squeeze(1)
        self.count[fold] += len(rows)
        self.entropy[fold] += _total(_entropy(rows))
        self.first[fold] += _total(rows[torch.arange(len(rows), device=rows.device), :, first])
        self.uniform_entropy[fold] += t.log().sum()
        self.uniform_first[fold] += (at_first / t).sum()
        self.divergence[fold] += _divergences(rows, rows)
        self.shifted_divergence[fold] += _divergences(*moved_on(rows, seen, query))


def _distributions(
    rows: Float[Tensor, "row head key"],
) -> Float[Tensor, "row head key"]:
    """Rows that sum to one, of rows that do so up to the rounding of their precision."""
    total = rows.sum(-1, keepdim=True, dtype=torch.float64)
    off = float((total - 1).abs().max()) if len(rows) else 0.0
    if not off <= SLACK + torch.finfo(rows.dtype).eps:
        low, high = float(total.min()), float(total.max())
        raise NotApplicable(
            f"rows of attention weights sum to {low:.3g} … {high:.3g}, not to 1: part of the "
            "attention goes to a sink that is no key, or this is not all of it"
        )
    precision = torch.promote_types(rows.dtype, torch.float32)
    return (rows / total).to(precision)


def _first_key(
    seen: Bool[Tensor, "row key"], sequence: Int[Tensor, "row"], n_sequences: int
) -> Int[Tensor, "row"]:
    """The first key that any row of the same sequence sees; padding on the left comes before it."""
    ever = torch.zeros(n_sequences, seen.shape[1], device=seen.device)
    ever.index_add_(0, sequence, seen.to(ever))
    return (ever > 0).int().argmax(1)[sequence]


def moved_on(
    rows: Float[Tensor, "row head key"],
    seen: Bool[Tensor, "row key"],
    query: Int[Tensor, "row"],
) -> tuple[Float[Tensor, "row head key"], Float[Tensor, "row head key"]]:
    """Rows with the keys that they see in front, and the same moved on along these, cyclically.

    How far depends on the query's position alone, by a sequence that covers all distances alike
    (multiples of the golden ratio). Over many queries every key then meets every other as often:
    the second rows are as sharp as the first, at places that have nothing to do with them.
    """
    order = seen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    front = rows.gather(2, order[:, None].expand_as(rows))
    t = seen.sum(1, keepdim=True)
    share = torch.frac((query[:, None] + 1) * ((5**0.5 - 1) / 2))
    rank = torch.arange(rows.shape[2], device=rows.device).expand_as(seen)
    to = torch.where(rank < t, (rank + (share * t).long()) % t.clamp(min=1), rank)
    return front, front.gather(2, to[:, None].expand_as(rows))


def _entropy(rows: Float[Tensor, "*row key"]) -> Float[Tensor, "*row"]:
    """−Σ a ln a."""
    logarithm = rows.clamp(min=torch.finfo(rows.dtype).tiny).log_()  # 0 ln 0 is 0
    return -logarithm.mul_(rows).sum(-1)


def _divergences(
    a: Float[Tensor, "row head key"], b: Float[Tensor, "row head key"]
) -> Float[Tensor, "head head"]:
    """Σ over rows of JS(a_i, b_j) = H((a_i + b_j)/2) − (H(a_i) + H(b_j))/2 for i < j, mirrored."""
    H = a.shape[1]
    own_a, own_b = _entropy(a), _entropy(b)
    out = a.new_zeros(H, H, dtype=torch.float64)
    for i in range(H - 1):
        mixed = _entropy((a[:, i : i + 1] + b[:, i + 1 :]) / 2)
        between = mixed - (own_a[:, i : i + 1] + own_b[:, i + 1 :]) / 2
        out[i, i + 1 :] = _total(between.clamp(min=0))  # rounding may leave less than nothing
    return out + out.T


def _total(of_rows: Float[Tensor, "row *rest"]) -> Float[Tensor, "*rest"]:
    return of_rows.sum(0, dtype=torch.float64)
