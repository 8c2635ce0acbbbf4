"""Print the tables of the records of `convergence.py`, plot their curves, and update the README's table of losses.

    python benchmarks/convergence_table.py [RESULTS.jsonl] [--plot CURVES.svg] [--readme README.md] [--model NAME]

Arms with the same model, corpus, tokens and batch share a table. "held-out loss" is the mean over seeds. Differences
are from bf16 with the same seed (so the same order of tokens) and, if it was trained, the same optimizer and learning
rate: the mean with its standard error, and the smallest and largest. How much bf16 itself differs between seeds stands
above the table. Tokens per second and peaks are from the arm's last record that has them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.convergence import DENSE, LLAMA, NO_MASTERS, NVFP4_BETWEEN, with_defaults
from benchmarks.harness import make_parser, table_head, table_row
from quantshard.formats import Format
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, STATES
from quantshard.numerics.states import MASTER
from quantshard.recipe import resolve
from quantshard.state_storage import PRESETS, StateOptions, splits, state_quant_spec

RESULTS = Path(__file__).parent / "convergence.jsonl"
REFERENCE = "bf16"
OPTIMIZERS = ("muon", "lion")
"""Words of arms' names; without one of them the optimizer is AdamW."""
NOT_RUN = "not yet run"
COLUMNS = (
    "arm", "held-out loss", "difference from BF16, %", "bytes a parameter", "peak GiB", "tokens/s", "seeds"
)  # fmt: skip

Record = dict[str, Any]


class TrainedOn(NamedTuple):
    """Key that arms must share to be compared; `batch` is in sequences."""

    model: str
    corpus: str
    tokens: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens:,} tokens of corpus {self.corpus}, {self.batch} sequences a step"


@dataclass(frozen=True)
class ArmResult:
    """The records of an arm by seed, for one `TrainedOn`."""

    name: str
    records: dict[int, Record]

    def mean(self, key: str) -> float | None:
        """Return the mean over the seeds that recorded a value, or None."""
        values = [float(record[key]) for record in self.records.values() if key in record]
        return statistics.fmean(values) if values else None

    def differences(self, reference: ArmResult | None) -> list[float]:
        """Return the differences of held-out losses in percent, for each seed that both arms have."""
        if reference is None:
            return []
        seeds = sorted(self.records.keys() & reference.records.keys())
        return [100 * (self.records[seed]["heldout"] / reference.records[seed]["heldout"] - 1) for seed in seeds]

    def latest(self, key: str) -> float | None:
        """Return the value of the last record that has it, because speed and memory change with the code."""
        values = [record[key] for record in self.records.values() if key in record]
        return float(values[-1]) if values else None

    @property
    def devices(self) -> list[str]:
        return sorted({record["device"] for record in self.records.values()})


Groups = dict[TrainedOn, dict[str, ArmResult]]
"""Arms by name, by what they were trained on."""


def reference_of(name: str, arms: Mapping[str, ArmResult]) -> ArmResult | None:
    """Return the arm to compare with: BF16 with the same optimizer and learning rate, or BF16."""
    same = reference_name(name)
    return arms[same] if same in arms and same != name else arms.get(REFERENCE)


def reference_name(name: str) -> str:
    """Return the name of BF16 with the same optimizer and learning rate."""
    _, separator, rate = name.partition(" at ")
    return " ".join([REFERENCE, *(word for word in name.split() if word in OPTIMIZERS)]) + separator + rate


def read(file: Path) -> Groups:
    """Read the arms in the order of their records; the last record of a seed counts.

    Raises:
        ValueError: a line is not a record; the message has its number.
    """
    groups: Groups = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            add(groups, json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}:{number} is not a record of convergence.py: {error!r}") from error
    return groups


def add(groups: Groups, record: Record) -> None:
    """Add a record to its arm, as the latest one."""
    record = with_defaults(record)
    trained = TrainedOn(*(record[key] for key in TrainedOn._fields))
    name, arms = record["arm"], groups.setdefault(trained, {})
    if "seconds" in record:  # old records have no rate; this one includes compilation
        record = {"tokens_per_s": record["tokens"] / max(record["seconds"], 1e-9)} | record
    records = arms.setdefault(name, ArmResult(name, {})).records
    records.pop(int(record["seed"]), None)
    records[int(record["seed"])] = record


# Tables ---------------------------------------------------------------------------------------------------------------


