"""The base of every configuration model: unknown keys are errors and values never change."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen section of a recipe; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
