"""Every metric of headmix as a plain function: ``headmix.metrics.projection_kernel(heads)``."""

from headmix.metrics.composition import composition_k, composition_q, composition_v
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
from headmix.metrics.neurons import ffn_read_participation, ffn_read_share
from headmix.metrics.ov import (
    ov_copying,
    ov_cosine,
    ov_effective_rank,
    ov_gap,
    ov_participation_ratio,
    ov_spectrum,
    ov_stable_rank,
    ov_vocabulary,
)

__all__ = [
    "composition_k",
    "composition_q",
    "composition_v",
    "ffn_read_participation",
    "ffn_read_share",
    "group_overlap",
    "head_frame_spectrum",
    "joint_rank",
    "joint_span",
    "mean_overlap",
    "ov_copying",
    "ov_cosine",
    "ov_effective_rank",
    "ov_gap",
    "ov_participation_ratio",
    "ov_spectrum",
    "ov_stable_rank",
    "ov_vocabulary",
    "principal_angles",
    "projection_kernel",
    "welch_floor",
]
