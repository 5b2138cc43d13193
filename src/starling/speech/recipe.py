"""The recipe: all settings of a run, as one checked tree."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from starling.configuration import Config, ProblemsError, checked, differing, digest, short_for
from starling.errors import ConfigError, StarlingError
from starling.experiment.folder import ExperimentFolder
from starling.recipe import Tree, apply_overrides, read_recipe
from starling.recipe.run import RecipeConfig
from starling.speech.augmentation import AugmentConfig
from starling.speech.batch_plan import BatchConfig, MixtureConfig, PartitionConfig, divided_by
from starling.speech.data import DataConfig, set_digest, set_settings, setting_differences
from starling.speech.decoding import OF_CTC, OF_FRAMES, DecodingConfig
from starling.speech.features import WHOLE, FeatureConfig
from starling.speech.hybrid import AlignmentConfig, SequencesConfig, StatesConfig
from starling.speech.models import ModelConfig
from starling.speech.models.architectures import BlstmConfig, PublishedConfig
from starling.speech.shards import read_summary
from starling.speech.tokens import TokenConfig
from starling.strategies.islands import between_islands
from starling.training.freezing import Freeze

_FIRST_SIZES = (
    *("layers", "hidden", "bottleneck", "width", "heads", "feed_forward", "positions"),
    *("channels", "context", "subsampling", "dropout"),
)
"""Keys of `model` that fingerprints include even if they are unset, to match the fingerprints of the earliest runs."""
_OF_FRAMES = ("sequences", "states", "alignment")
"""Sections that apply only to `loss: frames`."""
_ONLY_FOR = {
    "frames": (*_OF_FRAMES, "features.splice", *(f"decoding.{key}" for key in OF_FRAMES)),
    "ctc": ("model.decoder", *(f"decoding.{key}" for key in OF_CTC)),
}
"""Keys that apply to one loss only, each written as SECTION or SECTION.KEY."""

FORMAT = 2
"""The format of recipes since Starling 0.2. Later versions of Starling will read it."""


class WarmStart(Config):
    """Another experiment whose weights initialise a model."""

    experiment: Path
    """Folder of the other experiment, whose newest model is used, or a checkpoint or a recogniser's folder."""
    sizes: Literal["strict", "partial"] = "strict"
    """With `strict`, only the outputs may differ; the rows of tokens and phones that both models have are kept. With
    `partial`, layers may be missing or have different sizes; overlapping parts are copied."""

    _of_path = short_for("experiment")

    @model_serializer(mode="wrap")
    def _as_path(self, serialise: SerializerFunctionWrapHandler) -> object:
        tree = serialise(self)
        return tree["experiment"] if self.sizes == "strict" else tree


