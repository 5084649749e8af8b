"""Results on disk: one netCDF file, written whole, and safe to open from strangers."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr

from headmix.files import whole_file
from headmix.measurement import FORMAT

#: DEFLATE cannot do better, so a file that claims more numbers than this holds none of them.
_LARGEST_COMPRESSION = 1032

# netCDF text ends at a NUL and is UTF-8, which has no lone surrogates; tokens may hold either.
_UNSTORABLE = re.compile("[\\\\\0\ud800-\udfff]")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")


def save(ds: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write a Dataset from ``measure`` as a netCDF 4 file.

    Any netCDF or HDF5 tool reads it. In text, the backslash, NUL and lone surrogates are written
    as ``\\u005c``, ``\\u0000``, ``\\ud800`` …; ``open_results`` turns them back.

    Returns:
        The path written. The file appears whole or not at all; an older one is replaced.

    Raises:
        ValueError: the Dataset does not come from ``measure``.
        OSError: the folder does not exist or cannot be written to.
    """
    if "headmix_format" not in ds.attrs:
        raise ValueError(
            "save takes a Dataset from headmix.measure; this one has no headmix_format"
        )
    stored = _map_text(ds, _escape)
    encoding = {str(name): _encoding(variable) for name, variable in stored.variables.items()}
    # in memory first: where a disk is full, HDF5 takes the whole process down with it
    content = stored.to_netcdf(engine="h5netcdf", encoding=encoding)
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def open_results(path: str | os.PathLike[str]) -> xr.Dataset:
    """Read a file that ``save`` wrote, into memory.

    Nothing in the file is executed, and nothing outside it is read.

    Raises:
        ValueError: there is no such file, it is damaged, it holds no headmix results, or a newer
            headmix wrote it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path}: not a headmix results file (not netCDF 4)")
    try:
        _refuse_foreign(path)
        with xr.open_dataset(path, engine="h5netcdf") as opened:
            ds = opened.load()
        return _map_text(ds, _unescape)
    except _Refused:
        raise
    except Exception as error:  # a damaged file can fail anywhere inside HDF5
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: damaged or truncated ({reason})") from error


class _Refused(ValueError):
    """The file can be read, and must not be."""


def _refuse_foreign(path: Path) -> None:
    """Check format and layout from the headers, before xarray looks at the file."""
    limit = _LARGEST_COMPRESSION * path.stat().st_size
    with h5py.File(path, "r") as file:
        version = file.attrs.get("headmix_format")
        if not isinstance(version, str) or not version.isdecimal():
            raise _Refused(f"{path}: not a headmix results file (it has no headmix_format)")
        if int(version) > FORMAT:
            raise _Refused(
                f"{path}: written by a newer headmix (format {version}; this one reads up to "
                f"{FORMAT}): upgrade headmix"
            )
        for name in file:
            if (reason := _foreign(file, name, limit)) is not None:
                raise _Refused(f"{path}: refused, {name!r} {reason}")


def _foreign(file: h5py.File, name: str, limit: int) -> str | None:
    """Why an entry is not something ``save`` writes, or None."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        return "is a link"
    entry = file[name]
    if not isinstance(entry, h5py.Dataset):
        return "is a group"
    if entry.external or entry.is_virtual:
        return "keeps its data in another file"
    if entry.dtype.kind not in "fiubS" or entry.compression not in (None, "gzip"):
        return f"has type {entry.dtype}, compression {entry.compression}"
    if entry.size * entry.dtype.itemsize > limit:
        return f"claims shape {entry.shape}, more than a file of this size can hold"
    return None


def _encoding(variable: xr.Variable) -> dict[str, Any]:
    compact = {"zlib": True, "complevel": 4} if variable.ndim else {}
    if _is_text(variable):
        return compact | {"dtype": "S1"}  # characters, which compress, where strings do not
    return compact | ({"_FillValue": None} if variable.dtype.kind == "f" else {})


def _is_text(variable: xr.Variable) -> bool:
    return variable.dtype.kind in "OUST"


def _map_text(ds: xr.Dataset, function: Callable[[str], str]) -> xr.Dataset:
    """The same Dataset, every text in variables and attributes passed through ``function``."""
    mapped = ds.copy()
    for name, variable in ds.variables.items():
        values = variable.values
        if _is_text(variable):
            texts = [function(_text(value)) for value in values.ravel()]
            values = np.array(texts, dtype=object).reshape(values.shape)
        mapped[name] = (variable.dims, values, _map_attributes(variable.attrs, function))
    mapped.attrs = _map_attributes(ds.attrs, function)
    return mapped


def _map_attributes(attrs: dict[Any, Any], function: Callable[[str], str]) -> dict[Any, Any]:
    return {k: function(v) if isinstance(v, str) else v for k, v in attrs.items()}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _escape(text: str) -> str:
    return _UNSTORABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
