"""Models with a decoder train under every strategy, are saved, transcribe, and are scored in all their ways."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from rich.console import Console
from torch import Tensor, nn

from starling.budget import Budget
from starling.chance import derive_seed
from starling.comparing.compare import load_comparison
from starling.engines.virtual.engine import VirtualEngine
from starling.errors import ConfigError
from starling.experiment.simulate import simulate_recipe
from starling.speech.commands.evaluate import evaluate
from starling.speech.models import Architecture, build_model, count_parameters, model_config
from starling.speech.recipe import check_recipe, fixed_settings
from starling.speech.recogniser import Recogniser
from starling.speech.scoring import read_texts
from starling.speech.task import SPEECH
from starling.speech.trained import load_recogniser
from starling.speech.training.workload import Batch, speech_loss
from starling.speech.transcribing.files import transcribe_files
from starling.strategies.parts.means import TopK
from starling.training.job import Job
from starling.workload import Ticket, Workload
from tests.contract.cases import CHOICES, adam
from tests.runs.conftest import Tree
from tests.speech.tones import RATE

ATTENTION = {"kind": "attention", "width": 16, "heads": 2, "layers": 1}
TRANSDUCER = {"kind": "transducer", "width": 16}
MODELS = {
    "conformer": {"name": "conformer", "layers": 1, "width": 16, "heads": 2, "feed_forward": 32},
    "conformer-attention": {"name": "conformer", "layers": 1, "width": 16, "heads": 2, "decoder": ATTENTION},
    "zipformer": {"name": "zipformer", "stack_rates": [1, 2, 1], "stack_widths": [8, 12, 8], "heads": 1},
    "blstm-transducer": {"name": "blstm", "hidden": 8, "decoder": TRANSDUCER},
}


EVERY = {choice.strategy.name: choice for choice in CHOICES.values()}
"""One choice of options of each strategy."""


def config_of(name: str) -> Architecture:
    return model_config(**{"preset": "tiny", "channels": 8, **MODELS[name]})


def batch_of(seed: int, ids: tuple[str, ...] = ("long", "short")) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        features=torch.randn(2, 40, 10, generator=generator),
        lengths=torch.tensor([40, 25]),
        tokens=torch.randint(1, 6, (5,), generator=generator),
        token_lengths=torch.tensor([3, 2]),
        seconds=0.6,
        ids=ids,
    )


class Noise(Workload[Batch]):
    """Random features and tokens for one model."""

    def __init__(self, config: Architecture) -> None:
        self.config = config

    def make_model(self) -> nn.Module:
        return build_model(self.config, 10, 6, seed=1)

    def num_batches(self, epoch: int) -> int:
        return 6

    def load(self, ticket: Ticket) -> Sequence[Batch]:
        return [batch_of(derive_seed(1, "noise", ticket.epoch, ticket.index))]

    def loss(self, model: nn.Module, examples: Batch) -> Tensor:
        return speech_loss(model, examples, self.config)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, marks=[] if strategy in ("allreduce", "adpsgd") else pytest.mark.wide)
        for name in ("conformer", "conformer-attention", "zipformer", "blstm-transducer")
        for strategy in (EVERY if name != "conformer" else ("allreduce", "adpsgd"))
    ],
)
def test_every_model_trains_under_every_strategy(name: str, strategy: str) -> None:
    """Two virtual learners make six mini-batches: their flat weights all change and stay finite, or those that are sent
    if only the largest changes are."""
    choice = EVERY[strategy]
    is_sparse = isinstance(getattr(choice.options(2), "compression", None), TopK)
    job = Job(Noise(config_of(name)), choice.strategy, Budget(epochs=1), adam(1e-3), options=choice.options(2))
    before = torch.cat([each.detach().flatten() for each in job.workload.make_model().parameters()])
    for state in VirtualEngine(job, 2).run().states:
        assert state.weights.shape == before.shape
        assert bool(state.weights.isfinite().all())
        assert (state.weights != before).float().mean() > (0.1 if is_sparse else 0.5)


@pytest.mark.parametrize("name", MODELS)
def test_a_void_batch_has_no_loss_and_gradients_of_zero(name: str) -> None:
    """All parameters that take part have gradients, as DDP requires."""
    model = build_model(config_of(name), 10, 6, seed=1)
    void = replace(
        batch_of(1, ids=()),
        features=torch.zeros(1, 64, 10),
        lengths=torch.tensor([64]),
        tokens=torch.zeros(0, dtype=torch.int64),
        token_lengths=torch.zeros(1, dtype=torch.int64),
    )
    loss = speech_loss(model, void, config_of(name))
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(each.grad is not None and not each.grad.count_nonzero() for each in model.parameters())


@pytest.mark.parametrize("name", ["conformer-attention", "blstm-transducer"])
def test_the_loss_is_a_mean_of_both_by_the_ctc_weight(name: str) -> None:
    """CTC has the weight ctc_weight, the decoder the rest, each per token."""
    config, batch = config_of(name), batch_of(1)
    model = build_model(config, 10, 6, seed=1).eval()
    *_, beside = model(batch.features, batch.lengths, batch.tokens, batch.token_lengths)
    expected = 0.3 * speech_loss(model, batch, model_config()) + 0.7 * beside / 5
    torch.testing.assert_close(speech_loss(model, batch, config), expected)


@pytest.mark.parametrize("name", ["conformer-attention", "blstm-transducer"])
def test_a_loss_in_bfloat16_is_near_that_in_float32(name: str) -> None:
    """Sums over alignments and tokens stay exact; the loss is float32."""
    config, batch = config_of(name), batch_of(1)
    model = build_model(config, 10, 6, seed=1).eval()
    exact = speech_loss(model, batch, config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = speech_loss(model, batch, config)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.03, atol=0)
    rough.backward()
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)


def songs_with(tree: Tree, model: dict[str, Any]) -> Tree:
    tree["data"]["corpus"]["sets"]["dev"] = {"split": "test"}
    tree["data"]["valid"] = "dev"
    return tree | {
        "learners": 1,
        "batches": {"max_duration": 2},
        "augment": {"speed": [1.0], "spec_augment": None},
        "model": {"preset": "tiny", "subsampling": 4, **model},
    }


def simulated(tree: Tree) -> Path:
    recipe = check_recipe(tree, "songs")
    simulate_recipe(SPEECH, recipe, lambda line: None, Console(file=io.StringIO()))
    return recipe.exp / f"{recipe.name}-virtual"


def scored(experiment: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    evaluate(experiment, ["test"], lines.append, Console(file=io.StringIO()), **options)
    return lines


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["attention", "transducer"])
def test_a_decoder_is_scored_in_all_its_ways(tree: Tree, songs: Path, kind: str) -> None:
    """It is scored by greedy and beam search, beside both searches of CTC; `transcribe` writes the decoder's greedy
    text."""
    pytest.importorskip("flashlight.lib.text.decoder.kenlm", reason="the extra `decoding` is not installed")
    tree = songs_with(tree, {"decoder": {"kind": kind, "width": 32}}) | {"budget": {"epochs": 6}}
    experiment = simulated(tree)
    lines = scored(experiment, with_beam=True)
    titles = [line for line in lines if line.startswith("test, ")]
    expected = ["test, beam search:", "test, greedy CTC", f"test, beam search of the {kind} decoder, beam 8"]
    if kind == "attention":
        expected.append("test, N-best of the beam search, rescored by attention with weight ")
        assert titles[-1].endswith("; tuned on 6 utterances of dev")
    assert [title[: len(start)] for title, start in zip(titles, expected, strict=True)] == expected
    assert sum(line.startswith("%WER") for line in lines) == 1 + len(expected)

    _, texts = read_texts(experiment / "decode" / "recogs-test.txt")
    heard: list[str] = []
    files = [songs.parent / f"{number}.flac" for number in range(24, 30)]
    transcribe_files(experiment, files, heard.append)
    assert [line.split("\t")[1].split() for line in heard] == [
        texts[f"song-{number}"].split() for number in range(24, 30)
    ]
    wide = files[0].with_name("wide.wav")
    samples, _ = soundfile.read(files[0])
    soundfile.write(wide, torch.tensor(samples).repeat_interleave(2).numpy(), 2 * RATE)
    transcribe_files(experiment, [wide], heard.append)
    assert len(heard) == 7
    stored = json.loads((experiment / "decode" / "beam" / "search.json").read_text())
    assert stored["tuned_on"] == "dev"


def test_the_recipe_of_models_compares_decoders_at_one_budget_of_parameters() -> None:
    """Within 3 % of each other, with the outputs of the demo's 24 tokens."""
    study = load_comparison(Path("models"))
    counts = {}
    for row in study.section.rows:
        config = study.recipe(row).model
        counts[row.arm] = count_parameters(build_model(config, 40, 24, seed=0))
        assert config.subsampling == 2
    assert set(counts) == {"ctc", "attention", "transducer"}
    assert max(counts.values()) < 1.03 * min(counts.values())


