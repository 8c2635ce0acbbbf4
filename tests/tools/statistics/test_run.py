"""What a run does with statistics and alarms, in one process."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

from quantshard.errors import ConfigurationError
from quantshard.optimizers import FusedAdam
from quantshard.tensor import observation
from quantshard.tools.trainer.measurements import RunStatistics
from quantshard.tools.trainer.progress import Progress
from quantshard.tools.trainer.run_dir import RunDir
from quantshard.tools.trainer.settings.config import TrainSettings
from tests.tools.statistics.models import loss_of, perceptron

SETTINGS = TrainSettings(statistics_every=4)


class Run:
    """A model, trained by hand; in some steps its second layer gives NaN."""

    def __init__(self, folder, settings=SETTINGS, bad=(), capturable=False):
        self.model = perceptron()
        self.optimizer = FusedAdam(self.model.named_parameters(), lr=1e-3, capturable=capturable)
        self.run, self.bad, self.now, self.passes = RunDir(folder), bad, 0, 0
        self.model[1].register_forward_hook(lambda *a: a[2] * (math.nan if self.now in self.bad else 1.0))
        record, note = partial(self.run.append, self.run.statistics), Progress(settings, shown=True).note
        self.statistics = RunStatistics(settings, self.model, self.optimizer, record, note, 0)

    def forward_and_backward(self):
        self.passes += 1
        loss = loss_of(self.model, self.now)
        loss.backward()
        return loss

    def train(self, steps):
        with self.statistics:
            for self.now in range(1, steps + 1):
                loss = self.forward_and_backward().item()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.statistics.stepped(loss, self.forward_and_backward)

    @property
    def lines(self):
        return [json.loads(line) for line in self.run.statistics.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_skipped_step_is_run_once_more_and_named(folder, capsys):
    """Steps 3, 4 and 8 are bad: 3 is the first of two, 4 is sampled; the passes that look for it change nothing."""
    run = Run(folder, bad=(3, 4, 8))
    run.train(9)
    assert run.passes == 9 + 2 and run.optimizer.skipped_steps == 3
    told = [(line["step"], bool(line["rows"]), [alarm["kind"] for alarm in line["alarms"]]) for line in run.lines]
    assert told == [
        (3, False, ["nan", "loss spike"]),
        (4, True, ["loss spike", "nan"]),
        (8, True, ["nan", "loss spike", "nan"]),
    ]
    alarm = run.lines[0]["alarms"][0]
    assert alarm["name"] == "1"
    assert alarm["text"] == "step 3 was skipped: the output of 1 is, the first in forward order, infinite or NaN"
    assert run.lines[1]["alarms"][1]["name"] == "2.weight", "the first operand that has it, of a sampled step"
    assert (
        capsys.readouterr().out.replace("\n  ", " ").count("ALARM (nan): step 3 was skipped: the output of 1 is,") == 1
    )
    Run(folder.parent / "other", settings=replace(SETTINGS, statistics_every=0)).train(2)
    assert not (folder.parent / "other").exists(), "nothing is written where there is nothing to say"
    with (
        pytest.raises(RuntimeError, match="stop"),
        Run(folder, settings=replace(SETTINGS, statistics_every=1)).statistics,
    ):
        raise RuntimeError("stop")
    assert observation.active is None


def test_a_skipped_step_whose_nan_does_not_come_again_is_told_too(folder):
    run = Run(folder, bad=(2,))
    passes = run.forward_and_backward

    def once():
        run.bad = ()
        return passes()

    with run.statistics:
        run.now = 2
        loss = passes().item()
        run.optimizer.step()
        run.statistics.stepped(loss, once)
    alarm = run.lines[0]["alarms"][0]
    assert (alarm["kind"], alarm["name"]) == ("nan", "gradient") and "step 1 was skipped: a gradient" in alarm["text"]


@pytest.mark.parametrize("capturable", [False, True])
def test_a_step_of_large_gradients_is_told_apart(folder, capturable):
    """Without a pass made once more, as of gradients that are not finite. Step 2 has one large one, step 4 also a NaN,
    which is worse; a capturable optimizer knows it from its flags on the device."""
    run = Run(folder, replace(SETTINGS, statistics_every=0, alarm_loss_spike=0.0), capturable=capturable)
    with warnings.catch_warnings(), run.statistics:
        warnings.simplefilter("ignore")  # of a step that is not capturable
        for run.now in range(1, 6):
            loss = run.forward_and_backward().item()
            if run.now in (2, 4):
                run.model[2].weight.grad.view(-1)[3] = 2e19
            if run.now == 4:
                run.model[1].bias.grad[0] = math.nan
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.statistics.stepped(loss, run.forward_and_backward)
    alarms = [(line["step"], alarm) for line in run.lines for alarm in line["alarms"]]
    assert [(step, alarm["kind"], alarm["name"]) for step, alarm in alarms] == [
        (2, "large gradient", "2.weight"), (4, "nan", "gradient")
    ]  # fmt: skip
    assert "step 2 was skipped: the gradient of 2.weight is finite, but above 1e+19" in alarms[0][1]["text"]
    assert run.passes == 5 + 1 and run.optimizer.skipped_steps == 2 and run.optimizer.large_gradient == ""


def test_alarms_change_no_bit(folder):
    """Beside a training without statistics that skips the same steps."""
    run = Run(folder, bad=(2, 3))
    run.train(5)
    plain = Run(folder, settings=replace(SETTINGS, statistics_every=0), bad=(2, 3))
    for plain.now in range(1, 6):
        plain.forward_and_backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    for (name, value), other in zip(run.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"statistics_every": -1}, "statistics_every = -1"),
        ({"alarm_loss_spike": -1.0}, r"alarm_loss_spike = -1\.0"),
        ({"alarm_loss_spike": math.nan}, "alarm_loss_spike = nan"),
        ({"alarm_saturation": 0.0}, r"alarm_saturation = 0\.0"),
        ({"alarm_saturation": 2.0}, r"alarm_saturation = 2\.0"),
    ],
)
def test_bad_settings_are_refused(given, says):
    with pytest.raises(ConfigurationError, match=says):
        replace(SETTINGS, **given).check()
