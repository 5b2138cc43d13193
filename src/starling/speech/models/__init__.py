"""Acoustic models, each of which has a configuration and a network that is built from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

from pydantic import (
    Field,
    PlainSerializer,
    SerializationInfo,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from starling.configuration import ProblemsError
from starling.errors import ConfigError
from starling.registry import Registry
from starling.speech.models.architectures import Architecture, AttentionConfig, BuiltIn

if TYPE_CHECKING:
    from torch import nn

    N = TypeVar("N", bound=nn.Module)

__all__ = ["Architecture", "ModelConfig", "build_model", "count_parameters", "model_config"]

MODELS: Mapping[str, type[Architecture]] = {each.model_fields["name"].default: each for each in get_args(BuiltIn)}
_ARCHITECTURES: Registry[type[Architecture]] = Registry(
    MODELS,
    "starling.models",
    accepts=lambda found: isinstance(found, type) and issubclass(found, Architecture),
    wanted="a class that inherits from starling.speech.models.Architecture",
)
_NETWORKS = Registry[Any]({}, "starling.networks", accepts=callable, wanted="a class", prefix="NETWORK: ")
_KEYS = dict.fromkeys(key for each in MODELS.values() for key in each.model_fields)
"""The keys of all models, each with the value null, which has the same meaning as omitting the key."""


def _of_its_name(value: Any, handler: ValidatorFunctionWrapHandler) -> Architecture:
    if isinstance(value, Architecture):
        return value
    if not isinstance(value, dict) or not isinstance(name := value.get("name", "blstm"), str):
        found: Architecture = handler(value)  # the error states what is expected
        return found
    try:
        kind = _ARCHITECTURES.find(name)
        if _ARCHITECTURES.is_outside(name):
            _network(kind)
    except ConfigError as error:
        raise ProblemsError(f"model.name: {error}") from error
    given = {key: each for key, each in value.items() if each is not None or key not in _KEYS}
    return kind.model_validate(given | {"name": name})


def _network(kind: type[Architecture]) -> Any:
    """The class of an architecture's network. Raises ConfigError if there is none."""
    if (network := getattr(kind, "NETWORK", None)) is None:
        raise ConfigError(f"{kind.__name__} has no NETWORK; set it to the class of the network, or to its module:name")
    return _NETWORKS.find(network) if isinstance(network, str) else network


def _as_given(model: Architecture, info: SerializationInfo) -> dict[str, Any]:
    """All keys that a model may have, with null for the keys that a recipe does not set."""
    given = {"name", "preset", "encoder"} | model.model_fields_set
    return _KEYS | model.model_dump(mode=info.mode, include=given)


ModelConfig = Annotated[
    BuiltIn, Field(discriminator="name"), WrapValidator(_of_its_name), PlainSerializer(_as_given, dict[str, Any])
]
"""The `model:` section of a recipe; `name` selects its class, by default `blstm`."""


def model_config(**keys: Any) -> Architecture:
    """The `model:` section with these keys. Raises pydantic's ValidationError if the keys are invalid."""
    found: Architecture = TypeAdapter[Any](ModelConfig).validate_python(keys)
    return found


def build_model(
    config: Architecture,
    num_features: int,
    vocab_size: int,
    seed: int,
    frame_shift: float = 0.010,
    num_phones: int | None = None,
) -> nn.Module:
    """Build the network that `config` describes, with fresh weights and `vocab_size` outputs. The same seed gives the
    same weights.

    `frame_shift`, the frame shift of the features in seconds, converts `config.chunk` to frames. `num_phones` is the
    number of outputs of `config.phones`, including the blank; None leaves these outputs out.

    `forward(features [B, T, F], lengths [B])` returns log-probabilities `[B, T', V]` and lengths `[B]`. The outputs for
    an utterance do not depend on its padding (up to rounding, about 1e-6). Raises ConfigError if the network does not
    support the decoder or the phones.
    """
    from starling.chance import borrowed_generators
    from starling.speech.models.network import Network, PhoneOutput, StreamingNetwork
    from starling.speech.models.transducer import Transducer
    from starling.speech.models.transformer import AttentionDecoder

    with borrowed_generators(seed):
        network: nn.Module = _network(type(config))(config, num_features, vocab_size)
        if config.decoder is not None:
            own = _checked(network, Network, "decoder")
            width = own.output.in_features
            if isinstance(config.decoder, AttentionConfig):
                own.decoder = AttentionDecoder(config.decoder, width, vocab_size)
            else:
                own.decoder = Transducer(config.decoder, width, vocab_size)
        if config.phones is not None and num_phones is not None:
            own = _checked(network, Network, "phones")
            if own.stacked is None:
                raise ConfigError(f"model.phones: a {type(own).__name__} has no `stacked` layers; leave phones out")
            own.phones = PhoneOutput(own.stacked.width, config.phones.layer, config.dropout, num_phones)
        if config.chunk is not None:
            streaming = _checked(network, StreamingNetwork, "chunk")
            streaming.chunks = config.chunk.chunks(frame_shift * config.subsampling)
    return network


def _checked(network: nn.Module, kind: type[N], key: str) -> N:
    if not isinstance(network, kind):
        raise ConfigError(
            f"model.{key}: the architecture makes a {type(network).__name__}, which is not a "
            f"{kind.__module__}.{kind.__name__}; leave {key} out"
        )
    return network


def count_parameters(model: nn.Module) -> int:
    """The number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
