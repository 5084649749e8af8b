"""headmix: what the attention output projection does with the heads.

The names below are the public interface. They are imported on first use, so that
``import headmix`` costs milliseconds and pulls in neither torch nor transformers. No module
carries the name of a public function: importing it would hide the function behind the module.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headmix import lab, metrics
    from headmix.activations import read_outs
    from headmix.comparison import compare
    from headmix.controls import untrained
    from headmix.heads import Heads
    from headmix.interventions import Interventions
    from headmix.laws import verify
    from headmix.layouts import Layout
    from headmix.logistic import logistic_accuracy
    from headmix.measurement import measure
    from headmix.model import AttentionModel
    from headmix.page import report
    from headmix.plots import plot
    from headmix.registry import NotApplicable, catalogue, metric
    from headmix.results import open_results, save
    from headmix.sources import load

_HOME = {
    "AttentionModel": "headmix.model",
    "Heads": "headmix.heads",
    "Interventions": "headmix.interventions",
    "Layout": "headmix.layouts",
    "NotApplicable": "headmix.registry",
    "catalogue": "headmix.registry",
    "compare": "headmix.comparison",
    "lab": "headmix.lab",
    "load": "headmix.sources",
    "logistic_accuracy": "headmix.logistic",
    "measure": "headmix.measurement",
    "metric": "headmix.registry",
    "metrics": "headmix.metrics",
    "open_results": "headmix.results",
    "plot": "headmix.plots",
    "read_outs": "headmix.activations",
    "report": "headmix.page",
    "save": "headmix.results",
    "untrained": "headmix.controls",
    "verify": "headmix.laws",
}

__all__ = [
    "AttentionModel",
    "Heads",
    "Interventions",
    "Layout",
    "NotApplicable",
    "catalogue",
    "compare",
    "lab",
    "load",
    "logistic_accuracy",
    "measure",
    "metric",
    "metrics",
    "open_results",
    "plot",
    "read_outs",
    "report",
    "save",
    "untrained",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'headmix' has no attribute {name!r}; it has {__all__}")
    home = importlib.import_module(_HOME[name])
    value = home if name in ("lab", "metrics") else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
