"""The extras of the package, and the error for one that is not installed."""

from collections.abc import Sequence
from importlib.util import find_spec

from starling.errors import MissingExtraError

SPEECH = ("lhotse", "urllib3", "soundfile", "kaldialign", "sentencepiece", "rensa", "fsspec", "scipy", "tensorboard")
EXTRAS = {
    "compare": ("scipy",),
    "speech": SPEECH,
    "demo": (*SPEECH, "espeakng_loader"),
    "media": (*SPEECH, "av"),
    "vad": (*SPEECH, "onnxruntime", "silero_vad"),
    "cloud": (*SPEECH, "s3fs"),
    "decoding": ("flashlight", "num2words"),
    "report": ("jinja2", "plotly"),
    "serve": (*SPEECH, "python_multipart", "starlette", "uvicorn", "websockets"),
    "lightning": ("lightning",),
    "huggingface": ("accelerate", "transformers"),
    "export": (*SPEECH, "onnx", "onnxruntime", "onnxscript"),
    "ray": ("ray",),
    "monitoring": ("prometheus_client",),
}
"""The modules that each extra in pyproject.toml installs."""


def require(extra: str, what: str, modules: Sequence[str] = ()) -> None:
    """Check that an extra is installed, without importing its modules. `what` names the command or function that needs
    it, `modules` the needed ones of its modules (default: all).

    Raises:
        MissingExtraError: A module is missing; the message contains the command that installs it.
    """
    missing = [module for module in modules or EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f"{what} needs {', '.join(missing)}: pip install 'starling-asr[{extra}]'")
