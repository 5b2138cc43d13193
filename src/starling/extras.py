"""The optional parts of an installation, and the error for one that is missing."""

from importlib.util import find_spec

from starling.errors import MissingExtraError

SPEECH = (
    *("lhotse", "urllib3", "soundfile", "kaldialign", "sentencepiece"),
    *("rensa", "fsspec", "matplotlib", "scipy", "tensorboard"),
)
EXTRAS = {
    "speech": SPEECH,
    "demo": (*SPEECH, "espeakng_loader"),
    "dask": (*SPEECH, "distributed"),
    "cloud": (*SPEECH, "s3fs"),
    "report": ("jinja2", "plotly"),
}
"""The modules that each extra of pyproject.toml brings."""


def require(extra: str, what: str) -> None:
    """Check that an extra is installed, without importing any of it.

    Raises:
        MissingExtraError: it is not; the message names `what` needs it and the line that installs it.
    """
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f"{what} needs {', '.join(missing)}: pip install 'starling-asr[{extra}]'")
