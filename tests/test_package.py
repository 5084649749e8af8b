"""The package as a whole: cheap to import, explicit about what is public."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import headmix as hm

HEAVY = ("torch", "transformers", "transformer_lens", "plotly", "sklearn", "xarray", "scipy")


def test_import_is_quick_and_brings_nothing_heavy() -> None:
    script = (
        "import sys, time; start = time.perf_counter(); import headmix\n"
        "print(time.perf_counter() - start)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    seconds, brought = zip(*(run.stdout.split("\n")[:2] for run in runs), strict=True)
    assert min(map(float, seconds)) < 0.5
    assert set(brought) == {"[]"}


@pytest.mark.parametrize("name", hm.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    value = getattr(hm, name)
    assert inspect.getdoc(value)
    assert getattr(hm, name) is value


def test_no_module_hides_a_public_function() -> None:
    modules = {info.name for info in pkgutil.iter_modules(hm.__path__)}
    assert modules & set(hm.__all__) == {"lab", "metrics"}  # themselves public


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'lod'; it has \[.*'load'"):
        hm.lod  # noqa: B018


def test_dir_lists_what_is_public() -> None:
    assert dir(hm) == sorted(hm.__all__)


def test_every_module_says_what_it_is_for() -> None:
    for info in pkgutil.walk_packages(hm.__path__, "headmix."):
        if info.name != "headmix.__main__":
            assert importlib.import_module(info.name).__doc__, info.name


def test_constraints_pin_every_dependency_to_one_version() -> None:
    root = Path(__file__).parents[1]
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line for line in pins)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {line.split("==")[0].lower() for line in pins}
    assert {w.split(">")[0].lower() for w in wanted} <= names
