"""A metric defined in a user's own script is a metric like any other."""

from collections.abc import Iterator

import pytest
import torch
from small import small_model

import headmix as hm
from headmix import registry


@pytest.fixture(autouse=True)
def _forget_afterwards() -> Iterator[None]:
    known = hm.catalogue()  # with headmix's own, which register only once
    yield
    registry._CATALOGUE.clear()
    registry._CATALOGUE.update(known)


def define() -> registry.Metric:
    @hm.metric(
        title="Output norm",
        formula="‖M_h‖_F",
        dims=("head",),
        range=(0, float("inf")),
        null=lambda heads: (torch.zeros(()), None),
        null_text="a head that moves nothing",
        invariant=("gauge", "rotation"),
    )
    def output_norm(heads: hm.Heads) -> torch.Tensor:
        """How much a head moves."""
        return (heads.W_V[heads.kv_index] @ heads.W_O).norm(dim=(1, 2))

    return output_norm


def test_it_joins_the_catalogue_and_the_results() -> None:
    output_norm = define()
    assert hm.catalogue()["output_norm"] is output_norm
    model = small_model()
    ds = hm.measure(model)
    assert "projection_kernel" in ds
    expected = output_norm(model.heads("L1"))
    assert torch.equal(torch.from_numpy(ds.output_norm.sel(layer="L1").values), expected)
    assert ds.output_norm.dims == ("layer", "head")
    assert ds.output_norm_null_mean.dims == ("layer",)
    assert "output_norm_null_sd" not in ds
    assert ds.output_norm.attrs["title"] == "Output norm"
    assert ds.output_norm.attrs["doc"] == "How much a head moves."


def test_defining_it_again_replaces_it() -> None:
    first, second = define(), define()
    assert hm.catalogue()["output_norm"] is second is not first


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'joint_span' exists in headmix\.metrics"):

        @hm.metric(title="", formula="", dims=(), range=(0, 1))
        def joint_span(heads: hm.Heads) -> torch.Tensor:
            return heads.W_O.norm()


def test_an_unknown_need_is_refused_with_those_known() -> None:
    with pytest.raises(TypeError, match=r"among \[.*'heads', .*'joint', 'layers'.*logits"):

        @hm.metric(title="", formula="", dims=(), range=(0, 1))
        def odd(logits: torch.Tensor) -> torch.Tensor:
            return logits


def test_an_unknown_invariance_is_refused() -> None:
    with pytest.raises(TypeError, match=r"invariances among \['gauge'.*got \['shift'\]"):

        @hm.metric(title="", formula="", dims=(), range=(0, 1), invariant=["shift"])
        def odd(heads: hm.Heads) -> torch.Tensor:
            return heads.W_O.norm()


def test_a_metric_still_looks_like_its_function() -> None:
    metric = hm.metrics.projection_kernel
    assert metric.__name__ == metric.name == "projection_kernel"
    assert metric.__doc__.startswith("How far two heads write")
    assert repr(metric) == "<metric projection_kernel(heads) → [head, head_b]>"
