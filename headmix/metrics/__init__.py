"""Every metric of headmix as a plain function: ``headmix.metrics.projection_kernel(heads)``."""

from headmix.metrics.attention import attention_entropy, attention_js, sink_mass
from headmix.metrics.composition import composition_k, composition_q, composition_v
from headmix.metrics.dimensions import (
    concat_effective_rank,
    concat_k99,
    concat_participation_ratio,
    head_effective_rank,
    head_k99,
    head_participation_ratio,
    output_effective_rank,
    output_k99,
    output_participation_ratio,
)
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
from headmix.metrics.mixing import (
    cancellation_ratio,
    head_norm,
    interference_ratio,
    pair_interference,
    variance_share,
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
from headmix.metrics.prediction import group_loo_r2, loo_r2
from headmix.metrics.redundancy import (
    cca,
    cka,
    gaussian_mi,
    group_cka,
    total_correlation,
)

__all__ = [
    "attention_entropy",
    "attention_js",
    "cancellation_ratio",
    "cca",
    "cka",
    "composition_k",
    "composition_q",
    "composition_v",
    "concat_effective_rank",
    "concat_k99",
    "concat_participation_ratio",
    "ffn_read_participation",
    "ffn_read_share",
    "gaussian_mi",
    "group_cka",
    "group_loo_r2",
    "group_overlap",
    "head_effective_rank",
    "head_frame_spectrum",
    "head_k99",
    "head_norm",
    "head_participation_ratio",
    "interference_ratio",
    "joint_rank",
    "joint_span",
    "loo_r2",
    "mean_overlap",
    "output_effective_rank",
    "output_k99",
    "output_participation_ratio",
    "ov_copying",
    "ov_cosine",
    "ov_effective_rank",
    "ov_gap",
    "ov_participation_ratio",
    "ov_spectrum",
    "ov_stable_rank",
    "ov_vocabulary",
    "pair_interference",
    "principal_angles",
    "projection_kernel",
    "sink_mass",
    "total_correlation",
    "variance_share",
    "welch_floor",
]
