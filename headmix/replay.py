"""replay: forward passes that leave out the blocks before a layer.

What is done to a layer cannot change what came before it. So the blocks before it return what they
returned in a pass in which nothing was done, and only what follows is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from headmix.blocks import block_path
from headmix.model import AttentionModel

_FORWARD = "forward"


class Replay:
    """What every block of a model returned in one pass, and passes that start from it.

    Args:
        model: a model that can be run.
        layers: the layers whose blocks are known by name.

    Attributes:
        refused: layers that must be run from the beginning, with the reason.
    """

    def __init__(self, model: AttentionModel, layers: Sequence[str]) -> None:
        assert model.module is not None
        self.model, self.root = model, model.module
        self.block_of: dict[str, tuple[str, int]] = {}
        self.refused: dict[str, str] = {}
        for layer in layers:
            path = block_path(model, layer)
            if path:
                self.block_of[layer] = (path, model.sites[layer].attention.call)
            else:
                self.refused[layer] = "no block was found around it"
        self.paths = sorted({path for path, _ in self.block_of.values()})
        self.returned: list[tuple[str, Any]] = []
        self.begun: dict[tuple[str, int], int] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep what the blocks return in the forward pass inside the context."""
        self.returned, self.begun = [], {}
        calls: dict[str, int] = {}
        inside: list[str] = []

        def enter(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any) -> None:
                calls[path] = calls.get(path, -1) + 1
                if inside:
                    self._refuse_all(f"blocks lie within blocks: {path} within {inside[-1]}")
                inside.append(path)
                self.begun[path, calls[path]] = len(self.returned)

            return hook

        def leave(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                inside.pop()
                self.returned.append((path, output))

            return hook

        with ExitStack() as stack:
            for path in self.paths:
                module = self.root.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(enter(path)).remove)
                stack.callback(module.register_forward_hook(leave(path)).remove)
            yield

    def _refuse_all(self, reason: str) -> None:
        self.refused |= dict.fromkeys(self.block_of, reason)

    def skipped(self, layer: str) -> int:
        """How many earlier calls of the layer's own module are left out."""
        if layer in self.refused:
            return 0
        path, call = self.block_of[layer]
        return sum(p == path for p, _ in self._before(path, call))

    def _before(self, path: str, call: int) -> list[tuple[str, Any]]:
        return self.returned[: self.begun.get((path, call), 0)]

    @contextmanager
    def start_at(self, layer: str) -> Iterator[None]:
        """Inside the context, forward passes with the recorded inputs begin at a layer's block.

        Each module's ``forward`` is put back whatever happens. A refused layer is run whole.
        """
        before = [] if layer in self.refused else self._before(*self.block_of[layer])
        kept: dict[str, list[Any]] = {}
        for path, output in before:
            kept.setdefault(path, []).append(output)
        with ExitStack() as stack:
            for path, outputs in kept.items():
                stack.enter_context(_returning(self.root, self.root.get_submodule(path), outputs))
            yield


@contextmanager
def _returning(root: nn.Module, module: nn.Module, outputs: Sequence[Any]) -> Iterator[None]:
    """In each pass, a module's first calls return these; later ones run it."""
    own = module.__dict__.get(_FORWARD)
    real = module.forward
    calls = 0

    def restart(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return outputs[calls - 1] if calls <= len(outputs) else real(*args, **kwargs)

    handle = root.register_forward_pre_hook(restart)
    module.__dict__[_FORWARD] = forward
    try:
        yield
    finally:
        handle.remove()
        if own is None:
            del module.__dict__[_FORWARD]
        else:
            module.__dict__[_FORWARD] = own