def table(trained: TrainedOn, arms: dict[str, ArmResult]) -> Iterator[str]:
    """Yield lines of Markdown, the lowest loss first."""
    devices = sorted({device for arm in arms.values() for device in arm.devices})
    yield f"**{trained}**, on {', '.join(devices)}. {_seed_spread(arms.get(REFERENCE))}"
    yield ""
    yield from table_head(COLUMNS).splitlines()
    for arm in sorted(arms.values(), key=lambda arm: arm.mean("heldout") or 0.0):
        yield table_row((
            arm.name,
            _format(arm.mean("heldout"), ".4f"),
            "0" if arm.name == REFERENCE else _difference(arm.differences(reference_of(arm.name, arms))),
            _format(arm.mean("bytes"), ".2f"),
            _format(arm.latest("peak_gib"), ".1f"),
            _format(arm.latest("tokens_per_s"), ",.0f"),
            len(arm.records),
        ))  # fmt: skip


def _seed_spread(reference: ArmResult | None) -> str:
    losses = [record["heldout"] for record in reference.records.values()] if reference is not None else []
    if len(losses) < 2:
        return f"The spread of {REFERENCE} over seeds is not known: it has {len(losses)}."
    spread = 100 * (max(losses) - min(losses)) / statistics.fmean(losses)
    return f"From seed to seed {REFERENCE} differs by up to {spread:.2f} %."


def _difference(differences: Sequence[float]) -> str:
    if not differences:
        return "-"
    spread = f" ({min(differences):+.2f} to {max(differences):+.2f})" if len(differences) > 1 else ""
    return _mean(differences) + spread


def _mean(values: Sequence[float]) -> str:
    """Format a mean with its standard error over independent seeds, if there are several."""
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.2f}{error}"


