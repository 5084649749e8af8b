"""patterns: the attention weights that a module hands out, caught on their way.

Only a kernel that computes the whole pattern has it to give. ``eager`` switches transformers to
that one; what comes out is recognised by its shape and by rows that sum to one.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headmix.attention import SLACK
from headmix.layouts import Attention
from headmix.model import PatternWatcher
from headmix.registry import NotApplicable

#: Where transformers' configs say which kernel runs; setting it there changes nothing else.
KERNEL = "_attn_implementation_internal"


@contextmanager
def eager(root: nn.Module) -> Iterator[None]:
    """Inside the context, every transformers module runs the kernel that has the whole pattern."""
    before = [(c, getattr(c, KERNEL)) for c in _configs(root)]
    try:
        for config, _ in before:
            setattr(config, KERNEL, "eager")
        yield
    finally:
        for config, kernel in before:
            setattr(config, KERNEL, kernel)


def _configs(root: nn.Module) -> list[Any]:
    """The configs of a model, its parts and theirs, each once."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in root.modules()]
    while waiting:
        config: Any = waiting.pop()
        if id(config) not in found and KERNEL in getattr(config, "__dict__", {}):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


@contextmanager
def watch_module(root: nn.Module, attention: Attention, watcher: PatternWatcher) -> Iterator[None]:
    """Call ``watcher`` with the pattern of one attention module at its own call in each pass.

    The module, or one inside it on the way to its value projection, returns the pattern beside its
    output; modules that do so only when asked are asked. Where none does, the watcher gets the
    reason.
    """
    seen: list[Tensor] = []
    calls = 0

    def look(module: nn.Module, inputs: object, output: Any) -> None:
        items = output if isinstance(output, tuple | list) else (output,)
        seen.extend(t for t in items if _is_pattern(t, attention.n_heads))

    def done(module: nn.Module, inputs: object, output: Any) -> None:
        nonlocal calls
        calls += 1
        found, seen[:] = seen[:1], []
        if calls == attention.call + 1:
            watcher(found[0] if found else _none(module, attention))

    def restart(module: nn.Module, inputs: object) -> None:
        nonlocal calls
        calls, seen[:] = 0, []

    handles = [root.register_forward_pre_hook(restart)]
    for path in _inside(root, attention):
        module = root.get_submodule(path)
        if (asked := _asked(module)) is not None:
            handles.append(module.register_forward_pre_hook(asked, with_kwargs=True))
        handles.append(module.register_forward_hook(look))
    handles.append(root.get_submodule(attention.path).register_forward_hook(done))
    try:
        with eager(root):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _inside(root: nn.Module, attention: Attention) -> list[str]:
    """The modules that may return the pattern: from the value projection's owner up to the layer.

    A bridge of TransformerLens has a hook point of its own for it.
    """
    paths = [f"{attention.path}.hook_pattern".lstrip(".")]
    paths = [p for p in paths if p in dict(root.named_modules())]
    path = attention.v.path
    while path != attention.path and path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return paths


def _asked(module: nn.Module) -> Callable[..., Any] | None:
    """A hook that asks a module for its pattern, where it has to be asked."""
    signature = inspect.signature(module.forward)
    if "output_attentions" not in signature.parameters:
        return None

    def ask(module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.arguments["output_attentions"] = True
        return call.args, call.kwargs

    return ask


def _is_pattern(t: Any, n_heads: int) -> bool:
    """[sequence, head, query, key], nothing negative, and some row that sums to one."""
    if not isinstance(t, Tensor) or t.ndim != 4 or t.shape[1] != n_heads:
        return False
    if not t.is_floating_point() or not t.numel() or bool((t < 0).any()):
        return False
    off = (t.sum(-1).float() - 1).abs().amin()
    return bool(off <= 100 * SLACK)


def _none(module: nn.Module, attention: Attention) -> NotApplicable:
    return NotApplicable(
        f"{type(module).__name__} returned no attention weights beside its output, even with eager "
        f"attention: nothing of shape [sequence, {attention.n_heads} heads, query, key] whose rows "
        "sum to one"
    )