class Recipe(RecipeConfig):
    """A complete run that trains a speech recogniser."""

    format: int = FORMAT
    """The format of this tree of keys. A recipe written by hand may omit it; config.yaml always has it."""
    data: DataConfig
    """The location and the preparation of the data, and the sets for training, validation and testing."""
    mixture: MixtureConfig | None = None
    """Several domains to train on instead of `data.train`, and their shares."""
    partition: PartitionConfig = "identical"
    """The utterances that a learner may see. With `identical`, it may see all of them, each exactly once per epoch.
    Otherwise (for studies), each learner draws at random from its own part: whole speakers, whole domains, or a
    Dirichlet division."""
    tokens: TokenConfig = TokenConfig()
    """The units of the model's output."""
    features: FeatureConfig = FeatureConfig()
    """The parameters of log-mel features."""
    augment: AugmentConfig = AugmentConfig()
    """The augmentation of training audio."""
    batches: BatchConfig = BatchConfig()
    """The grouping of utterances into mini-batches."""
    model: ModelConfig = BlstmConfig()
    """The network and its sizes."""
    loss: Literal["ctc", "frames"] = "ctc"
    """The loss: `ctc` is computed over whole utterances and needs no alignment; with model.decoder, the decoder's loss
    is added. `frames` is the cross-entropy of the tied state of every frame, over sub-sequences; the training set is
    aligned first. The next three sections belong to it."""
    sequences: SequencesConfig | None = None
    """The contents of a mini-batch, for `loss: frames`."""
    states: StatesConfig | None = None
    """The tied states, which are the network's outputs, for `loss: frames`."""
    alignment: AlignmentConfig | None = None
    """The alignment of frames to states, for `loss: frames`."""
    decoding: DecodingConfig | None = None
    """The search for words by `starling evaluate`. If a ctc recipe has this section, `train` and `simulate` also score
    the beam search at their end; without it, they score only greedy decoding."""
    validate_every: int | None = Field(default=1, ge=1)
    """Epochs between two scorings of the validation set during training; null turns it off. A scoring is skipped if
    scoring would otherwise take more than a twentieth of the time."""
    patience: int | None = Field(default=None, ge=1)
    """Number of epochs without a lower error on the validation set after which training ends, and the best model is
    scored; with null, only the budget ends training."""
    average: int = Field(default=1, ge=1)
    """Number of the newest checkpoints whose models are averaged for scoring; `checkpoints` says when they are saved,
    and how many are kept."""
    warm_start: WarmStart | None = None
    """Another experiment whose weights initialise the model: its folder, or a mapping with `sizes`."""
    freeze: tuple[Freeze, ...] = ()
    """Parameters that stay unchanged, for the whole run or until they are thawed."""

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return [value] if isinstance(value, str | dict) else value

    @field_validator("batches")
    @classmethod
    def _weighting_fits(cls, batches: BatchConfig, info: ValidationInfo) -> BatchConfig:
        choice, island = info.data.get("strategy"), info.data.get("island")
        if choice is not None and island is not None:
            between = between_islands(choice.strategy, island)
            if problem := between.weighting_problem(choice.options, batches.weighting):
                raise ProblemsError(f"batches.weighting: {problem}")
        return batches

    @model_validator(mode="before")
    @classmethod
    def _frames_have_defaults(cls, tree: Any) -> Any:
        """Fill in the omitted sections of `loss: frames`, and enable only the augmentation that the recipe asks for."""
        if not isinstance(tree, dict) or tree.get("loss") != "frames":
            return tree
        defaults: dict[str, Any] = {section: {} for section in (*_OF_FRAMES, "decoding", "augment")}
        given = {key: value for key, value in tree.items() if value is not None or key not in defaults}
        made = defaults | given
        if isinstance(made["augment"], dict):
            made["augment"] = {"speed": (1.0,), "spec_augment": None} | made["augment"]
        return made

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        of_loss = self._frames_problems() if self.loss == "frames" else self._ctc_problems()
        if problems := [*self._of_another_loss(), *of_loss, *self._end_problems(), *self._mixture_problems()]:
            raise ProblemsError(*problems)
        return self

    def _of_another_loss(self) -> Iterator[str]:
        for loss, keys in _ONLY_FOR.items():
            if loss != self.loss:
                yield from (f"{key}: only for loss: {loss}; leave it out" for key in keys if self._is_set(key))

    def _is_set(self, key: str) -> bool:
        """Whether a key, written as SECTION or SECTION.KEY, differs from its default."""
        name, _, inner = key.partition(".")
        section = getattr(self, name)
        if not inner or section is None:
            return bool(section)
        return bool(getattr(section, inner) != type(section).model_fields[inner].get_default())

    def _ctc_problems(self) -> Iterator[str]:
        normalise, is_raw = self.features.normalise, self.features.kind == "raw"
        if is_raw != isinstance(self.model, PublishedConfig):
            yield "features.kind: model.name: wav2vec2, or whisper, needs raw, and any other model log-mel"
        if self.model.name == "whisper" and normalise != "none":
            yield "features.normalise: model.name: whisper scales its features itself; set it to none"
        if is_raw and normalise in ("active", "speech"):
            yield f"features.normalise: {normalise} needs log-mel features; use utterance, global or none"
        if is_raw and self.features.pauses is not None:
            yield "features.pauses: needs log-mel features; set it to null"
        for key in ("spec_augment", "tempo", "vocal_tract"):
            if is_raw and getattr(self.augment, key) is not None:
                yield f"augment.{key}: needs log-mel features; set it to null"
        if self.model.chunk is not None and normalise in WHOLE:
            yield f"features.normalise: {normalise} needs whole recordings; model.chunk needs global, or none"
        if self.model.chunk is not None and self.features.pauses is not None:
            yield "features.pauses: needs whole recordings; with model.chunk, set it to null"
        for key in ("word_list", "lm"):
            if self.decoding is not None and self.decoding.vocabulary == "open" and self._is_set(f"decoding.{key}"):
                yield f"decoding.{key}: known words, for vocabulary: closed; leave one of them out"

    def _frames_problems(self) -> Iterator[str]:
        if self.tokens.kind != "characters":
            yield f"tokens.kind: loss: frames has states of characters, not of {self.tokens.kind} pieces"
        if (subsampling := self.model.subsampling) != 1:
            yield f"model.subsampling: loss: frames has an output for each frame, so it is 1, not {subsampling}"
        if self.augment != AugmentConfig.none().model_copy(update={"speed": self.augment.speed}):
            yield (
                "augment: loss: frames trains on features that are stored once for each of augment.speed; leave its "
                "other keys out"
            )
        if self.features.pauses is not None:
            yield "features.pauses: only for loss: ctc; set it to null"
        if self.mixture is not None:
            yield "mixture: only for loss: ctc; name one set in data.train"
        for key in ("max_duration", "num_buckets", "window", "similar"):
            if self._is_set(f"batches.{key}"):
                yield f"batches.{key}: groups whole utterances, for loss: ctc; loss: frames has sequences.batch"

    def _end_problems(self) -> Iterator[str]:
        if self.patience is not None and (self.data.valid is None or self.validate_every is None):
            yield "patience: needs the scores of a validation set: set data.valid and validate_every"
        if self.patience is not None and self.average > 1:
            yield "average: patience scores the best model; leave one of them out"
        if self.average > self.checkpoints.keep:
            yield f"average: {self.average} checkpoints, but checkpoints.keep is {self.checkpoints.keep}; raise that"

    def _mixture_problems(self) -> Iterator[str]:
        known, mixture = self.data.sets, self.mixture
        for domain, name in self.training_sets:
            if domain and name not in known and not Path(name).is_dir():
                yield (
                    f"mixture: {name!r} is neither a set of data.corpus ({', '.join(known)}) nor a folder; prepare it "
                    "first with its own recipe"
                )
        if mixture is None:
            if divided_by(self.partition) == "domain":
                yield "partition: it divides domains, but there is no mixture; define the domains there"
        elif self.partition != "identical" and (mixture.by == "hand" or mixture.temperature != 1.0):
            yield (
                "partition: learners draw from their whole parts, so that the mixture's shares have no effect; remove "
                "mixture.temperature and by: hand, or the partition"
            )

    @property
    def training_sets(self) -> list[tuple[str, str]]:
        """The sets to train on, each with its domain in the mixture. Without a mixture, the domain is `""`."""
        if self.mixture is None:
            return [("", self.data.train)]
        return [(name, each) for name, domain in self.mixture.domains.items() for each in domain.sets]

    def set_folder(self, name: str) -> Path:
        """The folder of a prepared set of the corpus or the mixture, whether or not it exists yet."""
        return self.data.set_folder(name) if name in self.data.sets else Path(name)


