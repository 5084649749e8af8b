"""Every metric of headmix as a plain function: ``headmix.metrics.projection_kernel(heads)``."""

from headmix.metrics.geometry import projection_kernel

__all__ = ["projection_kernel"]
