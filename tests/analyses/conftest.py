"""The analyses are scripts: their folder goes on the path, as it does when they run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "analyses"))