def load_recipe(path: Path, overrides: Sequence[str] = (), learners: int | None = None) -> Recipe:
    """Load the recipe in a file, and apply `key=value` overrides and, if given, the number of `learners`.

    Raises one ConfigError that lists all problems.
    """
    tree = apply_overrides(read_recipe(path), overrides)
    return check_recipe(tree if learners is None else tree | {"learners": learners}, str(path))


def check_recipe(tree: Tree, where: str) -> Recipe:
    """Check a tree, and return its recipe. `where` names the tree in the ConfigError that lists all problems."""
    if (found := tree.get("format", FORMAT)) != FORMAT:
        raise ConfigError(
            f"recipe {where}: format {found!r}, but this version reads format {FORMAT}; write its keys into a new "
            "recipe without `format` (start from `starling recipes copy`), or use the version that wrote it"
        )
    return checked(Recipe, tree, f"recipe {where}")


def load_resolved(path: Path) -> Recipe:
    """Load the recipe in an experiment's folder. Raises ConfigError if the recipe is invalid, older than
    Starling 0.2, or missing because `starling.train` trained a job."""
    return check_resolved(read_recipe(path), str(path))


def check_resolved(tree: Tree, where: str) -> Recipe:
    """Check the tree of an experiment's recipe, and return the recipe. `where` names the tree in messages. Raises
    ConfigError as `load_resolved` does."""
    if "trains" in tree:
        raise ConfigError(
            f"{where}: starling.train trained this experiment, and the job is not in its folder; this command needs an "
            "experiment that `starling train` has trained from a recipe"
        )
    if "format" not in tree:
        raise ConfigError(
            f"{where}: written before Starling 0.2, which this version cannot read; train the experiment again, or use "
            "the version in its env.txt"
        )
    return check_recipe(tree, where)


