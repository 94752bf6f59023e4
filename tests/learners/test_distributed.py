"""One learner over several ranks with DistributedDataParallel. Functions that begin with `_` run on every rank.

The oracle is one process that observes the ranks' minibatches as one.
"""

import io
import os
import re
import runpy
import socket
import time
from contextlib import redirect_stdout
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast import checkpoint
from holdfast.learners import Ballast, Sgd
from holdfast.rng import generator, seeded_globally
from test_ranks import failure, told

ROOT = Path(__file__).parents[2]
CLASSES, FEATURES, BUFFER = 5, 6, 24


class Noise:
    """A view with a generator of its own."""

    def __init__(self, seed):
        self.generator = generator(seed, "augment")

    def __call__(self, x):
        return x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


def network(norm=None):
    """A small network in float64, so that another order of summation hardly shows; with BatchNorm if asked for."""
    with seeded_globally(0, "init"):
        layers = [nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES)]
        if norm:
            layers.insert(1, nn.BatchNorm1d(16))
        model = nn.Sequential(*layers).double()
    return hf.group_batchnorm(model) if norm == "grouped" else model


def learner(kind, model, augment=None, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if kind == "sgd":
        return Sgd(model, optimizer, augment=augment)
    if kind == "er":
        return hf.ExperienceReplay(model, optimizer, buffer_size=BUFFER, augment=augment, alpha=0.7, **options)
    return hf.ConsistencyReplay(
        model, optimizer, buffer_size=BUFFER, regularizer=kind, alpha=0.5, beta=0.3, augment=augment, **options
    )


def minibatch(step, size):
    draw = generator(step, "stream")
    return torch.randn(size, FEATURES, dtype=torch.float64, generator=draw), torch.randint(
        0, CLASSES, (size,), generator=draw
    )


def observe(taught, steps, size=16):
    """The steps of a stream, of whose minibatches this rank sees its even share; returns the steps' losses."""
    rank, world = (taught.ranks.rank, taught.ranks.size) if taught.ranks else (0, 1)
    return [taught.observe(*(part.tensor_split(world)[rank] for part in minibatch(step, size))) for step in steps]


def outcome(taught):
    """Weights, and the buffer's labels and logits, which depend on everything."""
    weights = {name: value.clone() for name, value in taught.model.state_dict().items()}
    return weights, (None if taught.buffer is None else taught.buffer.contents())


def assert_close(one, other):
    for name, value in one[0].items():
        torch.testing.assert_close(value, other[0][name], rtol=1e-9, atol=1e-9)
    if one[1] is not None:
        assert torch.equal(one[1].x, other[1].x)
        assert torch.equal(one[1].y, other[1].y)
        if one[1].logits is not None:
            torch.testing.assert_close(one[1].logits, other[1].logits, rtol=1e-9, atol=1e-9)


def assert_identical(one, other):
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    for mine, theirs in zip(one[1] or (), other[1] or (), strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


# --- as one process --------------------------------------------------------------------------------------------------


def _trained(kind, options):
    taught = learner(kind, DistributedDataParallel(network()), **options)
    losses = observe(taught, range(20))
    return outcome(taught), torch.stack([each.total for each in losses])


@pytest.mark.parametrize(
    ("world", "kind", "options", "together"),
    [
        (2, "linf", {}, {}),
        (4, "mse", {"consistency_size": 3, "replay_size": 2}, {"consistency_size": 12, "replay_size": 8}),
        (2, "er", {"replay_size": 5}, {"replay_size": 10}),
        (4, "sgd", {}, {}),
        (4, "mse", {"replay_size": 40}, {"replay_size": 40}),
    ],
)
def test_ranks_learn_what_one_process_learns_from_their_minibatches_together(crew, world, kind, options, together):
    """In the last case every rank draws the whole buffer, as the one process does."""
    one = learner(kind, network(), **together)
    losses = torch.stack([each.total for each in observe(one, range(20))])
    answers = crew.run(world, _trained, kind, options)
    for answer, _ in answers:
        assert_close(answer, outcome(one))
        assert_identical(answer, answers[0][0])
    # Each rank reports its own samples' loss; their mean is that of all.
    torch.testing.assert_close(torch.stack([each for _, each in answers]).mean(dim=0), losses)


def _tokens(wrap=lambda model: model):
    """Twelve steps on sequences of three positions, with the two largest logits of each stored."""
    taught = learner("kl", wrap(network()), class_dim=-1, answers=hf.TopK(2), replay=0.5)
    rank, world = (taught.ranks.rank, taught.ranks.size) if taught.ranks else (0, 1)
    for step in range(12):
        parts = (part.unflatten(0, (8, 3)).tensor_split(world)[rank] for part in minibatch(step, 24))
        taught.observe(*parts)
    weights, stored = outcome(taught)
    return weights, stored._replace(logits=stored.logits["values"])


def _tokens_of_ranks():
    return _tokens(DistributedDataParallel)


def test_ranks_learn_tokens_as_one_process_does(crew):
    for answer in crew.run(2, _tokens_of_ranks):
        assert_close(answer, _tokens())


def _uneven():
    """Minibatches of 1 and 6 samples on two ranks."""
    taught = learner("mse", DistributedDataParallel(network()))
    for step in range(12):
        x, y = minibatch(step, 7)
        own = slice(0, 1) if taught.ranks.rank == 0 else slice(1, 7)
        taught.observe(x[own], y[own])
    return outcome(taught)


def test_ranks_may_bring_minibatches_of_different_sizes(crew):
    one, other = crew.run(2, _uneven)
    assert_identical(one, other)
    expected = hf.Reservoir(BUFFER, generator=generator(0, "buffer"))
    for step in range(12):
        if step:
            for _ in range(2):
                expected.sample(7)
        expected.add(*minibatch(step, 7))
    assert torch.equal(one[1].x, expected.contents().x)


# --- BatchNorm -------------------------------------------------------------------------------------------------------


def _normed(norm, sync):
    wrapped = DistributedDataParallel(network(norm))
    # Both together decide it; PyTorch 2.6 sets the first one itself before every pass.
    wrapped.require_forward_param_sync = wrapped.broadcast_buffers = sync
    taught = learner("mse", wrapped)
    observe(taught, range(8))
    return outcome(taught)


def test_grouped_batchnorm_gives_each_ranks_minibatches_their_own_statistics(crew):
    """One pass with grouped statistics equals three passes without, and both keep the ranks' weights alike."""
    fused, separate = crew.run(2, _normed, "grouped", True), crew.run(2, _normed, "ordinary", False)
    for name in ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias"):
        torch.testing.assert_close(fused[0][0][name], separate[0][0][name], rtol=1e-9, atol=1e-9)
        assert torch.equal(fused[0][0][name], fused[1][0][name])
    assert int(fused[0][0]["1.num_batches_tracked"]) == 1 + 7 * 3
    by_rank = [weights["1.running_mean"] for weights, _ in separate]
    assert not torch.equal(*by_rank), "running statistics are each rank's own"


def _refused(norm):
    return failure(lambda: learner("mse", DistributedDataParallel(network(norm))))


def test_ordinary_batchnorm_needs_to_be_grouped_first(crew):
    assert crew.run(2, _refused, "grouped") == [None, None]
    for kind, message in crew.run(2, _refused, "ordinary"):
        assert kind == "UsageError"
        assert "apply holdfast.group_batchnorm to the model before wrapping it" in message


def _turned():
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return failure(lambda: Ballast(model, optimizer, buffer_size=BUFFER, turn=1.0))


def test_a_layer_outside_of_the_model_would_be_trained_apart(crew):
    for kind, message in crew.run(2, _turned):
        assert kind == "UsageError"
        assert "turn has a layer of its own" in message


def _replayed_with_batchnorm():
    taught = learner("er", DistributedDataParallel(network("ordinary")))
    observe(taught, range(5))
    return outcome(taught)


def test_experience_replay_takes_one_pass_and_any_batchnorm(crew):
    one, other = crew.run(2, _replayed_with_batchnorm)
    assert torch.equal(one[0]["3.weight"], other[0]["3.weight"])


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _saved(kind, steps, path):
    taught = learner(kind, DistributedDataParallel(network()))
    observe(taught, steps)
    taught.save(path, {"step": len(steps)})
    return Path(path).is_file()


def _continued(kind, steps, path):
    taught = learner(kind, DistributedDataParallel(network()), lr=99)
    extra = taught.load(path)
    observe(taught, steps)
    return extra, outcome(taught), taught.buffer.state_dict()["generator"]


@pytest.mark.parametrize("kind", ["linf", "er"])
def test_four_ranks_saved_continue_as_two_and_as_one_process(crew, tmp_path, kind):
    path = str(tmp_path / "learner.safetensors")
    whole = learner(kind, network())
    observe(whole, range(20))
    random = whole.buffer.generator.get_state()

    assert all(crew.run(4, _saved, kind, range(10), path)), "save returned before the checkpoint was there"
    assert set(checkpoint.read(Path(path), "learner").state["learner"]["model"]) == set(whole.model.state_dict())

    for world in (2, 4):
        for extra, after, there in crew.run(world, _continued, kind, range(10, 20), path):
            assert extra == {"step": 10}
            assert_close(after, outcome(whole))
            assert torch.equal(there, random)
    alone = learner(kind, network(), lr=99)
    assert alone.load(path) == {"step": 10}
    observe(alone, range(10, 20))
    assert_close(outcome(alone), outcome(whole))
    assert torch.equal(alone.buffer.generator.get_state(), random)


def test_one_process_saved_continues_as_two_ranks(crew, tmp_path):
    whole = learner("mse", network())
    observe(whole, range(10))
    whole.save(tmp_path / "one")
    observe(whole, range(10, 20))
    for extra, after, _ in crew.run(2, _continued, "mse", range(10, 20), str(tmp_path / "one")):
        assert extra == {}
        assert_close(after, outcome(whole))


def _noisy(steps, stop, path):
    """Each rank's view has a seed of its own; with `stop`, saved there and continued by a new learner."""
    rank = dist.get_rank()
    taught = learner("mse", DistributedDataParallel(network()), Noise(rank))
    observe(taught, range(stop or steps))
    if stop:
        taught.save(path)
        taught = learner("mse", DistributedDataParallel(network()), Noise(77))
        taught.load(path)
        observe(taught, range(stop, steps))
    return outcome(taught), taught.augment.generator.get_state()


def test_resumed_on_the_same_ranks_it_is_as_if_never_stopped_bit_for_bit(crew, tmp_path):
    path = str(tmp_path / "noisy")
    unstopped, stopped = crew.run(2, _noisy, 12, None, path), crew.run(2, _noisy, 12, 5, path)
    for (one, views), (other, continued) in zip(unstopped, stopped, strict=True):
        assert_identical(one, other)
        assert torch.equal(views, continued)
    assert not torch.equal(unstopped[0][1], unstopped[1][1])


def _dropped(steps, stop, path):
    """A network with dropout, which draws from each rank's global generator."""
    model = nn.Sequential(network(), nn.Dropout(0.2))
    torch.manual_seed(dist.get_rank())
    taught = learner("mse", DistributedDataParallel(model))
    observe(taught, range(stop or steps))
    if stop:
        taught.save(path)
        torch.manual_seed(99)
        taught = learner("mse", DistributedDataParallel(nn.Sequential(network(), nn.Dropout(0.2))))
        taught.load(path)
        observe(taught, range(stop, steps))
    return outcome(taught)


def test_dropout_continues_on_every_rank(crew, tmp_path):
    path = str(tmp_path / "dropout")
    for one, other in zip(crew.run(2, _dropped, 10, None, path), crew.run(2, _dropped, 10, 4, path), strict=True):
        assert_identical(one, other)


def _continued_with_noise(path):
    taught = learner("mse", DistributedDataParallel(network()), Noise(77))
    taught.load(path)
    return taught.augment.generator.get_state()


def test_views_of_ranks_that_were_not_there_go_their_own_way(crew, tmp_path):
    path = str(tmp_path / "noisy")
    saved = [views for _, views in crew.run(2, _noisy, 5, None, path)]
    crew.run(2, _noisy, 5, 5, path)
    states = crew.run(4, _continued_with_noise, path)
    assert all(torch.equal(one, other) for one, other in zip(saved, states, strict=False))
    assert len({bytes(state.tolist()) for state in states}) == 4
    alone = learner("mse", network(), Noise(77))
    alone.load(path)
    assert torch.equal(alone.augment.generator.get_state(), saved[0])


# --- what goes wrong -------------------------------------------------------------------------------------------------


def _made(sizes, seeds):
    rank = dist.get_rank()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return failure(lambda: hf.ExperienceReplay(model, optimizer, buffer_size=sizes[rank], seed=seeds[rank]))


@pytest.mark.parametrize(("sizes", "seeds"), [([5, 6], [0, 0]), ([5, 5], [0, 1])])
def test_ranks_made_differently_are_refused_on_every_rank(crew, sizes, seeds):
    for kind, message in crew.run(2, _made, sizes, seeds):
        assert kind == "UsageError"
        assert "the ranks differ in what they bring: rank 0: a buffer of 5 samples" in message
        assert "Give all of them the same settings" in message


def _saved_nowhere(path):
    taught = learner("mse", DistributedDataParallel(network()))
    observe(taught, range(2))
    error = failure(lambda: taught.save(path))
    observe(taught, range(2, 4))  # and goes on
    return error


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(crew, tmp_path):
    (tmp_path / "file").write_text("")
    one, other = crew.run(2, _saved_nowhere, str(tmp_path / "file" / "below"))
    assert one[0] == other[0] == "CheckpointError"
    assert one[1].startswith("the checkpoint could not be written")
    assert other[1] == f"rank 0 failed: {one[1]}"


def _saved_with_other_views(path):
    rank = dist.get_rank()
    taught = learner("mse", DistributedDataParallel(network()), Noise(0) if rank else None)
    return failure(lambda: taught.save(path))


def test_views_of_different_kinds_are_an_error_on_every_rank(crew, tmp_path):
    one, other = crew.run(2, _saved_with_other_views, str(tmp_path / "saved"))
    assert one == other
    assert "rank 0: views without a generator; rank 1: views with a generator" in one[1]


def _loaded(paths):
    taught = learner("mse", DistributedDataParallel(network()))
    observe(taught, range(2))
    before = outcome(taught)
    error = failure(lambda: taught.load(paths[taught.ranks.rank]))
    assert_identical(before, outcome(taught))
    return error


def test_a_checkpoint_that_one_rank_cannot_see_is_an_error_on_every_rank(crew, tmp_path):
    saved, path = learner("mse", network()), str(tmp_path / "saved")
    observe(saved, range(1))
    saved.save(path)
    one, other = crew.run(2, _loaded, [path, str(tmp_path / "gone")])
    assert one == ("CheckpointError", f"rank 1 failed: {other[1]}")
    assert other[1].startswith("there is no checkpoint")


def test_a_checkpoint_of_something_else_is_refused_on_every_rank(crew, tmp_path):
    learner("er", network()).save(tmp_path / "er")
    for kind, message in crew.run(2, _loaded, [str(tmp_path / "er")] * 2):
        assert kind == "UsageError"
        assert "this is a ConsistencyReplay, but the saved learner is a ExperienceReplay" in message


FAULTS = {
    "a negative label": lambda x, y: (x, y - CLASSES),
    "a label too large": lambda x, y: (x, y + 9),  # which only the outputs can tell
    "labels of another type": lambda x, y: (x, y.float()),
    "too few labels": lambda x, y: (x, y[1:]),
    "NaN": lambda x, y: (x.where(x > 0, torch.nan), y),
    "another type": lambda x, y: (x.float(), y),
    "no tensor": lambda x, y: (None, y),
}


def _learned_around(kind, fault, culprits, at):
    """Six steps with a bad minibatch on some ranks before step `at`; the error, and what was learned around it.

    With BatchNorm, dropout and noise, so that all that a pass moves counts; and the same without the bad minibatch.
    """
    rank, error, ends = dist.get_rank(), None, []
    for change in (FAULTS[fault], None):
        torch.manual_seed(rank)
        model = DistributedDataParallel(nn.Sequential(network("grouped"), nn.Dropout(0.2)))
        taught = learner(kind, model, Noise(rank))
        observe(taught, range(at))
        if change:
            share = [part.tensor_split(taught.ranks.size)[rank] for part in minibatch(at, 16)]
            bad = change(*share) if rank in culprits else share
            error = failure(partial(taught.observe, *bad))
        observe(taught, range(at, 6))
        ends.append((outcome(taught), torch.get_rng_state(), taught.augment.generator.get_state()))
    return error, ends


@pytest.mark.parametrize(
    ("kind", "fault", "at"),
    [
        # Every method with every fault, and both of them at the first step and later: each pair of the three once.
        *(
            (kind, fault, 3 * ((number + step) % 2))
            for number, kind in enumerate(["sgd", "er", "mse"])
            for step, fault in enumerate(fault for fault in FAULTS if fault != "another type")
        ),
        *product(["er", "mse"], ["another type"], [3]),  # than that of stored samples
    ],
)
def test_what_one_rank_refuses_all_refuse_and_go_on_as_if_it_had_not_been(crew, kind, fault, at):
    one, other = crew.run(2, _learned_around, kind, fault, [1], at)
    assert other[0][0] == ("TrainingError" if fault == "NaN" else "UsageError")
    assert one[0] == (other[0][0], f"rank 1 failed: {other[0][1]}")
    for _, (with_fault, without) in (one, other):
        assert_identical(with_fault[0], without[0])
        assert torch.equal(with_fault[1], without[1])
        assert torch.equal(with_fault[2], without[2])


@pytest.mark.parametrize("fault", ["a negative label", "a label too large", "NaN"])
def test_what_several_ranks_refuse(crew, fault):
    answers = crew.run(4, _learned_around, "mse", fault, [1, 3], 2)
    for rank, (error, (with_fault, without)) in enumerate(answers):
        assert error[1].startswith("rank 1 failed: ") == (rank not in (1, 3))
        assert_identical(with_fault[0], without[0])


def _unwatched(culprit):
    """Without checks, a NaN on one rank goes into all weights, and nobody waits for anyone."""
    taught = learner("mse", DistributedDataParallel(network()), validate=False)
    x, y = minibatch(0, 4)
    taught.observe(x * torch.nan if taught.ranks.rank == culprit else x, y)
    return bool(taught.model[0].weight.isnan().all())


def test_without_validation_nothing_is_refused(crew):
    assert crew.run(2, _unwatched, 1) == [True, True]


# --- the example ----------------------------------------------------------------------------------------------------


def _example(port=None):
    """The lines that the example prints; with a port, as the rank of a job that torchrun has started."""
    if port is not None:
        me = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
        os.environ |= {name: str(value) for name, value in me.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        dist.destroy_process_group()
    with torch.random.fork_rng(), redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "examples" / "distributed.py"), run_name="__main__")
    return printed.getvalue().splitlines()


def test_the_example_learns_the_same_on_two_ranks_as_on_one_process(crew):
    """On ranks that are there already. A page of the tutorials starts some with torchrun, and a test walks it."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    one = _example()
    two, nothing = crew.run(2, _example, port)
    crew.disband()
    assert nothing == []
    shares = [[float(share) for share in re.findall(r"([\d.]+) %", "\n".join(lines))] for lines in (one, two)]
    assert shares[1] == pytest.approx(shares[0], abs=1)  # sums in another order
    assert shares[0][-1] > 70
    assert one[-1].startswith("200 samples in the buffer of 1 process(es)")
    assert two[-1] == one[-1].replace("1 process", "2 process")


# --- one rank, in this process ---------------------------------------------------------------------------------------


def test_the_model_is_the_one_inside(alone):
    model = network()
    taught = learner("mse", DistributedDataParallel(model))
    assert taught.model is model
    assert isinstance(taught.buffer, hf.ShardedReservoir)
    assert taught.ranks.size == 1


def test_a_job_of_one_rank_is_one_process(alone, tmp_path):
    one = learner("mse", network("grouped"), Noise(3))
    other = learner("mse", DistributedDataParallel(deepcopy(one.model)), Noise(3))
    observe(one, range(10))
    observe(other, range(10))
    assert_identical(outcome(one), outcome(other))
    other.save(tmp_path / "saved")
    one.load(tmp_path / "saved")
    other.load(tmp_path / "saved")
    observe(one, range(10, 15))
    observe(other, range(10, 15))
    assert_identical(outcome(one), outcome(other))
    with pytest.raises(hf.UsageError, match="group_batchnorm"):
        learner("mse", DistributedDataParallel(network("ordinary")))


def test_without_ranks_nothing_is_new():
    taught = learner("mse", network())
    assert taught.ranks is None
    assert type(taught.buffer) is hf.Reservoir
    assert taught.network is taught.model


# --- a rank that does not come ---------------------------------------------------------------------------------------


def _late_for_the_gradients():
    taught = learner("linf", DistributedDataParallel(network()))

    def step():
        losses = taught.losses(*minibatch(0, 8))
        if taught.ranks.rank == 1:
            time.sleep(1.2)
        taught.descend(losses)
        taught.commit(losses)

    return told(step)


def test_a_rank_that_waits_for_gradients_says_so(crew):
    said, nothing = crew.run(2, _late_for_the_gradients)
    assert (len(said), nothing) == (1, [])