def _format(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


# The README -----------------------------------------------------------------------------------------------------------

_README_COLUMNS = ("setting", "weight", "master", "moments", "sum", "gradient", "total", "held-out loss")
_README_HEAD = table_row(_README_COLUMNS)
_BF16 = torch.bfloat16.itemsize


class StateBytes(NamedTuple):
    """Bytes per element of a large matrix, scales included."""

    weight: float
    master: float
    moments: float

    @property
    def together(self) -> float:
        return self.weight + self.master + self.moments


def bytes_of(options: StateOptions, weight: Format) -> StateBytes:
    """Return the bytes per element of a weight in this format and of its AdamW states."""
    nonnegative = {spec.role for spec in STATES if spec.nonnegative}
    specs = {state: (dtype, state_quant_spec(dtype, state in nonnegative)) for state, dtype in options.dtypes().items()}
    sizes = {
        state: float(dtype.itemsize) if spec is None else spec.format.bytes_per_element
        for state, (dtype, spec) in specs.items()
    }
    has_remainders = options.store_param_remainders and splits(weight, torch.float32, options.master_weight_dtype)
    if MASTER in sizes and has_remainders:
        sizes[MASTER] = 1.0
    return StateBytes(weight.bytes_per_element, sizes.get(MASTER, 0.0), sizes[EXP_AVG] + sizes[EXP_AVG_SQ])


class CostRow(NamedTuple):
    """A row of the README's table: title, arm, and bytes."""

    what: str
    arm: str
    size: StateBytes


def cost_rows() -> Iterator[CostRow]:
    fp8, fp4 = (_weight_format(name) for name in ("current", "nvfp4"))
    default = StateOptions()
    fp8_bytes, fp4_bytes = bytes_of(default, fp8), bytes_of(default, fp4)
    yield CostRow("BF16, float32 master and moments", REFERENCE, fp8_bytes._replace(weight=_BF16))
    yield CostRow("BF16, `torch.optim.AdamW` with BF16 moments", "bf16 AdamW", StateBytes(_BF16, 0, 2 * _BF16))
    yield CostRow("FP8, `FusedAdam`", "current", fp8_bytes)
    yield CostRow("NVFP4, `FusedAdam`", "nvfp4", fp4_bytes)
    mixed_weight = 1 / 3 * fp8_bytes.weight + 2 / 3 * fp4_bytes.weight  # 4 of 12 layers are FP8
    title = "NVFP4, first and last two of twelve layers FP8"
    yield CostRow(title, NVFP4_BETWEEN, fp4_bytes._replace(weight=mixed_weight))
    for name in sorted(PRESETS):
        yield CostRow(f'FP8, `preset="{name}"`', f"current {name}", bytes_of(PRESETS[name], fp8))
    yield CostRow("FP8, FP8 moments, `master_weights=False`", "current no masters", bytes_of(NO_MASTERS, fp8))


def _weight_format(recipe: str) -> Format:
    spec = resolve(recipe).weight
    assert spec is not None
    return spec.format


def ranked_groups(groups: Groups, models: Sequence[str] = (DENSE, LLAMA)) -> list[TrainedOn]:
    """Sort the groups of these models by how many of the README's arms they have, then by seeds of these arms."""
    readme_arms = [row.arm for row in cost_rows()]

    def rank(trained: TrainedOn) -> tuple[int, int]:
        seeds = [len(groups[trained][arm].records) for arm in readme_arms if arm in groups[trained]]
        return len(seeds), sum(seeds)

    return sorted((trained for trained in groups if trained.model in models), key=rank, reverse=True)


def costs(groups: Groups) -> Iterator[str]:
    """Yield the lines of the README's table.

    Losses are from the highest-ranked group that has the arm.
    """
    ranked = [groups[trained] for trained in ranked_groups(groups)]
    yield from table_head(_README_COLUMNS).splitlines()
    for row in cost_rows():
        sizes = (*row.size, row.size.together, float(_BF16), row.size.together + _BF16)
        arms = next((arms for arms in ranked if row.arm in arms), {})
        loss = _readme_loss(arms[row.arm], reference_of(row.arm, arms)) if arms else NOT_RUN
        if row.arm == REFERENCE and arms:
            loss += _loss_on_shared_seeds(arms, [cost_row.arm for cost_row in cost_rows()])
        yield table_row([row.what, *(f"{size:.2f}".rstrip("0").rstrip(".") for size in sizes), loss])


def _readme_loss(arm: ArmResult, reference: ArmResult | None) -> str:
    """Format an arm's loss on the seeds that the reference has too, and the difference there."""
    differences = arm.differences(reference)
    if not differences:
        return _format(arm.mean("heldout"), ".3f")
    assert reference is not None
    loss = statistics.fmean(arm.records[seed]["heldout"] for seed in arm.records.keys() & reference.records.keys())
    return f"{loss:.3f}" if arm.name == REFERENCE else f"{loss:.3f} ({_mean(differences)} %)"


def _loss_on_shared_seeds(arms: dict[str, ArmResult], names: Sequence[str]) -> str:
    """Format the reference's loss on the seeds that all arms have, if it has more seeds."""
    records = arms[REFERENCE].records
    shared = set(records).intersection(*(arms[name].records for name in names if name in arms))
    if not shared or len(shared) == len(records):
        return ""
    mean = statistics.fmean(records[seed]["heldout"] for seed in shared)
    return f" ({mean:.3f} on the {len(shared)} seed{'s' * (len(shared) > 1)} that all rows share)"


def with_costs(text: str, lines: Iterable[str]) -> str:
    """Replace the table in the README's text.

    Raises:
        ValueError: there is no such table, or several.
    """
    if text.count(f"{_README_HEAD}\n") != 1:
        raise ValueError(f"the page must have one table that begins with {_README_HEAD}")
    before, _, rest = text.partition(f"{_README_HEAD}\n")
    after = dropwhile(lambda line: line.startswith("|"), rest.splitlines())
    return "\n".join([*before.splitlines(), *lines, *after]) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--plot", type=Path, help="write curves to this .svg or .png file")
    parser.add_argument("--readme", type=Path, help="update the table of bytes and losses in this page")
    parser.add_argument("--model", help="model whose curves are plotted (default: that of the README's table)")
    options = parser.parse_args()
    groups = read(options.results)
    models = {trained.model for trained in groups}
    if options.model and options.model not in models:
        parser.error(f"--model {options.model}: there are {', '.join(sorted(models))}")
    for trained, arms in groups.items():
        print("\n".join(table(trained, arms)), end="\n\n")
    if options.plot:
        from benchmarks.convergence_plot import draw  # imports this module

        trained = ranked_groups(groups, *([options.model],) * bool(options.model))[0]
        draw(options.plot, trained, groups[trained])
    if options.readme:
        options.readme.write_text(with_costs(options.readme.read_text(), costs(groups)))


if __name__ == "__main__":
    main()
