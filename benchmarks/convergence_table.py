"""The table and the curves of what `convergence.py` recorded, and the README's table of bytes and losses.

    python benchmarks/convergence_table.py [RESULTS.jsonl] [--plot CURVES.svg] [--readme README.md] [--model NAME]

Arms are compared where they saw the same tokens in the same batches with the same model: a table for each. A
difference is from the arm bf16 of the same seed, whose tokens came in the same order, and of the same optimizer and
learning rate, where there is one; of several seeds the mean with its standard error, the least and the most. What bf16
itself differs by from seed to seed stands above the table. Tokens a second and peaks are those of the arm's last record
that has them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.convergence import DENSE, LLAMA, NO_MASTERS, NVFP4_BETWEEN, of_record
from quantshard.formats import Format
from quantshard.numerics.adam import EXP_AVG, EXP_AVG_SQ, NONNEGATIVE
from quantshard.numerics.states import MASTER
from quantshard.recipe import resolve
from quantshard.state_storage import PRESETS, StateOptions, splits, state_quant_spec

RESULTS = Path(__file__).parent / "convergence.jsonl"
REFERENCE = "bf16"
OPTIMIZERS = ("muon", "lion")
"""Words of an arm's name; none is AdamW."""
NOT_RUN = "not yet run"

Record = dict[str, Any]


class TrainedOn(NamedTuple):
    """What arms must have in common to be compared; `batch` in sequences."""

    model: str
    corpus: str
    tokens: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens:,} tokens of corpus {self.corpus}, {self.batch} sequences a step"


@dataclass(frozen=True)
class ArmResult:
    """One arm's records by seed, of one `TrainedOn`."""

    name: str
    records: dict[int, Record]

    def mean(self, key: str) -> float | None:
        """Over the seeds that recorded it; None if none did."""
        found = [float(record[key]) for record in self.records.values() if key in record]
        return statistics.fmean(found) if found else None

    def differences(self, reference: ArmResult | None) -> list[float]:
        """Of held-out losses, in percent, for each seed that both have."""
        shared = sorted(self.records.keys() & reference.records.keys()) if reference is not None else []
        pairs = [(self.records[seed]["heldout"], reference.records[seed]["heldout"]) for seed in shared if reference]
        return [100 * (own / other - 1) for own, other in pairs]

    def latest(self, key: str) -> float | None:
        """Of the record with it that was added last: what a step takes changes with the code."""
        found = [record[key] for record in self.records.values() if key in record]
        return float(found[-1]) if found else None

    @property
    def devices(self) -> list[str]:
        """Where it ran."""
        return sorted({record["device"] for record in self.records.values()})


def reference_of(name: str, arms: Mapping[str, ArmResult]) -> ArmResult | None:
    """What an arm is compared with: BF16 by the same optimizer and rate, or by the usual ones."""
    alike = reference_name(name)
    return arms[alike] if alike in arms and alike != name else arms.get(REFERENCE)


def reference_name(name: str) -> str:
    """The arm of BF16 by the same optimizer and rate."""
    _, at, rate = name.partition(" at ")
    return " ".join([REFERENCE, *(word for word in name.split() if word in OPTIMIZERS)]) + at + rate


def read(file: Path) -> dict[TrainedOn, dict[str, ArmResult]]:
    """The arms of each kind of tokens, in the order in which they were recorded; of one seed the last record counts.

    Raises:
        ValueError: a line is no record; the message has its number.
    """
    found: dict[TrainedOn, dict[str, ArmResult]] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            add(found, json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}:{number} is no record of convergence.py: {error!r}") from error
    return found


def add(found: dict[TrainedOn, dict[str, ArmResult]], record: Record) -> None:
    """A record to those of its arm."""
    record = of_record(record)
    trained = TrainedOn(*(record[key] for key in TrainedOn._fields))
    name, arms = record["arm"], found.setdefault(trained, {})
    records = arms.setdefault(name, ArmResult(name, {})).records
    records.pop(int(record["seed"]), None)  # the last one stands last
    records[int(record["seed"])] = _with_rate(record)


def _with_rate(record: Record) -> Record:
    """A record from before rates were in it: that of the whole time, compiling included, if that was recorded."""
    rate = {"tokens_per_s": record["tokens"] / max(record["seconds"], 1e-9)} if "seconds" in record else {}
    return rate | record


# The table