def test_a_decoder_needs_ctc(tree: Tree) -> None:
    """`loss: frames` has no decoder, and a run cannot be resumed with a different one; without a decoder, nothing
    changes."""
    frames = {"model": {"name": "dnn-hybrid", "decoder": TRANSDUCER}, "loss": "frames", "augment": None}
    with pytest.raises(ConfigError, match=r"model\.decoder: only for loss: ctc; leave it out"):
        check_recipe(tree | frames, "songs")
    assert "decoder" not in fixed_settings(check_recipe(tree, "songs"))["model"]
    tree["model"]["decoder"] = TRANSDUCER
    assert fixed_settings(check_recipe(tree, "songs"))["model"]["decoder"]["kind"] == "transducer"


def test_phones_need_ctc(tree: Tree) -> None:
    """Decoders do, too, and so do channels of convolutions over time and frequency."""
    frames = {"model": {"name": "blstm-hybrid", "phones": {}}, "loss": "frames", "augment": None}
    with pytest.raises(ConfigError, match="phones: blstm-hybrid has no layer for them; blstm, lstm"):
        check_recipe(tree | frames, "songs")
    assert not {"phones", "conv2d_channels", "layer_norm"} & fixed_settings(check_recipe(tree, "songs"))["model"].keys()
    tree["model"] |= {"phones": {"weight": 0.3}, "conv2d_channels": 4, "layer_norm": True}
    fixed = fixed_settings(check_recipe(tree, "songs"))["model"]
    assert (fixed["phones"]["weight"], fixed["conv2d_channels"], fixed["layer_norm"]) == (0.3, 4, True)


@pytest.mark.parametrize("pieces", ["characters", "sentencepiece"])
def test_a_model_with_phones_is_trained_and_transcribes(tree: Tree, songs: Path, tmp_path: Path, pieces: str) -> None:
    """Some words are missing in the lexicon; only training needs it."""
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("DO  d o\nRE  r e\nMI  m i\n", encoding="utf-8")
    tree = songs_with(tree, {"phones": {"lexicon": str(lexicon), "weight": 0.3}}) | {"budget": {"epochs": 3}}
    tree["tokens"] = {"kind": pieces} | ({"vocab_size": 12} if pieces == "sentencepiece" else {})
    experiment = simulated(tree)
    lexicon.unlink()
    first = Recogniser.load(experiment / "initial").model.state_dict()
    last = load_recogniser(experiment).model.state_dict()
    for name in ("phones.output.weight", "output.weight"):
        assert not torch.equal(last[name], first[name])
    assert sum(line.startswith("%WER") for line in scored(experiment)) == 1
    heard: list[str] = []
    transcribe_files(experiment, [songs.parent / "24.flac"], heard.append)
    assert len(heard) == 1
