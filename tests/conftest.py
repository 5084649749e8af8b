"""Shapes and types in headmix's signatures are checked while the tests run."""

from jaxtyping import install_import_hook

install_import_hook("headmix", "beartype.beartype")
