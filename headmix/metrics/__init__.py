"""Every metric of headmix as a plain function: ``headmix.metrics.projection_kernel(heads)``."""

from headmix.metrics.geometry import (
    group_overlap,
    head_frame_spectrum,
    joint_rank,
    joint_span,
    mean_overlap,
    principal_angles,
    projection_kernel,
    welch_floor,
)

__all__ = [
    "group_overlap",
    "head_frame_spectrum",
    "joint_rank",
    "joint_span",
    "mean_overlap",
    "principal_angles",
    "projection_kernel",
    "welch_floor",
]
