"""Configurations of published models, of which recipes are checked without loading torch."""

import json
from pathlib import Path
from typing import Any

from starling.extras import require


def published_config(checkpoint: Path) -> dict[str, Any]:
    """The configuration in a folder in the format of `transformers`, or of a model of the Hugging Face hub, which is
    kept in the cache of `transformers`.

    Raises ValueError for anything else, and without a network if the model is not in the cache.
    """
    path = checkpoint / "config.json"
    try:
        if not path.is_file() and not checkpoint.exists() and _is_name(checkpoint):
            require("huggingface", f"model.checkpoint: {checkpoint.as_posix()}", ("transformers",))
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(checkpoint.as_posix(), "config.json"))
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint: {checkpoint.as_posix()} is no folder with a config.json, and the hub of models gives none of "
            f"this name ({reason}). Where there is a network, fetch it with `hf download NAME`, or with "
            "`--local-dir FOLDER` and give the folder"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint: {path} is no configuration")
    return found


def _is_name(checkpoint: Path) -> bool:
    """Whether it may be `owner/model`."""
    return not checkpoint.is_absolute() and len(checkpoint.parts) == 2 and ".." not in checkpoint.parts
