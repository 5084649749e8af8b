"""load: a name, a path or an object in, an AttentionModel out."""
from headmix.model import AttentionModel

def load(model, **kw) -> AttentionModel:
    raise ValueError("not yet")
