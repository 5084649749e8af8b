"""The lab: small transformers built here, with W_O in every variant, tasks that tell them apart.

``Transformer(Config(...))`` is a model and ``headmix.load`` takes it; ``TASKS`` are what it may
learn, ``train`` how, ``experiment`` all of it with a null beside each number; ``planted`` holds
models whose heads are known without training.
"""

from headmix.lab import planted
from headmix.lab.cells import CELLS, QUICK, Cell, match
from headmix.lab.equivalences import absorb_blocks, absorb_output, change_basis
from headmix.lab.experiments import against, experiment
from headmix.lab.outputs import OUTPUTS, output_projection
from headmix.lab.stack import Stack, build
from headmix.lab.storage import open_model, save
from headmix.lab.tasks import TASKS, Task
from headmix.lab.training import Trained, train
from headmix.lab.transformer import VARIANTS, Config, Transformer

__all__ = [
    "CELLS",
    "OUTPUTS",
    "QUICK",
    "TASKS",
    "VARIANTS",
    "Cell",
    "Config",
    "Stack",
    "Task",
    "Trained",
    "Transformer",
    "absorb_blocks",
    "absorb_output",
    "against",
    "build",
    "change_basis",
    "experiment",
    "match",
    "open_model",
    "output_projection",
    "planted",
    "save",
    "train",
]
