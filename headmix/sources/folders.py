"""Which files hold a model's weights: in a folder, on the hub, or the one that was named."""

from pathlib import Path

from headmix.sources import gguf, pickles, safetensors
from headmix.sources.stores import BadCheckpoint, Store, inside


def open_store(
    where: Path, *, gguf_file: str | None = None, allow_pickle: bool = False
) -> tuple[Path, Store]:
    """The file, or index of files, with a model's weights, and what its headers say.

    Raises:
        BadCheckpoint: there are none, a file is malformed, or only a pickle is there.
    """
    file = inside(where, gguf_file, "gguf_file") if gguf_file else _weights_file(where)
    return file, _open(file, allow_pickle)


def local(path: str, revision: str | None, local_files_only: bool) -> Path:
    """The folder or file of that name; else the hub's snapshot, without pickles and code."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            path,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"],
        )
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"{path} is no folder or file, and the hub gave none: {reason}") from None
    return Path(folder)


def _weights_file(where: Path) -> Path:
    """The file, or index of files, that holds a folder's weights."""
    if where.is_file():
        return where
    usual = (
        "model.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "pytorch_model.bin.index.json",
    )  # fmt: skip
    for name in usual[:2]:
        if (where / name).is_file():
            return where / name
    for ending in ("*.safetensors", "*.gguf"):
        if len(found := sorted(where.glob(ending))) == 1:
            return found[0]
        if found:
            raise BadCheckpoint(
                f"{where} holds several weight files and no index: name one of "
                + ", ".join(f.name for f in found[:10])
            )
    for name in usual[2:]:
        if (where / name).is_file():
            return where / name
    held = ", ".join(sorted(f.name for f in where.iterdir())[:10]) or "nothing"
    raise BadCheckpoint(
        f"{where} holds no weights: expected model.safetensors, model.safetensors.index.json or a "
        f".gguf file, found {held}"
    )


def _open(file: Path, allow_pickle: bool) -> Store:
    if file.suffix == ".gguf":
        return gguf.open_file(file)
    if file.name.endswith(".safetensors.index.json"):
        return safetensors.open_index(file)
    if file.suffix in pickles.PICKLES or file.name.endswith(".bin.index.json"):
        if not allow_pickle:
            raise pickles.refuse(file)
        return pickles.open_pickles(file)
    return safetensors.open_file(file)
