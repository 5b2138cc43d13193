"""Comparison of the published training times of SWB2000 with predictions. The predictions use data sheets, and one
number that was fitted to one row."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from starling.predict.costs import Costs, JobFacts, find_preset
from starling.predict.predict import Arm, Machines, simulate

COMMAND = "starling plan --published"
TEMPLATE = Path(__file__).parent / "published.md"
MOST_ITERATIONS = 20
ROUNDS = 4
"""Number of gradients of a device in half a simulation. It can be small because devices are equal, and their pace is
steady from the beginning."""
EPOCHS = 16
UTTERANCE_WINDOWS = 34_300_000
"""Number of sub-sequences of 21 frames in an epoch, which has 2,000 hours of frames of 10 ms."""
FRAMES = 21
LAYERS, UNITS, INPUT, BOTTLENECK, STATES = 6, 512, 260, 256, 32_000
"""Sizes of the published network: 6 bidirectional layers of 512 units per direction, input 260, bottleneck 256, 32,000
tied states."""


def network_weights() -> int:
    """Return the number of weights of the published network, which has LSTM layers with two biases per gate, a
    bottleneck and an output layer."""
    sizes = [INPUT, *[2 * UNITS] * (LAYERS - 1)]
    recurrent = sum(2 * 4 * UNITS * (size + UNITS + 2) for size in sizes)
    return recurrent + (2 * UNITS + 1) * BOTTLENECK + (BOTTLENECK + 1) * STATES


def flops_per_sequence() -> float:
    """Return the number of operations of forward and backward for one sub-sequence, which is 6 for each weight and
    frame (2 forward, 4 backward)."""
    return 6.0 * network_weights() * FRAMES


@dataclass(frozen=True)
class Published:
    """One row of the published table."""

    system: str
    preset: str
    devices: int
    strategy: dict[str, Any] | None
    """Strategy of Starling that is simulated; None simulates gradients alone, without any exchange."""
    hours: float
    source: str
    not_comparable: str = ""
    """Reason why the prediction cannot be expected to meet the published time; empty if it can."""
    batch: int = 128
    """Number of sequences in a mini-batch of one device."""

    def costs(self, efficiency: float) -> Costs:
        """Return the costs that a simulation needs, at a fraction of the peak."""
        preset = find_preset(self.preset).model_copy(update={"efficiency": efficiency})
        return preset.costs(job_of(self.batch), self.preset)

    def hours_at(self, efficiency: float) -> float:
        """Return the predicted hours, at a fraction of the peak."""
        costs = self.costs(efficiency)
        beside = min(self.devices, costs.devices_per_node)
        seconds = costs.beside(beside).seconds / self.devices  # time of the run for each gradient of any device
        if self.strategy is not None:
            found = simulate(Arm.of(self.strategy), self.devices, Machines(costs), rounds=ROUNDS)
            seconds = found.seconds_per_gradient
        return EPOCHS * seconds * UTTERANCE_WINDOWS / self.batch / 3600.0

    @cached_property
    def predicted(self) -> float:
        """The predicted hours, with the efficiency that the fitted row gives."""
        return self.hours_at(fitted_efficiency())

    @property
    def error(self) -> float:
        """The relative error, predicted / published - 1."""
        return self.predicted / self.hours - 1.0


WHOLE: dict[str, Any] = {"piece_megabytes": 256}
"""Options under which the model is sent in one piece."""
RING, RANDOM, PAIRS = ({"name": "adpsgd", "pattern": pattern, **WHOLE} for pattern in ("ring", "random", "pairs"))
DELAYED = {"name": "delay-by-one"}
HYBRID = {"name": "hadpsgd", "per_node": 8, "pattern": "ring", **WHOLE}
_SHORTER = "; the published time is also shorter than linear scaling from the fitted row"
OTHER_GPU = f"a different GPU, which reaches a different share of its peak{_SHORTER}"
OTHER_ALGORITHM = f"a different algorithm, which averages weights 12 times an epoch{_SHORTER}"
FASTER = "faster than linear scaling from one V100 (192 h / 64 = 3.0 h): faster nodes, or a better implementation"
OTHER_MACHINE = "a different machine and implementation; 64 of these devices are already faster than linear scaling"
V100, P9, P100 = "v100-2019", "p9-v100-2020", "p100-2018"
CONG, ON_P9 = "Cong et al., ICASSP 2020", "V100, IBM P9"
FITTED = Published("64 V100, H-ADPSGD, 8 nodes of 8", V100, 64, HYBRID, 5.2, "arXiv 1907.05701")
ROWS = (
    Published("1 V100", V100, 1, None, 192.0, "a talk's notes; IBM's blog says one week, 168 h", batch=256),
    Published("16 P100, ADPSGD", P100, 16, RING, 14.0, "arXiv 1904.04956", OTHER_GPU),
    Published("32 V100, hybrid", V100, 32, HYBRID, 11.5, "arXiv 1904.04956"),
    FITTED,
    Published("48 V100, 12 reductions an epoch", V100, 48, None, 5.0, CONG, OTHER_ALGORITHM),
    Published("96 V100, 12 reductions an epoch", V100, 96, None, 3.0, f'{CONG} ("about 3")', OTHER_ALGORITHM),
    *(
        Published(f"{devices} {ON_P9}, {name}", P9, devices, strategy, hours, "arXiv 2002.01119", reason)
        for devices, hours, reason in ((64, 2.28, FASTER), (128, 1.98, OTHER_MACHINE))
        for name, strategy in (("randomised", RANDOM), ("random pairs", PAIRS), ("delay-by-one", DELAYED))
    ),
)


def job_of(batch: int = 128, hours: float = 2000.0) -> JobFacts:
    """Return the facts of the published network, with mini-batches of `batch` sequences on each device and an epoch of
    `hours` hours of speech."""
    return JobFacts(
        trains="the BLSTM acoustic model of SWB2000",
        model_bytes=4 * network_weights(),
        batches_per_epoch=max(1, round(UTTERANCE_WINDOWS * hours / 2000.0 / batch)),
        flops_per_gradient=batch * flops_per_sequence(),
    )


@cache
def fitted_efficiency() -> float:
    """Return the fraction of the peak at which the prediction meets the fitted row. It is the only fitted number."""
    efficiency = 0.2
    for _ in range(MOST_ITERATIONS):
        ratio = FITTED.hours_at(efficiency) / FITTED.hours  # hours are about proportional to 1 / efficiency
        efficiency = min(1.0, efficiency * ratio)
        if abs(ratio - 1.0) < 1e-4:
            break
    return efficiency


def page() -> str:
    """Return the page of published and predicted hours in Markdown."""
    comparable = [row for row in ROWS if not row.not_comparable and row is not FITTED]
    worst = max(comparable, key=lambda row: abs(row.error))
    return TEMPLATE.read_text(encoding="utf-8").format(
        command=COMMAND,
        table="\n".join(map(_row, ROWS)),
        efficiency=f"{fitted_efficiency():.1%}".replace("%", " %"),
        gradient=f"{FITTED.costs(fitted_efficiency()).compute.seconds:.3f}",
        weights=f"{network_weights() / 1e6:.2f}",
        megabytes=f"{4 * network_weights() / 1e6:.1f}",
        gigaflops=f"{flops_per_sequence() / 1e9:.2f}",
        comparable=", ".join(f"{row.system} ({row.error:+.0%})".replace("%", " %") for row in comparable),
        worst=worst.system,
        kept=f"{find_preset(V100).kept_per_doubling:.0%}".replace("%", " %"),
        speed_up=f"{ROWS[0].predicted / FITTED.predicted:.0f}",
    )


def _row(row: Published) -> str:
    if row is FITTED:
        remark, error = "**fitted**: the only row used to fit the efficiency", "0 by construction"
    else:
        remark = f"not comparable: {row.not_comparable}" if row.not_comparable else "prediction"
        error = f"{row.error:+.0%}".replace("%", " %")
    return f"| {row.system} | {row.batch} | {row.hours:g} | {row.predicted:.2f} | {error} | {remark} | {row.source} |"
