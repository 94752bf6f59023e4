"""Evaluation against a naive loop over single images."""

import pytest
import torch
from torch import nn

from holdfast import evaluation
from holdfast.augment import Normalize
from holdfast.data import ImageSet
from holdfast.evaluation import Exam, evaluate, predict

CLASSES = 6


def as_floats(images):
    return images.float() / 255


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, CLASSES)
        )
        network(torch.rand(50, 1, 6, 6))  # running statistics other than the initial ones
    return network


@pytest.fixture
def tests():
    draw = torch.Generator().manual_seed(1)
    sets = []
    for count, classes in ((31, [0, 1]), (17, [2, 3, 5]), (5, range(CLASSES))):
        mask = torch.zeros(CLASSES, dtype=torch.bool)
        mask[list(classes)] = True
        labels = torch.tensor(classes)[torch.randint(0, len(classes), (count,), generator=draw)]
        images = torch.randint(0, 256, (count, 1, 6, 6), generator=draw, dtype=torch.uint8)
        sets.append(Exam(ImageSet(images, labels), mask))
    return sets


def naive_row(model, tests):
    """Accuracy in percent per set, image by image: over all classes, and over the classes of the task."""
    model.eval()
    class_il, task_il = [], []
    for (images, labels), mask in tests:
        hits = within = 0
        for image, label in zip(images, labels.tolist(), strict=True):
            scores = model(image[None].float() / 255)[0].tolist()
            hits += max(range(CLASSES), key=scores.__getitem__) == label
            allowed = [k for k in range(CLASSES) if mask[k]]
            within += max(allowed, key=scores.__getitem__) == label
        class_il.append(100 * hits / len(labels))
        task_il.append(100 * within / len(labels))
    model.train()
    return class_il, task_il


def test_row_is_that_of_a_naive_loop(model, tests):
    expected = naive_row(model, tests)
    assert expected[0] != expected[1]
    row = evaluate(model, tests, as_floats)
    assert row.class_il == pytest.approx(expected[0])
    assert row.task_il == pytest.approx(expected[1])


def test_task_il_only_counts_the_tasks_own_classes(model, tests):
    """A network that always answers a class of another task: nothing right over all classes, all over its own."""
    with torch.no_grad():
        model[-1].weight.zero_()
        model[-1].bias.copy_(torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0, 0.0]))
    (images, _), mask = tests[0]
    row = evaluate(model, [Exam(ImageSet(images, torch.zeros(31, dtype=torch.int64)), mask)], as_floats)
    assert row == ([0.0], [100.0])


def test_no_test_sets_but_one(model, tests):
    assert evaluate(model, tests[:1], as_floats).class_il == evaluate(model, tests, as_floats).class_il[:1]


@pytest.mark.parametrize("elements", [1, 36, 36 * 7, 36 * 31, 10**9])
def test_any_batch_size_gives_the_same(model, tests, monkeypatch, elements):
    expected = predict(model, tests[0].images.images, as_floats)
    shown = []
    monkeypatch.setattr(evaluation, "CPU_BATCH_ELEMENTS", elements)
    found = predict(model, tests[0].images.images, lambda images: shown.append(len(images)) or as_floats(images))
    assert sum(shown) == 31
    assert max(shown) == min(31, max(1, elements // 36))
    torch.testing.assert_close(found, expected)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored_module_by_module(model, tests, training):
    model.train(training)
    model[1].eval()  # a frozen BatchNorm
    modes = [module.training for module in model.modules()]
    statistics = model[1].running_mean.clone()
    evaluate(model, tests, as_floats)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[1].running_mean, statistics)


def test_mode_is_restored_after_a_failure(model):
    with pytest.raises(RuntimeError):
        predict(model, torch.zeros(2, 1, 9, 9, dtype=torch.uint8), as_floats)
    assert all(module.training for module in model.modules())


def test_evaluation_mode_is_used_whatever_the_mode(model, tests):
    images = tests[0].images.images
    model.train()
    in_training = predict(model, images, as_floats)
    model.eval()
    assert torch.equal(in_training, predict(model, images, as_floats))
    assert torch.equal(in_training, model(as_floats(images)).detach())


def test_logits_are_ordinary_tensors(model, tests):
    """They can be scaled by a learned temperature, and written to."""
    logits = predict(model, tests[0].images.images, as_floats)
    assert not logits.requires_grad
    temperature = torch.ones((), requires_grad=True)
    (logits / temperature).sum().backward()
    logits.zero_()


def test_constants_of_a_view_first_used_in_evaluation_serve_training(model, tests):
    normalize = Normalize((0.5,), (0.25,))
    evaluate(model, tests, normalize)
    images = normalize(tests[0].images.images).requires_grad_()
    model(images).sum().backward()
    assert torch.isfinite(images.grad).all()


def test_empty_set_gives_no_logits(model):
    assert predict(model, torch.zeros(0, 1, 6, 6, dtype=torch.uint8), as_floats).shape == (0, CLASSES)


def test_reduced_precision_gives_float32_close_to_full(model, tests):
    images = tests[0].images.images
    reduced = predict(model, images, as_floats, "bfloat16")
    assert reduced.dtype == torch.float32
    full = predict(model, images, as_floats)
    assert not torch.equal(reduced, full)
    torch.testing.assert_close(reduced, full, rtol=0.05, atol=0.05)


def test_a_device_of_another_kind():
    """Neither a CPU nor a GPU of CUDA's: no batch size is listed for it."""
    images = torch.zeros(5, 1, 2, 2, device="meta")
    assert predict(torch.nn.Flatten(), images, lambda x: x).shape == (5, 4)
