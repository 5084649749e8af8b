"""The lab: small transformers built here, with W_O in every variant, tasks that tell them apart.

Everything METHODS calls "local experiments": ``Transformer(Config(...))`` is a model,
``tasks`` what it may learn, ``train`` how, ``experiment`` all of it with a null beside each number,
and ``planted`` models whose heads are known without training.
"""

from headmix.lab import planted
from headmix.lab.outputs import OUTPUTS, output_projection
from headmix.lab.storage import open_model, save
from headmix.lab.transformer import VARIANTS, Config, Transformer

__all__ = [
    "OUTPUTS",
    "VARIANTS",
    "Config",
    "Transformer",
    "open_model",
    "output_projection",
    "planted",
    "save",
]
