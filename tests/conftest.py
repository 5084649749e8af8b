"""Shapes and types in headmix's signatures are checked while the tests run."""

import torch
from chromium import browser, visit  # noqa: F401  fixtures of the tests that need a browser
from jaxtyping import install_import_hook

install_import_hook("headmix", "beartype.beartype")

# the matrices here are small: threads would wait for one another longer than they compute
torch.set_num_threads(1)

# doctests are looked for in every file, but two files of one name cannot both be imported as one
collect_ignore_glob = ["*conftest.py"]
