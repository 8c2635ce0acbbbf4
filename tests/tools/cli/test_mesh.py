"""Meshes as text: what is understood, what is refused, and in which order the axes stand. No process groups."""

from dataclasses import replace

import pytest

from quantshard.errors import ConfigurationError
from quantshard.tools.trainer.settings.config import TrainSettings
from quantshard.tools.trainer.settings.values import MeshSpec


@pytest.mark.parametrize(
    ("text", "axes", "canonical"),
    [
        ("dp_replicate=1,dp_shard=2,tp=2", MeshSpec(dp_shard=2, tp=2), "dp_shard=2,tp=2"),
        ("dp_shard=4", MeshSpec(dp_shard=4), "dp_shard=4"),
        ("tp=2", MeshSpec(tp=2), "dp_shard=1,tp=2"),
        (" tp = 3 , dp_replicate=2", MeshSpec(dp_replicate=2, tp=3), "dp_replicate=2,dp_shard=1,tp=3"),
        ("dp_shard=1", MeshSpec(), "dp_shard=1"),
        ("ep=2,dp_shard=3", MeshSpec(dp_shard=3, ep=2), "dp_shard=3,ep=2"),
    ],
)
def test_understood(text, axes, canonical):
    assert MeshSpec.parse(text) == axes and str(axes) == canonical and MeshSpec.parse(canonical) == axes
    assert axes.processes == axes.data_parallel * axes.tp
    assert replace(TrainSettings(), mesh=text, heads=6, hidden=24).resolved().mesh == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pp=2", "there is no axis 'pp'; write AXIS=SIZE with dp_replicate, dp_shard, ep, cp, tp"),
        ("dp_shrad=2", "there is no axis 'dp_shrad'; did you mean 'dp_shard'? write AXIS=SIZE"),
        ("dp_shard=2,tp=0", "'tp=0' must be AXIS=SIZE"),
        ("tp=2,tp=2", "'tp=2' must be AXIS=SIZE, with each axis once"),
        ("dp_shard", "'dp_shard' must be AXIS=SIZE"),
        ("dp_shard=2;tp=2", "'dp_shard=2;tp=2' must be AXIS=SIZE"),
        ("dp_shard=2,,tp=2", "there is no axis ''"),
        ("dp_shard=-1", "'dp_shard=-1' must be AXIS=SIZE"),
        ("tp=1000000000", "'tp=1000000000' must be AXIS=SIZE"),
        (" ", "there is no axis ''"),
    ],
)
def test_refused_in_one_line(text, says):
    with pytest.raises(ConfigurationError) as caught:
        replace(TrainSettings(), mesh=text).check()
    assert says in str(caught.value) and repr(text) in str(caught.value) and "\n" not in str(caught.value)


def test_what_can_be_divided_is_not_refused():
    replace(TrainSettings(), mesh="tp=4", ffn=204).check()
    replace(TrainSettings(), mesh="tp=4", ffn=208, recipe="nvfp4").check()
    replace(TrainSettings(), mesh="dp_replicate=2,dp_shard=3", heads=1, hidden=10).check()
    replace(TrainSettings(), mesh="tp=2", architecture="gpt", kv_heads=2).check()


def test_processes_must_be_the_product():
    settings = replace(TrainSettings(), mesh="dp_shard=2,tp=2")
    settings.check_ranks(4)
    for ranks in (1, 2, 3, 8):
        with pytest.raises(ConfigurationError, match=f"dp_shard=2,tp=2 is of 4 processes, but {ranks} are started"):
            settings.check_ranks(ranks)


def test_the_batch_is_divided_over_data_parallel_ranks():
    settings = replace(TrainSettings(), mesh="dp_shard=3,tp=2", global_batch=6)
    settings.check_ranks(6)
    assert settings.sequences_at_once(settings.axes(6)) == 2
    with pytest.raises(ConfigurationError, match=r"over 3 data-parallel processes x micro"):
        replace(settings, global_batch=8).check_ranks(6)


@pytest.mark.parametrize(
    ("batch", "mesh", "asked", "divided"),
    [(8, "dp_shard=2,tp=2", "auto", True), (6, "dp_shard=2,tp=2", "auto", False), (6, "dp_shard=2", "on", False),
     (8, "dp_shard=2,tp=2", "off", False), (8, "dp_shard=2,tp=2", "on", True), (6, "tp=2", "on", True)],
)  # fmt: skip
def test_sequence_parallelism_where_sequences_come_out_even(batch, mesh, asked, divided):
    settings = replace(TrainSettings(), global_batch=batch, mesh=mesh, sequence_parallel=asked)
    axes = MeshSpec.parse(mesh)
    settings.check_ranks(axes.processes)
    assert settings.divides_sequences(axes) == divided


def test_sequence_parallelism_that_cannot_be_is_refused_if_asked_for():
    settings = replace(TrainSettings(), global_batch=6, mesh="dp_shard=2,tp=2", sequence_parallel="on")
    with pytest.raises(ConfigurationError, match=r"the 3 sequences of a micro-batch over tp = 2; .* a multiple of 4"):
        settings.check_ranks(4)
    with pytest.raises(ConfigurationError, match="sequence_parallel = 'yes': choose one of: auto, on, off"):
        replace(settings, sequence_parallel="yes").check()
