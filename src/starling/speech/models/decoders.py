"""The section `model.decoder` of a recipe: what stands beside CTC behind the encoder."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from starling.configuration import Config


class _Beside(Config):
    ctc_weight: float = Field(
        default=0.3, gt=0, lt=1, description="share of the CTC loss in the loss; the decoder's has the rest"
    )
    width: int = Field(default=128, ge=2, description="units of the decoder's layers")


class AttentionConfig(_Beside):
    """A Transformer decoder, which attends to the encoder's frames and emits token after token."""

    kind: Literal["attention"] = Field(description="attention, or transducer")
    layers: int = Field(default=2, ge=1, description="blocks of the decoder")
    heads: int = Field(default=4, ge=1, description="heads of each attention; they share the width")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="share of units that are set to 0 in training")
    label_smoothing: float = Field(
        default=0.1, ge=0, lt=1, description="share of the target that is spread evenly over all tokens"
    )

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> "AttentionConfig":
        if self.width % (2 * self.heads):
            raise ValueError(
                f"{self.heads} heads cannot share a width of {self.width}: take a multiple of {2 * self.heads}"
            )
        return self


class TransducerConfig(_Beside):
    """A transducer: a predictor, which knows the last tokens alone, and a joiner."""

    kind: Literal["transducer"] = Field(description="attention, or transducer")
    context: int = Field(default=2, ge=1, description="last tokens that the predictor knows")


DecoderConfig = Annotated[AttentionConfig | TransducerConfig, Field(discriminator="kind")]