def table(trained: TrainedOn, arms: dict[str, ArmResult]) -> Iterator[str]:
    """Lines of Markdown, the lowest loss first."""
    reference = arms.get(REFERENCE)
    devices = sorted({device for arm in arms.values() for device in arm.devices})
    yield f"**{trained}**, on {', '.join(devices)}. {_spread(reference)}"
    yield ""
    yield "| arm | held-out loss | difference from BF16, % | bytes a parameter | peak GiB | tokens/s | seeds |"
    yield "|---" * 7 + "|"
    for arm in sorted(arms.values(), key=lambda arm: arm.mean("heldout") or 0.0):
        rate = arm.latest("tokens_per_s")
        cells = [
            arm.name,
            _number(arm.mean("heldout"), ".4f"),
            "0" if arm.name == REFERENCE else _difference(arm.differences(reference_of(arm.name, arms))),
            _number(arm.mean("bytes"), ".2f"),
            _number(arm.latest("peak_gib"), ".1f"),
            "-" if rate is None else f"{rate:,.0f}",
            str(len(arm.records)),
        ]
        yield f"| {' | '.join(cells)} |"


def _spread(reference: ArmResult | None) -> str:
    losses = [record["heldout"] for record in reference.records.values()] if reference is not None else []
    if len(losses) < 2:
        return f"The spread of {REFERENCE} over seeds is not known: it has {len(losses)}."
    spread = 100 * (max(losses) - min(losses)) / statistics.fmean(losses)
    return f"From seed to seed {REFERENCE} differs by up to {spread:.2f} %."


def _difference(found: Sequence[float]) -> str:
    if not found:
        return "-"
    spread = f" ({min(found):+.2f} to {max(found):+.2f})" if len(found) > 1 else ""
    return _mean(found) + spread


def _mean(found: Sequence[float]) -> str:
    """With its standard error (of independent seeds: sample deviation over sqrt(n)), if it has one."""
    error = f" ± {statistics.stdev(found) / math.sqrt(len(found)):.2f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):+.2f}{error}"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


# The README

_HEADING = "| setting | weight | master | moments | sum | gradient | total | held-out loss |"
_BF16 = torch.bfloat16.itemsize


class StateBytes(NamedTuple):
    """Bytes per element of a large matrix, scales included."""

    weight: float
    master: float
    moments: float

    @property
    def together(self) -> float:
        """Bytes per element of weight, master and both moments."""
        return self.weight + self.master + self.moments


def bytes_of(options: StateOptions, weight: Format) -> StateBytes:
    """Bytes per element of a weight in this format and of its states under AdamW."""
    cells = {state: (dtype, state_quant_spec(dtype, state in NONNEGATIVE)) for state, dtype in options.dtypes().items()}
    sizes = {
        state: float(dtype.itemsize) if cell is None else cell.format.bytes_per_element
        for state, (dtype, cell) in cells.items()
    }
    if (
        MASTER in sizes
        and options.store_param_remainders
        and splits(weight, torch.float32, options.master_weight_dtype)
    ):
        sizes[MASTER] = 1.0
    return StateBytes(weight.bytes_per_element, sizes.get(MASTER, 0.0), sizes[EXP_AVG] + sizes[EXP_AVG_SQ])


class CostRow(NamedTuple):
    """A row of the README's table: what it is, its arm, and bytes of weight, master and moments."""

    what: str
    arm: str
    size: StateBytes


def cost_rows() -> Iterator[CostRow]:
    """BF16, the default, and the presets, by the bytes of their formats."""
    fp8, fp4 = (_weight(name) for name in ("current", "nvfp4"))
    default = StateOptions()
    wide = bytes_of(default, fp8)
    yield CostRow("BF16, float32 master and moments", REFERENCE, wide._replace(weight=_BF16))
    yield CostRow("BF16, `torch.optim.AdamW` with BF16 moments", "bf16 AdamW", StateBytes(_BF16, 0, 2 * _BF16))
    yield CostRow("FP8, `FusedAdam`", "current", wide)
    yield CostRow("NVFP4, `FusedAdam`", "nvfp4", bytes_of(default, fp4))
    narrow, thirds = bytes_of(default, fp4), (1 / 3, 2 / 3)  # of twelve layers four are wide
    yield CostRow(
        "NVFP4, first and last two of twelve layers FP8", NVFP4_BETWEEN,
        narrow._replace(weight=thirds[0] * wide.weight + thirds[1] * narrow.weight),
    )  # fmt: skip
    for name in sorted(PRESETS):
        yield CostRow(f'FP8, `preset="{name}"`', f"current {name}", bytes_of(PRESETS[name], fp8))
    yield CostRow("FP8, FP8 moments, `master_weights=False`", "current no masters", bytes_of(NO_MASTERS, fp8))