def earlier_recipe(checkpoint: Path) -> Recipe | None:
    """The recipe with which a checkpoint was trained; None if the recipe is missing or no longer readable."""
    try:
        return load_resolved(ExperimentFolder(checkpoint.parent.parent).config)
    except StarlingError:
        return None


def changed_keys(checkpoint: Path, recipe: Recipe, sections: Sequence[str]) -> str:
    """The changes in `sections` since a checkpoint, as `: KEY=OLD (now NEW), …`; empty if the changes are unknown."""
    try:
        earlier = load_resolved(ExperimentFolder(checkpoint.parent.parent).config)
        before, now = fixed_settings(earlier), fixed_settings(recipe)
    except StarlingError:
        return ""
    changes: list[str] = []
    for section in sections:
        if section == "data" and recipe.mixture is None and earlier.mixture is None:
            changes += setting_differences(recipe.data.train, before[section], now[section])
        else:
            pairs = differing(before.get(section), now.get(section), section)
            changes += [f"{key}={old} (now {new})" for key, old, new in pairs]
    return f": {', '.join(changes)}" if changes else ""


def fingerprints(recipe: Recipe) -> dict[str, str]:
    """Digests of `fixed_settings`, by section. Raises DataError if a set of the mixture is not prepared."""
    return {section: digest(content) for section, content in fixed_settings(recipe).items()}


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that a resumed run may not change, by section: the model, and everything that determines the
    contents of mini-batches. Raises DataError if a set of the mixture is not prepared."""
    fixed = recipe.model_dump(
        mode="json",
        include={
            "seed": True,
            "tokens": True,
            "features": True,
            "mixture": True,
            "partition": True,
            "batches": {"max_duration", "accumulate", "num_buckets", "window", "similar"},
            "model": True,
            "optimizer": {"name", "options"},
        },
    )
    for key, usual in (("splice", 0), ("kind", "log-mel"), ("pauses", None)):
        if fixed["features"][key] == usual:
            del fixed["features"][key]
    set_keys = {key: value for key, value in fixed["model"].items() if value is not None}
    fixed["model"] = set_keys | {key: None for key in _FIRST_SIZES if key not in set_keys}
    if never := [each.parameters for each in recipe.freeze if each.until is None]:
        fixed["model"] = fixed["model"] | {"freeze": [list(each) for each in never]}
    if recipe.loss == "frames":
        of_frames = recipe.model_dump(mode="json", include={"sequences", "states", "alignment"})
        fixed |= {"loss": of_frames, "model": fixed["model"] | {"loss": "frames"}}
    if recipe.partition != "identical":
        fixed["partition"] = [fixed["partition"], recipe.num_workers]
    return fixed | {"data": _data_settings(recipe)}


def _data_settings(recipe: Recipe) -> Any:
    """The settings of the training set or, for a mixture, the digests of its sets."""
    if recipe.mixture is None:
        return set_settings(recipe.data, recipe.data.train)
    corpus = recipe.data.sets
    return [
        set_digest(recipe.data, name) if name in corpus else read_summary(Path(name)).digest
        for _, name in recipe.training_sets
    ]
