"""torch.nn.MultiheadAttention, alone or inside anything (nn.TransformerEncoder, …).

It calls its output projection functionally, so a hook on ``out_proj`` never fires. Watching such a
layer therefore runs PyTorch's own attention function once more on the same arguments, with the
identity in place of the output projection: what comes back is the concatenation z.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from headmix.heads import Heads
from headmix.layouts import Attention, Layout, Projection, name_layers
from headmix.model import AttentionModel, PatternWatcher, Replacer, Watcher, token_factors
from headmix.sources.assembly import streams_of

_FORWARD = inspect.signature(nn.MultiheadAttention.forward)


def from_module(
    module: nn.Module,
    *,
    name: str | None = None,
    tokenizer: Any = None,
    dtype: torch.dtype = torch.float32,
) -> AttentionModel:
    """A module that is or contains nn.MultiheadAttention."""
    return AttentionModel(
        name=name or type(module).__name__,
        sites=find_sites(module, dtype=dtype),
        module=module,
        provenance={"source": "torch.nn.MultiheadAttention", "class": type(module).__name__},
        example=(lambda: _example(module)) if isinstance(module, nn.MultiheadAttention) else None,
        tokenizer=tokenizer,
    )


def _example(mha: nn.MultiheadAttention, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = mha.out_proj.weight
    shape = (1, length) if mha.batch_first else (length, 1)
    q, k, v = (
        torch.randn(*shape, width, generator=generator).to(weight)
        for width in (mha.embed_dim, mha.kdim, mha.vdim)
    )
    return q, k, v


def find_sites(
    root: nn.Module, *, dtype: torch.dtype = torch.float32
) -> Mapping[str, "MultiheadSite"]:
    """Every nn.MultiheadAttention inside a module, as layers in order."""
    found = []
    for path, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            H, d = module.num_heads, module.head_dim
            rows = torch.arange(H * d).reshape(H, d)
            dot = "." if path else ""
            found.append(
                Attention(
                    name=path,
                    path=path,
                    layout=Layout(o="out_proj", v="in_proj", order="thirds", n_heads=H),
                    o=Projection(f"{path}{dot}out_proj", rows),
                    v=Projection(path, rows),
                    cross="multihead_attn" in path,  # its name in nn.TransformerDecoderLayer
                )
            )
    return {a.name: MultiheadSite(a, root, dtype) for a in name_layers(found)}


@dataclass(eq=False)
class MultiheadSite:
    """One nn.MultiheadAttention inside a live module."""

    attention: Attention
    root: nn.Module
    dtype: torch.dtype = torch.float32
    values: str = "exact"
    notes: tuple[str, ...] = ()
    _shift: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)

    @property
    def _module(self) -> nn.MultiheadAttention:
        module = self.root.get_submodule(self.attention.path)
        assert isinstance(module, nn.MultiheadAttention)
        return module

    def _projections(self) -> tuple[Tensor, Tensor, Tensor]:
        mha = self._module
        joint: Tensor | None = mha.in_proj_weight  # None where keys or values have other widths
        if joint is None:
            return mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight
        W_Q, W_K, W_V = joint.chunk(3)
        return W_Q, W_K, W_V

    def heads(self) -> Heads:
        mha, H = self._module, self.attention.n_heads

        def copy(weight: Tensor) -> Tensor:  # never a view of the user's own
            return weight.detach().to("cpu", self.dtype, copy=True).contiguous()

        def per_head(weight: Tensor) -> Tensor:  # [H·d, in] → [head, in, d]
            return copy(weight.unflatten(0, (H, -1)).mT)

        W_Q, W_K, W_V = map(per_head, self._projections())
        b_V = (
            None if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)[2].unflatten(0, (H, -1))
        )
        b_O = mha.out_proj.bias
        stream, kv_stream = streams_of(self.attention)
        return Heads(
            W_O=copy(mha.out_proj.weight.T.unflatten(0, (H, -1))),
            W_V=W_V,
            W_Q=W_Q,
            W_K=W_K,
            b_V=None if b_V is None else copy(b_V),
            b_O=None if b_O is None else copy(b_O),
            layer=self.attention.name,
            stream=stream,
            kv_stream=kv_stream,
        )

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            z, _ = self._attend(args, kwargs)
            out = output[0]
            watcher(*(t.transpose(0, 1) if self._sequence_first(t) else t for t in (z, out)))

        with self._hooked(hook):
            yield

    @contextmanager
    def watch_attention(self, watcher: PatternWatcher) -> Iterator[None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            _, pattern = self._attend(args, kwargs, need_weights=True)
            watcher(pattern if pattern.ndim == 4 else pattern[None])

        with self._hooked(hook):
            yield

    @contextmanager
    def replace_z(self, replacer: Replacer, *, skipped: int = 0) -> Iterator[None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            z, _ = self._attend(args, kwargs)
            flip = self._sequence_first(z)
            z = replacer(z.transpose(0, 1) if flip else z)
            return (self._module.out_proj(z.transpose(0, 1) if flip else z), *output[1:])

        with self._hooked(hook):
            yield

    @contextmanager
    def shift_values(
        self, shift: Float[Tensor, "kv_head d_head"], *, uneven: bool = False
    ) -> Iterator[None]:
        def shifted(values: Tensor) -> Tensor:
            added = shift.flatten().to(values)
            return values + (token_factors(values) * added if uneven else added)

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            mixed = self._module.out_proj(self._attend(args, kwargs)[0])
            return (mixed, *output[1:])

        self._shift = shifted
        try:
            with self._hooked(hook):
                yield
        finally:
            self._shift = None

    @contextmanager
    def _hooked(self, hook: Any) -> Iterator[None]:
        # PyTorch's fused inference path would pass this module by, or pack padded batches into
        # nested tensors, in which tokens are no longer where they were.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        handle = self._module.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            torch.backends.mha.set_fastpath_enabled(fused)

    def _sequence_first(self, t: Tensor) -> bool:
        return t.ndim == 3 and not self._module.batch_first

    def _attend(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, need_weights: bool = False
    ) -> tuple[Tensor, Any]:
        """z for the given arguments of forward, in the layout of forward's own output.

        With it the attention weights [sequence, head, query, key], if needed: for one sequence
        alone [head, query, key].
        """
        mha = self._module
        call = _FORWARD.bind(mha, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        q, k, v = given["query"], given["key"], given["value"]
        flip = mha.batch_first and q.ndim == 3
        if flip:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        W_Q, W_K, W_V = self._projections()
        bias: Tensor | None = mha.in_proj_bias
        b_V: Tensor | None = None
        if bias is not None:
            b_Q, b_K, b_V = bias.chunk(3)
            bias = torch.cat([b_Q, b_K, torch.zeros_like(b_V)])
        v = functional.linear(v, W_V, b_V)  # values are projected here, where they can be shifted
        if self._shift is not None:
            v = self._shift(v)
        identity = torch.eye(mha.embed_dim).to(v)
        z, pattern = functional.multi_head_attention_forward(
            q, k, v, mha.embed_dim, mha.num_heads, None, bias,
            mha.bias_k, mha.bias_v, mha.add_zero_attn, 0.0,
            identity, None,
            training=False,
            key_padding_mask=given["key_padding_mask"],
            need_weights=need_weights,
            average_attn_weights=False,
            attn_mask=given["attn_mask"],
            is_causal=given["is_causal"] and given["attn_mask"] is not None,
            use_separate_proj_weight=True,
            q_proj_weight=W_Q,
            k_proj_weight=W_K,
            v_proj_weight=identity,
        )  # fmt: skip
        return z.transpose(0, 1) if flip else z, pattern