def _weight(recipe: str) -> Any:
    cell = resolve(recipe).weight
    assert cell is not None
    return cell.format


def ranked_groups(
    groups: dict[TrainedOn, dict[str, ArmResult]], models: Sequence[str] = (DENSE, LLAMA)
) -> list[TrainedOn]:
    """Those of these models, by how many of the README's arms they have, and then by how many seeds of these."""
    wanted = [row.arm for row in cost_rows()]

    def recorded(trained: TrainedOn) -> tuple[int, int]:
        seeds = [len(groups[trained][arm].records) for arm in wanted if arm in groups[trained]]
        return len(seeds), sum(seeds)

    return sorted((trained for trained in groups if trained.model in models), key=recorded, reverse=True)


def costs(groups: dict[TrainedOn, dict[str, ArmResult]]) -> Iterator[str]:
    """Lines of the README's table; losses are of the dense model and the tokens for which most of its arms are (of
    these, those of the most seeds), or of others where an arm and BF16 were trained on them alone."""
    ranked = [groups[trained] for trained in ranked_groups(groups)]
    yield _HEADING
    yield "|---" * 8 + "|"
    for row in cost_rows():
        sizes = (*row.size, row.size.together, float(_BF16), row.size.together + _BF16)
        arms = next((arms for arms in ranked if row.arm in arms), {})
        loss = _loss_beside(arms[row.arm], reference_of(row.arm, arms)) if arms else NOT_RUN
        if row.arm == REFERENCE and arms:
            loss += _of_fewer_seeds(arms, [each.arm for each in cost_rows()])
        yield f"| {row.what} | {' | '.join(_bytes(size) for size in sizes)} | {loss} |"


def _loss_beside(arm: ArmResult, reference: ArmResult | None) -> str:
    """An arm's loss, of the seeds that it has in common with the reference, and what it differs by there."""
    found = arm.differences(reference)
    if not found:
        return _number(arm.mean("heldout"), ".3f")
    assert reference is not None
    own = statistics.fmean(arm.records[seed]["heldout"] for seed in arm.records.keys() & reference.records.keys())
    return f"{own:.3f}" if arm.name == REFERENCE else f"{own:.3f} ({_mean(found)} %)"


def _of_fewer_seeds(arms: dict[str, ArmResult], wanted: Sequence[str]) -> str:
    """What the reference came to on the seeds that all arms have, if it has others."""
    records = arms[REFERENCE].records
    shared = set(records).intersection(*(arms[arm].records for arm in wanted if arm in arms))
    if not shared or len(shared) == len(records):
        return ""
    mean = statistics.fmean(records[seed]["heldout"] for seed in shared)
    return f" ({mean:.3f} on the {len(shared)} seed{'s' * (len(shared) > 1)} that all rows share)"


def _bytes(size: float) -> str:
    return f"{size:.2f}".rstrip("0").rstrip(".")


def with_costs(text: str, lines: Iterable[str]) -> str:
    """The README's text with this table in the place of the one that it has.

    Raises:
        ValueError: it has none, or several.
    """
    if text.count(f"{_HEADING}\n") != 1:
        raise ValueError(f"the page must have one table that begins with {_HEADING}")
    head, _, rest = text.partition(f"{_HEADING}\n")
    after = dropwhile(lambda line: line.startswith("|"), rest.splitlines())
    return "\n".join([*head.splitlines(), *lines, *after]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--plot", type=Path, help="curves, as .svg or .png")
    parser.add_argument("--readme", type=Path, help="page whose table of bytes and losses is made anew")
    parser.add_argument("--model", help="whose curves are drawn, if not those of the README's table")
    asked = parser.parse_args()
    groups = read(asked.results)
    if asked.model and all(trained.model != asked.model for trained in groups):
        parser.error(f"--model {asked.model}: there are {', '.join(sorted({trained.model for trained in groups}))}")
    for trained, arms in groups.items():
        print("\n".join(table(trained, arms)), end="\n\n")
    if asked.plot:
        from benchmarks.convergence_plot import draw  # which reads this file

        trained = ranked_groups(groups, *([asked.model],) * bool(asked.model))[0]
        draw(asked.plot, trained, groups[trained])
    if asked.readme:
        asked.readme.write_text(with_costs(asked.readme.read_text(), costs(groups)))


if __name__ == "__main__":
    main()
